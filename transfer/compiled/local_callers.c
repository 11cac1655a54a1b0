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
#define BOARDS_MAX 64              /* all of them are looked at: more callers go by their sockets */
#define SOCKETS_WAIT_NS 1000000    /* while boards are busy */

typedef struct {
    int descriptor;
    Board *board;
    uint32_t seen; /* number of the request that was taken last */
    bool asked;    /* and is not answered yet */
} CallerBoard;

typedef struct {
    PyObject_HEAD
    int epoll;
    char *plain; /* by descriptor: nothing of a frame has been taken from it yet */
    size_t descriptors;
    char *data; /* [data_bytes] */
    size_t data_bytes;
    int short_sleeps, wanted; /* so many in a row, and so many before it looks */
    CallerBoard boards[BOARDS_MAX];
    int num_boards;
    int64_t sockets_ns; /* when they were looked at last */
} LocalCallers;

static bool has_request(const CallerBoard *one)
{
    return board_load(one->board, BOARD_ASKED) != one->seen;
}

static bool any_has_request(const LocalCallers *callers)
{
    for (int i = 0; i < callers->num_boards; i++)
        if (has_request(callers->boards + i))
            return true;
    return false;
}

/* Whether something is ready before long: on sockets, and what, or on a board. */
static int look_for_callers(LocalCallers *callers, struct epoll_event *events, bool *on_board)
{
    int64_t end = now_ns() + CALLERS_LOOK_NS;
    bool wanted = false;
    int ready;
    for (;;) {
        for (int i = 0; i < BOARD_LOOKS && callers->num_boards; i++) {
            if ((*on_board = any_has_request(callers)))
                break;
            BOARD_PAUSE();
        }
        ready = *on_board ? 0 : epoll_wait(callers->epoll, events, CALLERS_READY_MAX, 0);
        if (ready || *on_board || wanted || now_ns() >= end)
            break;
        wanted = is_core_wanted();
    }
    if ((ready > 0 || *on_board) && !wanted) {
        callers->wanted = SHORT_SLEEPS_MIN;
        return ready;
    }
    callers->short_sleeps = 0;
    if (callers->wanted < (wanted ? SHORT_SLEEPS_WANTED_MAX : SHORT_SLEEPS_MAX))
        callers->wanted *= 2;
    return ready;
}

static void say_who_sleeps(LocalCallers *callers, bool sleeps)
{
    for (int i = 0; i < callers->num_boards; i++)
        board_store(callers->boards[i].board, BOARD_SERVER_SLEEPS, sleeps);
}

static int await_callers(LocalCallers *callers, struct epoll_event *events, int timeout_ms)
{
    if (any_has_request(callers)) {
        int64_t now = now_ns();
        if (now - callers->sockets_ns < SOCKETS_WAIT_NS)
            return 0;
        callers->sockets_ns = now;
        return epoll_wait(callers->epoll, events, CALLERS_READY_MAX, 0);
    }
    if (callers->short_sleeps >= callers->wanted) {
        bool on_board = false;
        int ready = look_for_callers(callers, events, &on_board);
        if (ready || on_board)
            return ready;
    }
    int64_t begin = now_ns();
    say_who_sleeps(callers, true);
    int ready = any_has_request(callers) ? 0
                : epoll_wait(callers->epoll, events, CALLERS_READY_MAX, timeout_ms);
    int error = errno;
    say_who_sleeps(callers, false);
    bool woken = ready > 0 || any_has_request(callers);
    callers->sockets_ns = now_ns();
    bool is_short = woken && callers->sockets_ns - begin < CALLERS_LOOK_NS;
    callers->short_sleeps = is_short ? callers->short_sleeps + 1 : 0;
    errno = error;
    return ready;
}

static CallerBoard *board_of(LocalCallers *callers, int descriptor)
{
    for (int i = 0; i < callers->num_boards; i++)
        if (callers->boards[i].descriptor == descriptor)
            return callers->boards + i;
    return NULL;
}

/* The request on a board, as `take_from` has it. */
static PyObject *take_from_board(CallerBoard *one)
{
    one->seen = board_load(one->board, BOARD_ASKED);
    one->asked = true;
    uint32_t length = board_load(one->board, BOARD_ASKED_BYTES);
    if (length > BOARD_REQUEST_BYTES) /* nobody of ours says so: as if it had hung up */
        return Py_BuildValue("iIy", one->descriptor, (unsigned)EPOLLIN, "");
    return Py_BuildValue("iiy#", one->descriptor, 0, (const char *)one->board + BOARD_REQUEST,
                         (Py_ssize_t)length);
}

