/* The server's end of the local control channel: waiting for callers, and taking what they ask.
 *
 * Who asks in a stream asks again sooner than a core that has gone idle wakes up. So the server
 * looks for a moment before it sleeps, if its last sleeps were that short; and offers its core
 * meanwhile, since a caller may need this very one to ask. */

#define CALLERS_READY_MAX 64
#define CALLERS_LOOK_NS 60000
#define SHORT_SLEEPS_MIN 4
#define SHORT_SLEEPS_MAX 1024
#define SHORT_SLEEPS_WANTED_MAX 16 /* where somebody wants the core, which may be over soon */

typedef struct {
    PyObject_HEAD
    int epoll;
    char *plain; /* by descriptor: nothing of a frame has been taken from it yet */
    size_t descriptors;
    char *data; /* [data_bytes] */
    size_t data_bytes;
    int short_sleeps, wanted; /* so many in a row, and so many before it looks */
} LocalCallers;

/* Whether something is ready before long, and what. */
static int look_for_callers(LocalCallers *callers, struct epoll_event *events)
{
    int64_t end = now_ns() + CALLERS_LOOK_NS;
    bool wanted = false;
    int ready;
    while (!(ready = epoll_wait(callers->epoll, events, CALLERS_READY_MAX, 0)) && !wanted &&
           now_ns() < end)
        wanted = is_core_wanted();
    if (ready > 0 && !wanted) {
        callers->wanted = SHORT_SLEEPS_MIN;
        return ready;
    }
    callers->short_sleeps = 0;
    if (callers->wanted < (wanted ? SHORT_SLEEPS_WANTED_MAX : SHORT_SLEEPS_MAX))
        callers->wanted *= 2;
    return ready;
}

static int await_callers(LocalCallers *callers, struct epoll_event *events, int timeout_ms)
{
    if (callers->short_sleeps >= callers->wanted) {
        int ready = look_for_callers(callers, events);
        if (ready)
            return ready;
    }
    int64_t begin = now_ns();
    int ready = epoll_wait(callers->epoll, events, CALLERS_READY_MAX, timeout_ms);
    bool is_short = ready > 0 && now_ns() - begin < CALLERS_LOOK_NS;
    callers->short_sleeps = is_short ? callers->short_sleeps + 1 : 0;
    return ready;
}

/* What has come from one caller: (descriptor, events, data). See `await_doc`. */
static PyObject *take_from(LocalCallers *callers, int descriptor, unsigned events)
{
    bool plain = (size_t)descriptor < callers->descriptors && callers->plain[descriptor];
    if (!plain || events != EPOLLIN)
        return Py_BuildValue("iIO", descriptor, events, Py_None);
    ssize_t got = recv(descriptor, callers->data, callers->data_bytes, MSG_DONTWAIT);
    if (got < 0) /* whoever reads it finds out */
        return Py_BuildValue("iIO", descriptor, events, Py_None);
    uint32_t length = 0;
    if (got >= LINE_HEAD_BYTES)
        memcpy(&length, callers->data, sizeof length);
    length = le32toh(length);
    if (got >= LINE_HEAD_BYTES && (size_t)got == LINE_HEAD_BYTES + (size_t)length)
        return Py_BuildValue("iiy#", descriptor, 0, callers->data + LINE_HEAD_BYTES,
                             (Py_ssize_t)length);
    return Py_BuildValue("iIy#", descriptor, events, callers->data, (Py_ssize_t)got);
}

PyDoc_STRVAR(await_doc,
             "wait(timeout_s)\n--\n\nWait until something is ready: [(descriptor, events, data)]. "
             "`data` is None where nothing was read; else what was read, which is the content of "
             "one whole frame if `events` is 0.");

static PyObject *callers_wait(LocalCallers *callers, PyObject *timeout_s)
{
    double seconds = PyFloat_AsDouble(timeout_s);
    if (PyErr_Occurred())
        return NULL;
    struct epoll_event events[CALLERS_READY_MAX];
    int ready, error;
    Py_BEGIN_ALLOW_THREADS
    ready = await_callers(callers, events, (int)(seconds * 1000));
    error = errno;
    Py_END_ALLOW_THREADS
    if (ready < 0) {
        if (error != EINTR) {
            errno = error;
            return PyErr_SetFromErrno(PyExc_OSError);
        }
        ready = 0;
        if (PyErr_CheckSignals() < 0)
            return NULL;
    }
    PyObject *found = PyList_New(ready);
    for (int i = 0; found && i < ready; i++) {
        PyObject *one = take_from(callers, events[i].data.fd, events[i].events);
        if (one)
            PyList_SET_ITEM(found, i, one);
        else
            Py_CLEAR(found);
    }
    return found;
}

