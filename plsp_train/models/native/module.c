/* The Python module. Its functions take addresses of tensors that __init__.py has validated. */
#include "binding.h"

#include "native.h"

struct version {
    const char *name;
    int (*forward)(const struct stages *);
    int (*backward)(const struct stages *);
};

#define FUNCTIONS(version) {#version, stages_forward_##version, stages_backward_##version}

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

#define SET_STAGES(type, name) net.name = *next++;

static PyObject *call(PyObject *args, int is_backward)
{
    enum { NUM_ARRAYS = STAGES(ONE_MORE) };
    struct stages net;
    int version, done;
    PyObject *addresses;
    void *arrays[NUM_ARRAYS], **next = arrays;
    if (!PyArg_ParseTuple(args, "i(LLLL)O", &version, &net.num_images, &net.num_channels, &net.side, &net.num_groups,
                          &addresses))
        return NULL;
    if (!is_version(version, num_versions) || !get_addresses(addresses, arrays, NUM_ARRAYS))
        return NULL;
    STAGES(SET_STAGES)
    Py_BEGIN_ALLOW_THREADS
    done = (is_backward ? versions[version].backward : versions[version].forward)(&net);
    Py_END_ALLOW_THREADS
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *call_forward(PyObject *module, PyObject *args)
{
    (void)module;
    return call(args, 0);
}

static PyObject *call_backward(PyObject *module, PyObject *args)
{
    (void)module;
    return call(args, 1);
}

static PyMethodDef methods[] = {
    {"stages_forward", call_forward, METH_VARARGS, "stages_forward(version, sizes, arrays)"},
    {"stages_backward", call_backward, METH_VARARGS, "stages_backward(version, sizes, arrays)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_stages", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__stages(void)
{
    find_versions();
    const char *names[3];
    for (int i = 0; i < num_versions; ++i)
        names[i] = versions[i].name;
    return new_module(&definition, names, num_versions);
}
