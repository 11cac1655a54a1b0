/* What Python gives: numbers of arguments, and keys. Part of `kvstore/rows.c` and `kvstore/native.c`. */

#define KEY_BYTES 16

/* A method of a type: `<type>_<name>`, described by `<type>_<name>_doc`. */
#define METHOD_OF(type, name, flags)                                                               \
    {#name, (PyCFunction)(void (*)(void))type##_##name, flags, type##_##name##_doc}

/* One of a module's. */
#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

/* -1 with an exception unless there are so many arguments. */
static int expect(Py_ssize_t count, Py_ssize_t wanted, const char *name)
{
    if (count == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, count);
    return -1;
}

/* The key of a block that may be posted; null, without an exception, if this is none. */
static const unsigned char *key_of(PyObject *key)
{
    bool fits = PyBytes_Check(key) && PyBytes_GET_SIZE(key) == KEY_BYTES;
    return fits ? (const unsigned char *)PyBytes_AS_STRING(key) : NULL;
}
