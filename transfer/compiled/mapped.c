/* The short way into mapped memory: one call checks a piece, copies and counts it. */

/* Whether nothing speaks against a link. */
static bool is_well(PyObject *link)
{
    PyObject *evidence = PyObject_GetAttr(link, names.evidence);
    bool well = evidence == Py_None;
    Py_XDECREF(evidence);
    if (PyErr_Occurred())
        PyErr_Clear();
    return well;
}

/* The window of a key, a reference; NULL without an exception if it is not mapped. */
static MappedWindow *find_window(PyObject *windows, const Wanted *wanted)
{
    PyObject *found = PyDict_GetItemWithError(windows, wanted->token);
    if (!found || !PyObject_TypeCheck(found, &mapped_window_type)) {
        PyErr_Clear();
        return NULL;
    }
    MappedWindow *window = (MappedWindow *)found;
    /* What was mapped for a key says nothing about another with the same token. */
    if (!window->live || !window->start || window->nbytes != wanted->window_bytes ||
        window->rights != wanted->rights)
        return NULL;
    return (MappedWindow *)Py_NewRef(found);
}

static void copy_mapped(const MappedWindow *window, const Wanted *wanted)
{
    uintptr_t ours = wanted->start + (uintptr_t)wanted->our_offset;
    uintptr_t theirs = (uintptr_t)window->start + (uintptr_t)wanted->their_offset;
    uintptr_t target = wanted->writes ? theirs : ours, source = wanted->writes ? ours : theirs;
    size_t nbytes = (size_t)wanted->nbytes;
    if (nbytes <= GIL_BYTES) {
        memmove((void *)target, (const void *)source, nbytes);
        return;
    }
    bool large = nbytes >= STREAM_BYTES;
    Py_BEGIN_ALLOW_THREADS
    copy_piece(target, source, nbytes, large);
    if (large)
        end_streams();
    Py_END_ALLOW_THREADS
}

/* Copy a piece of (peer, region, key, our offset, their offset, nbytes, immediate, priority) if all
 * of it is mapped. Returns its handle, or None: immediates, whatever is unusual, or wrong. */
static PyObject *post_mapped(ShortWay *way, bool writes, PyObject *const *args)
{
    PyObject *place = PyDict_GetItemWithError(way->mapped, args[0]);
    Wanted wanted = {.writes = writes};
    if (!place || args[6] != Py_None || !understand_piece(way, args, &wanted)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    Py_INCREF(place);
    /* Holds the mapping while it is used, whoever forgets the key meanwhile. */
    MappedWindow *window = is_well(PyTuple_GET_ITEM(place, 0))
                               ? find_window(PyTuple_GET_ITEM(place, 1), &wanted)
                               : NULL;
    Py_DECREF(place);
    Py_DECREF(wanted.token);
    if (!window)
        Py_RETURN_NONE;
    MappedCopy *copy = (MappedCopy *)way->copied_type->tp_alloc(way->copied_type, 0);
    if (copy) {
        copy_mapped(window, &wanted);
        count_transfer(&way->copied, &wanted);
        copy->peer = Py_NewRef(args[0]);
        copy->nbytes = wanted.nbytes;
        copy->writes = writes;
        copy->started = (double)now_ns() * 1e-9;
    }
    Py_DECREF(window);
    return (PyObject *)copy;
}
