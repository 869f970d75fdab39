/* The Python module. Its functions take the addresses of tensors, which the Python side has checked. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "native.h"

struct version {
    const char *name;
    enum outcome (*upper_bound)(const struct step *);
    enum outcome (*covariance_update)(const struct statistics *);
};

/* Those that this processor can run, the fastest last. */
static struct version versions[3];
static int num_versions;

static void find_versions(void)
{
    num_versions = 0;
    versions[num_versions++] = (struct version){"baseline", upper_bound_baseline, covariance_update_baseline};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        versions[num_versions++] = (struct version){"avx2", upper_bound_avx2, covariance_update_avx2};
    if (__builtin_cpu_supports("avx512f"))
        versions[num_versions++] = (struct version){"avx512", upper_bound_avx512, covariance_update_avx512};
#endif
}

static int is_version(int version)
{
    if (version >= 0 && version < num_versions)
        return 1;
    PyErr_Format(PyExc_IndexError, "version must lie in [0, %d), got %d", num_versions, version);
    return 0;
}

static PyObject *conclude(enum outcome outcome, const char *labels, long long num_classes)
{
    if (outcome == NO_MEMORY)
        return PyErr_NoMemory();
    if (outcome == OUT_OF_RANGE)
        return PyErr_Format(PyExc_IndexError, "%s must lie in [0, %lld)", labels, num_classes);
    Py_RETURN_NONE;
}

/* The addresses of a tuple; false, with an exception set, if it does not hold just as many. */
static int get_addresses(PyObject *tuple, void **addresses, Py_ssize_t count)
{
    if (PyTuple_Size(tuple) != count) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "expected %zd addresses", count);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        addresses[i] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, i));
        if (addresses[i] == NULL && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static PyObject *call_upper_bound(PyObject *module, PyObject *args)
{
    struct step step;
    int version;
    long long num_labeled, num_unlabeled, num_classes, num_features;
    PyObject *inputs, *outputs;
    void *in[10], *out[11];
    (void)module;
    if (!PyArg_ParseTuple(args, "i(LLLL)O(fff)ppO", &version, &num_labeled, &num_unlabeled, &num_classes,
                          &num_features, &inputs, &step.strength, &step.ss_weight, &step.beta, &step.diagonal,
                          &step.argmax_in_candidates, &outputs))
        return NULL;
    if (!get_addresses(inputs, in, 10) || !get_addresses(outputs, out, 11))
        return NULL;
    if (!is_version(version))
        return NULL;
    step.num_labeled = num_labeled;
    step.num_unlabeled = num_unlabeled;
    step.num_classes = num_classes;
    step.num_features = num_features;
    step.labeled = in[0];
    step.strong = in[1];
    step.weak = in[2];
    step.weight = in[3];
    step.covariance = in[4];
    step.labels = in[5];
    step.pseudo_labels = in[6];
    step.candidates = in[7];
    step.labeled_candidates = in[8];
    step.thresholds = in[9];
    step.values = out[0];
    step.grad_rows = out[1];
    step.grad_weight = out[2];
    step.odds = out[3];
    step.grad_odds = out[4];
    step.centred = out[5];
    step.gram = out[6];
    step.product = out[7];
    step.confidence = out[8];
    step.prediction = out[9];
    step.mask = out[10];
    enum outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = versions[version].upper_bound(&step);
    Py_END_ALLOW_THREADS
    return conclude(outcome, "labels and pseudo_labels", num_classes);
}

static PyObject *call_covariance_update(PyObject *module, PyObject *args)
{
    struct statistics state;
    int version;
    long long num_classes, num_features, num_samples;
    PyObject *tensors;
    void *addresses[5];
    (void)module;
    if (!PyArg_ParseTuple(args, "i(LLL)Op", &version, &num_classes, &num_features, &num_samples, &tensors,
                          &state.diagonal))
        return NULL;
    if (!get_addresses(tensors, addresses, 5) || !is_version(version))
        return NULL;
    state.num_classes = num_classes;
    state.num_features = num_features;
    state.num_samples = num_samples;
    state.covariance = addresses[0];
    state.mean = addresses[1];
    state.count = addresses[2];
    state.features = addresses[3];
    state.labels = addresses[4];
    enum outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = versions[version].covariance_update(&state);
    Py_END_ALLOW_THREADS
    return conclude(outcome, "labels", num_classes);
}

static PyObject *call_class_activation_labels(PyObject *module, PyObject *args)
{
    long long count, num_classes;
    unsigned long long logits, candidates, labels;
    (void)module;
    if (!PyArg_ParseTuple(args, "LLKKK", &count, &num_classes, &logits, &candidates, &labels))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    class_activation_labels(count, num_classes, (const float *)(uintptr_t)logits,
                            (const uint8_t *)(uintptr_t)candidates, (int64_t *)(uintptr_t)labels);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"covariance_update", call_covariance_update, METH_VARARGS,
     "covariance_update(version, sizes, tensors, diagonal)"},
    {"class_activation_labels", call_class_activation_labels, METH_VARARGS,
     "class_activation_labels(count, num_classes, logits, candidates, labels)"},
    {"upper_bound", call_upper_bound, METH_VARARGS,
     "upper_bound(version, sizes, inputs, numbers, diagonal, argmax_in_candidates, outputs)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    find_versions();
    PyObject *module = PyModule_Create(&definition), *names = PyTuple_New(num_versions);
    if (module == NULL || names == NULL)
        goto failed;
    for (int i = 0; i < num_versions; ++i) {
        PyObject *name = PyUnicode_FromString(versions[i].name);
        if (name == NULL || PyTuple_SetItem(names, i, name) < 0)
            goto failed;
    }
    if (PyModule_AddObjectRef(module, "VERSIONS", names) < 0)
        goto failed;
    Py_DECREF(names);
    return module;
failed:
    Py_XDECREF(names);
    Py_XDECREF(module);
    return NULL;
}
