/* What a copy between mapped memories needs: the window of a key, and the handle that is its end. */

/* What one key opens. `Window` in Python holds the mapping itself. */
typedef struct {
    PyObject_HEAD
    long long nbytes, rights;
    unsigned long long start;
    char live;
} MappedWindow;

static PyMemberDef mapped_window_members[] = {
    {"nbytes", T_LONGLONG, offsetof(MappedWindow, nbytes), 0, NULL},
    {"rights", T_LONGLONG, offsetof(MappedWindow, rights), 0, NULL},
    {"start", T_ULONGLONG, offsetof(MappedWindow, start), 0, NULL},
    {"live", T_BOOL, offsetof(MappedWindow, live), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject mapped_window_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.MappedWindow",
    .tp_doc = "A window of a peer's memory, mapped here; nothing until its attributes are set.",
    .tp_basicsize = sizeof(MappedWindow),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = mapped_window_members,
};

/* A transfer that has ended well. */
typedef struct {
    PyObject_HEAD
    PyObject *peer;
    long long nbytes;
    double started;
    bool writes;
} MappedCopy;

static void mapped_copy_dealloc(MappedCopy *copy)
{
    Py_XDECREF(copy->peer);
    Py_TYPE(copy)->tp_free((PyObject *)copy);
}

PyDoc_STRVAR(mapped_copy_wait_doc, "wait(timeout_s=None)\n--\n\nReturn: it has ended well.");

static PyObject *mapped_copy_wait(MappedCopy *copy, PyObject *const *args, Py_ssize_t count,
                                  PyObject *keywords)
{
    if (!without_timeout(args, count, keywords))
        return wait_long((PyObject *)copy, args, count, keywords);
    Py_RETURN_NONE;
}

static PyObject *mapped_copy_operation(MappedCopy *copy, void *ignored)
{
    (void)ignored;
    return PyUnicode_FromString(copy->writes ? "write" : "read");
}

static PyMethodDef mapped_copy_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))mapped_copy_wait, METH_FASTCALL | METH_KEYWORDS,
     mapped_copy_wait_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef mapped_copy_members[] = {
    {"peer", T_OBJECT, offsetof(MappedCopy, peer), READONLY, NULL},
    {"nbytes", T_LONGLONG, offsetof(MappedCopy, nbytes), READONLY, NULL},
    {"bytes_moved", T_LONGLONG, offsetof(MappedCopy, nbytes), READONLY, NULL},
    {"started", T_DOUBLE, offsetof(MappedCopy, started), READONLY, NULL},
    {"deadline", T_DOUBLE, offsetof(MappedCopy, started), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef mapped_copy_properties[] = {
    {"operation", (getter)mapped_copy_operation, NULL, "\"write\" or \"read\".", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Made by `ShortWay.post` only, as a class in Python that has the rest of a transfer. */
static PyTypeObject mapped_copy_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.MappedCopy",
    .tp_doc = "A transfer that was a copy, and has ended.",
    .tp_basicsize = sizeof(MappedCopy),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_dealloc = (destructor)mapped_copy_dealloc,
    .tp_methods = mapped_copy_methods,
    .tp_members = mapped_copy_members,
    .tp_getset = mapped_copy_properties,
};
