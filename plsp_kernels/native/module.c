/* The Python module. Its functions take addresses of tensors that __init__.py has validated. */
#include "binding.h"

#include "native.h"

struct version {
    const char *name;
    enum outcome (*upper_bound)(const struct step *);
    enum outcome (*covariance_update)(const struct statistics *);
    enum outcome (*cross_entropy)(const struct batch *);
};

#define FUNCTIONS(version) {#version, upper_bound_##version, covariance_update_##version, cross_entropy_##version}

/* Versions that this processor can run, fastest last. */
static struct version versions[3];
static int num_versions;

static void find_versions(void)
{
    num_versions = 0;
    versions[num_versions++] = (struct version)FUNCTIONS(baseline);
#if defined(__x86_64__)
    if (has_avx2())
        versions[num_versions++] = (struct version)FUNCTIONS(avx2);
    if (has_avx512())
        versions[num_versions++] = (struct version)FUNCTIONS(avx512);
#endif
}

static PyObject *conclude(enum outcome outcome, long long num_classes)
{
    if (outcome == DONE)
        Py_RETURN_NONE;
    if (outcome == NO_MEMORY)
        return PyErr_NoMemory();
    const char *name = outcome == BAD_LABELS ? "labels" : "pseudo_labels";
    return PyErr_Format(PyExc_IndexError, "%s must lie in [0, %lld)", name, num_classes);
}

#define SET_STEP(type, name) step.name = *next++;
#define SET_STATE(type, name) state.name = *next++;
#define SET_BATCH(type, name) batch.name = *next++;

static PyObject *call_upper_bound(PyObject *module, PyObject *args)
{
    enum { NUM_INPUTS = STEP_INPUTS(ONE_MORE), NUM_OUTPUTS = STEP_OUTPUTS(ONE_MORE) };
    struct step step;
    int version;
    PyObject *inputs, *outputs;
    void *arrays[NUM_INPUTS + NUM_OUTPUTS], **next = arrays;
    (void)module;
    float *upstream = step.upstream;
    if (!PyArg_ParseTuple(args, "i(LLLL)O(ffffff)(pp)O", &version, &step.num_labeled, &step.num_unlabeled,
                          &step.num_classes, &step.num_features, &inputs, &step.strength, &step.ss_weight, &step.beta,
                          &upstream[0], &upstream[1], &upstream[2], &step.diagonal, &step.argmax_in_candidates,
                          &outputs))
        return NULL;
    if (!is_version(version, num_versions) || !get_addresses(inputs, arrays, NUM_INPUTS) ||
        !get_addresses(outputs, arrays + NUM_INPUTS, NUM_OUTPUTS))
        return NULL;
    STEP_INPUTS(SET_STEP)
    STEP_OUTPUTS(SET_STEP)
    enum outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = versions[version].upper_bound(&step);
    Py_END_ALLOW_THREADS
    return conclude(outcome, step.num_classes);
}

static PyObject *call_covariance_update(PyObject *module, PyObject *args)
{
    enum { NUM_ARRAYS = STATISTICS(ONE_MORE) };
    struct statistics state;
    int version;
    PyObject *addresses;
    void *arrays[NUM_ARRAYS], **next = arrays;
    (void)module;
    if (!PyArg_ParseTuple(args, "i(LLL)Op", &version, &state.num_classes, &state.num_features, &state.num_samples,
                          &addresses, &state.diagonal))
        return NULL;
    if (!is_version(version, num_versions) || !get_addresses(addresses, arrays, NUM_ARRAYS))
        return NULL;
    STATISTICS(SET_STATE)
    enum outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = versions[version].covariance_update(&state);
    Py_END_ALLOW_THREADS
    return conclude(outcome, state.num_classes);
}

static PyObject *call_cross_entropy(PyObject *module, PyObject *args)
{
    enum { NUM_ARRAYS = BATCH(ONE_MORE) };
    struct batch batch;
    int version;
    PyObject *addresses;
    void *arrays[NUM_ARRAYS], **next = arrays;
    (void)module;
    if (!PyArg_ParseTuple(args, "i(LLL)O(ff)p", &version, &batch.num_classes, &batch.num_features, &batch.num_samples,
                          &addresses, &batch.strength, &batch.label_smoothing, &batch.diagonal))
        return NULL;
    if (!is_version(version, num_versions) || !get_addresses(addresses, arrays, NUM_ARRAYS))
        return NULL;
    BATCH(SET_BATCH)
    enum outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = versions[version].cross_entropy(&batch);
    Py_END_ALLOW_THREADS
    return conclude(outcome, batch.num_classes);
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
     "covariance_update(version, sizes, arrays, diagonal)"},
    {"cross_entropy", call_cross_entropy, METH_VARARGS, "cross_entropy(version, sizes, arrays, numbers, diagonal)"},
    {"class_activation_labels", call_class_activation_labels, METH_VARARGS,
     "class_activation_labels(count, num_classes, logits, candidates, labels)"},
    {"upper_bound", call_upper_bound, METH_VARARGS,
     "upper_bound(version, sizes, inputs, numbers, flags, outputs)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    find_versions();
    const char *names[3];
    for (int i = 0; i < num_versions; ++i)
        names[i] = versions[i].name;
    return new_module(&definition, names, num_versions);
}
