/* The Python module. Its one function takes the addresses of tensors, which the Python side has checked. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "upper_bound.h"

struct version {
    const char *name;
    enum outcome (*function)(const struct step *);
};

/* Those that this processor can run, the fastest last. */
static struct version versions[3] = {{"baseline", upper_bound_baseline}};
static int num_versions = 1;

static void find_versions(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        versions[num_versions++] = (struct version){"avx2", upper_bound_avx2};
    if (__builtin_cpu_supports("avx512f"))
        versions[num_versions++] = (struct version){"avx512", upper_bound_avx512};
#endif
}

static PyObject *call_upper_bound(PyObject *module, PyObject *args)
{
    struct step step;
    int version;
    long long sizes[4];
    unsigned long long in[7], out[8];
    (void)module;
    if (!PyArg_ParseTuple(args, "i(LLLL)(KKKKKKK)(fff)p(KKKKKKKK)", &version, &sizes[0], &sizes[1], &sizes[2],
                          &sizes[3], &in[0], &in[1], &in[2], &in[3], &in[4], &in[5], &in[6], &step.strength,
                          &step.ss_weight, &step.beta, &step.argmax_in_candidates, &out[0], &out[1], &out[2], &out[3],
                          &out[4], &out[5], &out[6], &out[7]))
        return NULL;
    if (version < 0 || version >= num_versions)
        return PyErr_Format(PyExc_IndexError, "version must lie in [0, %d), got %d", num_versions, version);
    step.num_labeled = sizes[0];
    step.num_unlabeled = sizes[1];
    step.num_classes = sizes[2];
    step.num_slots = sizes[3];
    step.rows = (const float *)(uintptr_t)in[0];
    step.gram = (const float *)(uintptr_t)in[1];
    step.slots = (const int64_t *)(uintptr_t)in[2];
    step.labels = (const int64_t *)(uintptr_t)in[3];
    step.candidates = (const uint8_t *)(uintptr_t)in[4];
    step.labeled_candidates = (const uint8_t *)(uintptr_t)in[5];
    step.thresholds = (const float *)(uintptr_t)in[6];
    step.values = (float *)(uintptr_t)out[0];
    step.odds = (float *)(uintptr_t)out[1];
    step.grad_odds = (float *)(uintptr_t)out[2];
    step.grad_rows = (float *)(uintptr_t)out[3];
    step.grad_gram = (float *)(uintptr_t)out[4];
    step.confidence = (float *)(uintptr_t)out[5];
    step.prediction = (int64_t *)(uintptr_t)out[6];
    step.mask = (uint8_t *)(uintptr_t)out[7];
    enum outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = versions[version].function(&step);
    Py_END_ALLOW_THREADS
    if (outcome == NO_MEMORY)
        return PyErr_NoMemory();
    if (outcome == OUT_OF_RANGE)
        return PyErr_Format(PyExc_IndexError, "labels and pseudo_labels must lie in [0, %lld)", sizes[2]);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"upper_bound", call_upper_bound, METH_VARARGS,
     "upper_bound(version, sizes, inputs, numbers, argmax_in_candidates, outputs)"},
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