PyDoc_STRVAR(plain_doc,
             "set_plain(descriptor, plain)\n--\n\nSay whether `wait` reads what comes from a "
             "descriptor: frames, of which none has been read in part.");

static PyObject *callers_set_plain(LocalCallers *callers, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 2, "set_plain"))
        return NULL;
    long descriptor = PyLong_AsLong(args[0]);
    int plain = PyObject_IsTrue(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (descriptor < 0 || descriptor > 1 << 24) {
        PyErr_SetString(PyExc_ValueError, "no descriptor");
        return NULL;
    }
    if ((size_t)descriptor >= callers->descriptors && plain) {
        size_t wanted = 2 * (size_t)descriptor + 64;
        char *more = PyMem_Realloc(callers->plain, wanted);
        if (!more)
            return PyErr_NoMemory();
        memset(more + callers->descriptors, 0, wanted - callers->descriptors);
        callers->plain = more;
        callers->descriptors = wanted;
    }
    if ((size_t)descriptor < callers->descriptors)
        callers->plain[descriptor] = (char)plain;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(send_doc,
             "send(descriptor, payload)\n--\n\nSend as much of a frame as there is room for; "
             "return how many bytes. Raises OSError.");

static PyObject *callers_send(LocalCallers *callers, PyObject *const *args, Py_ssize_t count)
{
    (void)callers;
    if (check_count(count, 2, "send"))
        return NULL;
    int descriptor = (int)PyLong_AsLong(args[0]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyBytes_Check(args[1]) || PyBytes_GET_SIZE(args[1]) > UINT32_MAX) {
        PyErr_SetString(PyExc_TypeError, "a frame's content is bytes");
        return NULL;
    }
    uint32_t length = htole32((uint32_t)PyBytes_GET_SIZE(args[1]));
    struct iovec parts[2] = {{&length, LINE_HEAD_BYTES},
                             {PyBytes_AS_STRING(args[1]), (size_t)PyBytes_GET_SIZE(args[1])}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t sent = sendmsg(descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
        return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromSsize_t(sent < 0 ? 0 : sent);
}

static PyObject *callers_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    static char *keywords[] = {"epoll", "receive_bytes", NULL};
    int epoll;
    Py_ssize_t receive_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, names, "in", keywords, &epoll, &receive_bytes))
        return NULL;
    if (receive_bytes < LINE_HEAD_BYTES) {
        PyErr_SetString(PyExc_ValueError, "no room for a frame's head");
        return NULL;
    }
    LocalCallers *callers = (LocalCallers *)type->tp_alloc(type, 0);
    if (!callers)
        return NULL;
    callers->epoll = epoll;
    callers->wanted = SHORT_SLEEPS_MIN;
    callers->data_bytes = (size_t)receive_bytes;
    callers->data = PyMem_Malloc(callers->data_bytes);
    if (!callers->data) {
        Py_DECREF(callers);
        return PyErr_NoMemory();
    }
    return (PyObject *)callers;
}

static void callers_free(LocalCallers *callers)
{
    PyMem_Free(callers->data);
    PyMem_Free(callers->plain);
    Py_TYPE(callers)->tp_free((PyObject *)callers);
}

static PyMethodDef callers_methods[] = {
    {"wait", (PyCFunction)callers_wait, METH_O, await_doc},
    {"set_plain", (PyCFunction)(void (*)(void))callers_set_plain, METH_FASTCALL, plain_doc},
    {"send", (PyCFunction)(void (*)(void))callers_send, METH_FASTCALL, send_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject local_callers_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.LocalCallers",
    .tp_doc = "LocalCallers(epoll, receive_bytes)\n--\n\nThe server's end of a local control "
              "channel, on descriptors that somebody else owns. Not thread-safe.",
    .tp_basicsize = sizeof(LocalCallers),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = callers_new,
    .tp_dealloc = (destructor)callers_free,
    .tp_methods = callers_methods,
};