/* What has come from one caller: (descriptor, events, data), or None if it only woke us. See
 * `await_doc`. */
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
    if (got == LINE_HEAD_BYTES && length == BOARD_WAKE && board_of(callers, descriptor))
        return Py_NewRef(Py_None);
    length = le32toh(length);
    if (got >= LINE_HEAD_BYTES && (size_t)got == LINE_HEAD_BYTES + (size_t)length)
        return Py_BuildValue("iiy#", descriptor, 0, callers->data + LINE_HEAD_BYTES,
                             (Py_ssize_t)length);
    return Py_BuildValue("iIy#", descriptor, events, callers->data, (Py_ssize_t)got);
}

/* Append what was found; on failure the list goes. */
static void add_found(PyObject **found, PyObject *one)
{
    if (!one || (one != Py_None && PyList_Append(*found, one)))
        Py_CLEAR(*found);
    Py_XDECREF(one);
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
    PyObject *found = PyList_New(0);
    for (int i = 0; found && i < callers->num_boards; i++)
        if (has_request(callers->boards + i))
            add_found(&found, take_from_board(callers->boards + i));
    for (int i = 0; found && i < ready; i++)
        add_found(&found, take_from(callers, events[i].data.fd, events[i].events));
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

PyDoc_STRVAR(board_doc,
             "set_board(descriptor, memory)\n--\n\nLook at the memory of a caller, too, of which "
             "there is a descriptor; -1: not any more. False if that are too many.");

static PyObject *callers_set_board(LocalCallers *callers, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 2, "set_board"))
        return NULL;
    int descriptor = (int)PyLong_AsLong(args[0]), memory = (int)PyLong_AsLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    CallerBoard *one = board_of(callers, descriptor);
    if (one) {
        board_unmap(one->board);
        *one = callers->boards[--callers->num_boards];
    }
    if (memory < 0)
        Py_RETURN_TRUE;
    if (callers->num_boards == BOARDS_MAX)
        Py_RETURN_FALSE;
    Board *board = board_map(memory);
    if (!board)
        return NULL;
    callers->boards[callers->num_boards++] = (CallerBoard){
        .descriptor = descriptor, .board = board, .seen = board_load(board, BOARD_ASKED)};
    board_store(board, BOARD_TAKEN, 1);
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(send_doc,
             "send(descriptor, payload)\n--\n\nSend as much of a frame as there is room for; "
             "return how many bytes. Raises OSError.");

/* Answer what was asked on a board; whether the reply is there, else it goes by the socket. */
static bool answer_on_board(CallerBoard *one, PyObject *payload)
{
    size_t nbytes = (size_t)PyBytes_GET_SIZE(payload);
    bool fits = nbytes <= BOARD_REPLY_BYTES;
    if (fits)
        memcpy(one->board + BOARD_REPLY, PyBytes_AS_STRING(payload), nbytes);
    board_store(one->board, BOARD_ANSWERED_BYTES, fits ? (uint32_t)nbytes : BOARD_BY_SOCKET);
    board_store(one->board, BOARD_ANSWERED, one->seen);
    one->asked = false;
    if (board_take_word(one->board, BOARD_CALLER_SLEEPS))
        (void)board_wake(one->descriptor); /* of one that is gone the socket tells */
    return fits;
}

static PyObject *callers_send(LocalCallers *callers, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 2, "send"))
        return NULL;
    int descriptor = (int)PyLong_AsLong(args[0]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyBytes_Check(args[1]) || PyBytes_GET_SIZE(args[1]) > UINT32_MAX) {
        PyErr_SetString(PyExc_TypeError, "a frame's content is bytes");
        return NULL;
    }
    CallerBoard *one = board_of(callers, descriptor);
    if (one && one->asked && answer_on_board(one, args[1]))
        return PyLong_FromSsize_t(LINE_HEAD_BYTES + PyBytes_GET_SIZE(args[1]));
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
    for (int i = 0; i < callers->num_boards; i++)
        board_unmap(callers->boards[i].board);
    PyMem_Free(callers->data);
    PyMem_Free(callers->plain);
    Py_TYPE(callers)->tp_free((PyObject *)callers);
}

static PyMethodDef callers_methods[] = {
    {"wait", (PyCFunction)callers_wait, METH_O, await_doc},
    {"set_plain", (PyCFunction)(void (*)(void))callers_set_plain, METH_FASTCALL, plain_doc},
    {"set_board", (PyCFunction)(void (*)(void))callers_set_board, METH_FASTCALL, board_doc},
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
