/* What a Python module of functions on raw addresses needs, in versions for several instruction sets. */
#ifndef PLSP_BINDING_H
#define PLSP_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Counts a list of arrays: `0 LIST(ONE_MORE)`. */
#define ONE_MORE(type, name) +1

#if defined(__x86_64__)
static inline int has_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static inline int has_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f");
}
#endif

/* Returns whether there is a version of this number; sets an exception if not. */
static inline int is_version(int version, int num_versions)
{
    if (version >= 0 && version < num_versions)
        return 1;
    PyErr_Format(PyExc_IndexError, "version must lie in [0, %d), got %d", num_versions, version);
    return 0;
}

/* Unpacks a tuple of `count` addresses; returns false, with an exception set, if it is anything else. */
static inline int get_addresses(PyObject *tuple, void **addresses, Py_ssize_t count)
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

/* A module whose VERSIONS are the names given. */
static inline PyObject *new_module(struct PyModuleDef *definition, const char *const *names, int num_versions)
{
    PyObject *module = PyModule_Create(definition), *versions = PyTuple_New(num_versions);
    if (module == NULL || versions == NULL)
        goto failed;
    for (int i = 0; i < num_versions; ++i) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (name == NULL || PyTuple_SetItem(versions, i, name) < 0)
            goto failed;
    }
    if (PyModule_AddObjectRef(module, "VERSIONS", versions) < 0)
        goto failed;
    Py_DECREF(versions);
    return module;
failed:
    Py_XDECREF(versions);
    Py_XDECREF(module);
    return NULL;
}

#endif
