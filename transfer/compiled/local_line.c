/* A caller's end of a local control channel: one request, then its reply, within a deadline. The two
 * halves are there by themselves too, for who asks several servers at once.
 *
 * The reply is looked for, for a moment, before the caller sleeps for it (`look.c`). Without that,
 * two system calls where nothing is unusual: the kernel itself wakes a waiting `recv` now and then
 * (SO_RCVTIMEO) to look at the deadline, so that it need not be told of each. With a board (`board.c`)
 * that the server has taken there are none while both ends look. */

#define LINE_PAUSE_US 500000 /* a waiting call looks at its deadline at least as often */
#define LINE_HEAD_BYTES 4    /* the length of a frame, little-endian */
#define LINE_SHORT_BYTES (16 << 10)
#define LINE_FRESH_NS 1000000 /* so soon after a reply the server is taken to be there */

typedef struct {
    PyObject_HEAD
    int descriptor;
    int64_t pause_us; /* what SO_RCVTIMEO is; 0: not set yet */
    Looks looks;
    Board *board;
    uint32_t asked;      /* numbers of the board */
    bool owed;           /* a wake-up comes, or has come, that nobody waited for */
    int64_t answered_ns; /* when the last reply on the board was there */
} LocalLine;

typedef enum {
    LINE_DONE,
    LINE_WANTS_BODY, /* the reply does not fit: give it `body` */
    LINE_INTERRUPTED,
    LINE_LATE,
    LINE_REFUSED, /* the request was not sent as a whole */
    LINE_ENDED,   /* closed before the reply */
    LINE_BROKEN,  /* `error` */
    LINE_TOO_LONG,
    LINE_TOO_MUCH, /* more than one reply */
} LineOutcome;

typedef struct {
    LocalLine *line;
    const char *request;
    size_t request_bytes, sent; /* of header and request */
    double deadline_s;
    size_t reply_bytes_max;
    size_t reply_bytes, arrived; /* `reply_bytes` is known once `arrived` >= LINE_HEAD_BYTES */
    char *body;                  /* [reply_bytes], for what does not fit `start` */
    int error;
    bool by_board; /* the request is on the board, and so may the reply be */
    char start[LINE_HEAD_BYTES + LINE_SHORT_BYTES];
} LineCall;

static int64_t line_left_us(const LineCall *call)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double left_s = call->deadline_s - ((double)now.tv_sec + (double)now.tv_nsec * 1e-9);
    if (!(left_s > 0))
        return 0;
    return left_s < 1e6 ? (int64_t)(left_s * 1e6) + 1 : (int64_t)1000000000000;
}

/* Send what is left of the frame. LINE_DONE once all of it is in the kernel. */
static LineOutcome line_send(LineCall *call)
{
    uint32_t length = htole32((uint32_t)call->request_bytes);
    size_t total = LINE_HEAD_BYTES + call->request_bytes;
    while (call->sent < total) {
        struct iovec parts[2];
        size_t head = call->sent < LINE_HEAD_BYTES ? LINE_HEAD_BYTES - call->sent : 0;
        size_t start = head ? 0 : call->sent - LINE_HEAD_BYTES;
        parts[0].iov_base = (char *)&length + LINE_HEAD_BYTES - head;
        parts[0].iov_len = head;
        parts[1].iov_base = (char *)call->request + start;
        parts[1].iov_len = call->request_bytes - start;
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t sent = sendmsg(call->line->descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) {
            call->sent += (size_t)sent;
            continue;
        }
        if (errno == EINTR)
            return LINE_INTERRUPTED;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return LINE_REFUSED;
        int64_t left_us = line_left_us(call);
        if (!left_us)
            return LINE_LATE;
        struct pollfd room = {.fd = call->line->descriptor, .events = POLLOUT};
        int64_t pause_ms = (left_us < LINE_PAUSE_US ? left_us : LINE_PAUSE_US) / 1000 + 1;
        if (poll(&room, 1, (int)pause_ms) < 0)
            return errno == EINTR ? LINE_INTERRUPTED : LINE_REFUSED;
    }
    return LINE_DONE;
}

/* Have the kernel end a wait before the deadline, so rarely told that it hardly ever is. */
static bool line_set_pause(LineCall *call, int64_t left_us)
{
    int64_t pause_us = LINE_PAUSE_US;
    while (pause_us > left_us && pause_us > 1000)
        pause_us /= 2;
    if (pause_us == call->line->pause_us)
        return true;
    struct timeval pause = {.tv_sec = pause_us / 1000000, .tv_usec = pause_us % 1000000};
    int descriptor = call->line->descriptor;
    if (setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &pause, sizeof pause) < 0)
        return false;
    call->line->pause_us = pause_us;
    return true;
}

/* Forget wake-ups at the beginning of what has come. */
static void line_drop_wakes(LineCall *call)
{
    uint32_t length;
    size_t wakes = 0;
    if (!call->line->board || call->body)
        return;
    while (call->arrived - wakes >= LINE_HEAD_BYTES) {
        memcpy(&length, call->start + wakes, sizeof length);
        if (length != BOARD_WAKE)
            break;
        wakes += LINE_HEAD_BYTES;
    }
    call->arrived -= wakes;
    memmove(call->start, call->start + wakes, call->arrived);
}

/* Look at what has come. LINE_INTERRUPTED is never returned: it stands for "not all of it yet". */
static LineOutcome line_look(LineCall *call)
{
    line_drop_wakes(call);
    if (call->arrived < LINE_HEAD_BYTES)
        return LINE_INTERRUPTED;
    uint32_t length;
    memcpy(&length, call->start, sizeof length);
    call->reply_bytes = le32toh(length);
    if (call->reply_bytes > call->reply_bytes_max)
        return LINE_TOO_LONG;
    size_t total = LINE_HEAD_BYTES + call->reply_bytes;
    if (call->arrived > total)
        return LINE_TOO_MUCH;
    if (call->arrived == total)
        return LINE_DONE;
    return total > sizeof call->start && !call->body ? LINE_WANTS_BODY : LINE_INTERRUPTED;
}

/* Look for the beginning of the reply, if that has paid lately; the server may need this core to
 * answer. What `recv` said last; EAGAIN if nothing has come. */
static ssize_t line_look_for(LineCall *call)
{
    Looks *looks = &call->line->looks;
    errno = EAGAIN;
    if (!may_look(looks))
        return -1;
    int64_t end = now_ns() + LOOK_NS;
    bool wanted = false;
    ssize_t got;
    for (;;) {
        got = recv(call->line->descriptor, call->start, sizeof call->start, MSG_DONTWAIT);
        if (got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK) || wanted || now_ns() >= end)
            break;
        wanted = is_core_wanted();
    }
    int error = errno;
    if (wanted)
        note_core_wanted(looks);
    else
        note_look(looks, got >= 0, end);
    errno = error;
    return got;
}

/* Whether the server is there, as far as its socket knows; what woke nobody is taken from it. */
static LineOutcome board_check(LocalLine *line)
{
    uint32_t words[16];
    ssize_t got = recv(line->descriptor, words, sizeof words, MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? LINE_DONE : LINE_REFUSED;
    if (!got)
        return LINE_REFUSED;
    for (size_t i = 0; i < (size_t)got / sizeof *words; i++)
        if (words[i] != BOARD_WAKE)
            return LINE_TOO_MUCH;
    line->owed = false;
    return (size_t)got % sizeof *words ? LINE_TOO_MUCH : LINE_DONE;
}

/* Put the request on the board. */
static LineOutcome board_send(LineCall *call)
{
    LocalLine *line = call->line;
    Board *board = line->board;
    if (line->owed || now_ns() - line->answered_ns > LINE_FRESH_NS) {
        LineOutcome outcome = board_check(line);
        if (outcome != LINE_DONE)
            return outcome;
    }
    memcpy(board + BOARD_REQUEST, call->request, call->request_bytes);
    board_store(board, BOARD_ASKED_BYTES, (uint32_t)call->request_bytes);
    board_store(board, BOARD_ASKED, ++line->asked);
    call->sent = LINE_HEAD_BYTES + call->request_bytes;
    if (board_take_word(board, BOARD_SERVER_SLEEPS) && !board_wake(line->descriptor) &&
        errno != EAGAIN && errno != EWOULDBLOCK)
        return LINE_ENDED; /* it may have seen the request before it ended */
    return LINE_DONE;
}

static bool board_is_answered(const LineCall *call)
{
    return board_load(call->line->board, BOARD_ANSWERED) == call->line->asked;
}

/* Take the reply from the board. LINE_INTERRUPTED: it comes by the socket. */
static LineOutcome board_take(LineCall *call)
{
    LocalLine *line = call->line;
    uint32_t length = board_load(line->board, BOARD_ANSWERED_BYTES);
    if (length == BOARD_BY_SOCKET) {
        call->by_board = false;
        return LINE_INTERRUPTED;
    }
    if (call->arrived) /* by the socket, too */
        return LINE_TOO_MUCH;
    if (length > BOARD_REPLY_BYTES || length > call->reply_bytes_max) {
        call->reply_bytes = length;
        return LINE_TOO_LONG;
    }
    memcpy(call->start + LINE_HEAD_BYTES, line->board + BOARD_REPLY, length);
    call->reply_bytes = length;
    call->arrived = LINE_HEAD_BYTES + length;
    line->answered_ns = now_ns();
    return LINE_DONE;
}

/* As `line_look_for`, on the board; whether the reply is there. */
static bool board_look_for(LineCall *call)
{
    Looks *looks = &call->line->looks;
    if (board_is_answered(call))
        return true;
    if (!may_look(looks))
        return false;
    int64_t end = now_ns() + LOOK_NS;
    bool wanted = false, answered = false;
    for (;;) {
        for (int i = 0; i < BOARD_LOOKS && !(answered = board_is_answered(call)); i++)
            BOARD_PAUSE();
        if (answered || wanted || now_ns() >= end)
            break;
        wanted = is_core_wanted();
    }
    if (wanted)
        note_core_wanted(looks);
    else
        note_look(looks, answered, end);
    return answered;
}

/* Wait for the reply on the board. LINE_INTERRUPTED, too, if it comes by the socket. */
static LineOutcome board_receive(LineCall *call)
{
    Board *board = call->line->board;
    if (board_look_for(call))
        return board_take(call);
    for (;;) {
        int64_t left_us = line_left_us(call);
        if (!left_us)
            return LINE_LATE;
        if (!line_set_pause(call, left_us)) {
            call->error = errno;
            return LINE_BROKEN;
        }
        board_store(board, BOARD_CALLER_SLEEPS, 1);
        if (board_is_answered(call)) {
            if (!board_take_word(board, BOARD_CALLER_SLEEPS))
                call->line->owed = true;
            return board_take(call);
        }
        size_t room = sizeof call->start - call->arrived;
        ssize_t got = recv(call->line->descriptor, call->start + call->arrived, room, 0);
        int error = errno;
        if (got > 0) {
            call->arrived += (size_t)got;
            line_drop_wakes(call);
        }
        if (board_is_answered(call)) { /* also one that ends then */
            if (!board_take_word(board, BOARD_CALLER_SLEEPS) && got <= 0)
                call->line->owed = true;
            return board_take(call);
        }
        if (got == 0)
            return LINE_ENDED;
        if (got < 0 && error == EINTR)
            return LINE_INTERRUPTED;
        if (got < 0 && error != EAGAIN && error != EWOULDBLOCK) {
            call->error = error;
            return LINE_BROKEN;
        }
        if (got > 0 && call->arrived >= LINE_HEAD_BYTES)
            return LINE_TOO_MUCH; /* a frame, and nothing on the board says so */
    }
}

static LineOutcome line_receive(LineCall *call)
{
    if (call->by_board) {
        LineOutcome outcome = board_receive(call);
        if (call->by_board)
            return outcome;
        if (call->arrived && (outcome = line_look(call)) != LINE_INTERRUPTED)
            return outcome;
    }
    bool looked = call->arrived > 0;
    for (;;) {
        int64_t left_us = line_left_us(call);
        if (!left_us)
            return LINE_LATE;
        if (!line_set_pause(call, left_us)) {
            call->error = errno;
            return LINE_BROKEN;
        }
        char *into = call->start + call->arrived;
        size_t room = sizeof call->start - call->arrived;
        if (call->body) {
            into = call->body + (call->arrived - LINE_HEAD_BYTES);
            room = call->reply_bytes - (call->arrived - LINE_HEAD_BYTES);
        }
        ssize_t got = -1;
        errno = EAGAIN;
        if (!looked)
            got = line_look_for(call);
        if (got < 0 && looked)
            got = recv(call->line->descriptor, into, room, 0);
        looked = true;
        if (got == 0)
            return LINE_ENDED;
        if (got < 0) {
            if (errno == EINTR)
                return LINE_INTERRUPTED;
            if (errno == EAGAIN || errno == EWOULDBLOCK)
                continue;
            call->error = errno;
            return LINE_BROKEN;
        }
        call->arrived += (size_t)got;
        LineOutcome outcome = line_look(call);
        if (outcome != LINE_INTERRUPTED)
            return outcome;
    }
}

/* Give the reply memory of its own size, and move what is there of it. Returns NULL or an error. */
static PyObject *line_make_body(LineCall *call)
{
    PyObject *body = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)call->reply_bytes);
    if (body) {
        call->body = PyBytes_AS_STRING(body);
        memcpy(call->body, call->start + LINE_HEAD_BYTES, call->arrived - LINE_HEAD_BYTES);
    }
    return body;
}

static PyObject *line_end(const LineCall *call, LineOutcome outcome, PyObject *body)
{
    PyObject *none = NULL;
    switch (outcome) {
    case LINE_DONE:
        if (body)
            return body;
        return PyBytes_FromStringAndSize(call->start + LINE_HEAD_BYTES,
                                         (Py_ssize_t)call->reply_bytes);
    case LINE_REFUSED:
        none = Py_NewRef(Py_None);
        break;
    case LINE_LATE:
        PyErr_SetNone(PyExc_TimeoutError);
        break;
    case LINE_TOO_LONG:
        PyErr_Format(PyExc_ConnectionError, "a reply of %zu bytes", call->reply_bytes);
        break;
    case LINE_TOO_MUCH:
        PyErr_SetString(PyExc_ConnectionError, "more than one reply");
        break;
    case LINE_BROKEN:
        PyErr_Format(PyExc_ConnectionError, "the connection broke: %s", strerror(call->error));
        break;
    default:
        PyErr_SetString(PyExc_ConnectionError, "the connection was closed before the reply");
    }
    Py_XDECREF(body);
    return none;
}

/* Start a call; `request` may be NULL: nothing is to be sent. */
static bool line_begin(LineCall *call, LocalLine *line, PyObject *request, PyObject *deadline_s)
{
    call->line = line;
    call->request = NULL;
    call->request_bytes = call->arrived = call->reply_bytes = call->reply_bytes_max = 0;
    call->by_board = false;
    call->sent = LINE_HEAD_BYTES;
    call->body = NULL;
    if (request && !PyBytes_Check(request)) {
        PyErr_SetString(PyExc_TypeError, "a request is bytes");
        return false;
    }
    if (request) {
        call->request = PyBytes_AS_STRING(request);
        call->request_bytes = (size_t)PyBytes_GET_SIZE(request);
        call->sent = 0;
    }
    if (call->request_bytes > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "a request of %zu bytes", call->request_bytes);
        return false;
    }
    call->deadline_s = PyFloat_AsDouble(deadline_s);
    return !PyErr_Occurred();
}

/* Send what is to be sent and, unless only that is wanted, take the reply. */
static PyObject *line_go(LineCall *call, bool receive)
{
    PyObject *body = NULL;
    LineOutcome outcome;
    for (;;) {
        Py_BEGIN_ALLOW_THREADS
        outcome = LINE_DONE;
        if (call->sent < LINE_HEAD_BYTES + call->request_bytes)
            outcome = call->by_board ? board_send(call) : line_send(call);
        if (outcome == LINE_DONE && receive)
            outcome = line_receive(call);
        Py_END_ALLOW_THREADS
        bool failed = false;
        if (outcome == LINE_WANTS_BODY)
            failed = !(body = line_make_body(call));
        else if (outcome == LINE_INTERRUPTED)
            failed = PyErr_CheckSignals() < 0;
        else
            return outcome == LINE_DONE && !receive ? Py_NewRef(Py_True)
                                                    : line_end(call, outcome, body);
        if (failed) {
            Py_XDECREF(body);
            return NULL;
        }
    }
}

PyDoc_STRVAR(line_ask_doc,
             "ask(request, deadline_s, reply_bytes_max)\n--\n\nSend a request and wait for the "
             "reply; None if nothing of the request can have been handled.");

static PyObject *line_ask(LocalLine *line, PyObject *const *args, Py_ssize_t count)
{
    LineCall call;
    if (check_count(count, 3, "ask") || !line_begin(&call, line, args[0], args[1]))
        return NULL;
    call.reply_bytes_max = PyLong_AsSize_t(args[2]);
    call.by_board = line->board && call.request_bytes <= BOARD_REQUEST_BYTES &&
                    board_load(line->board, BOARD_TAKEN);
    return PyErr_Occurred() ? NULL : line_go(&call, true);
}

PyDoc_STRVAR(line_send_doc,
             "send(request, deadline_s)\n--\n\nSend a request, whose reply `receive` takes; None "
             "if nothing of it can have been handled.");

static PyObject *line_send_only(LocalLine *line, PyObject *const *args, Py_ssize_t count)
{
    LineCall call;
    if (check_count(count, 2, "send") || !line_begin(&call, line, args[0], args[1]))
        return NULL;
    return line_go(&call, false);
}

PyDoc_STRVAR(line_receive_doc,
             "receive(deadline_s, reply_bytes_max)\n--\n\nWait for the reply to what was sent.");

static PyObject *line_receive_only(LocalLine *line, PyObject *const *args, Py_ssize_t count)
{
    LineCall call;
    if (check_count(count, 2, "receive") || !line_begin(&call, line, NULL, args[0]))
        return NULL;
    call.reply_bytes_max = PyLong_AsSize_t(args[1]);
    return PyErr_Occurred() ? NULL : line_go(&call, true);
}

static PyObject *line_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    static char *keywords[] = {"descriptor", "board", NULL};
    int descriptor, memory = -1;
    if (!PyArg_ParseTupleAndKeywords(args, names, "i|i", keywords, &descriptor, &memory))
        return NULL;
    Board *board = memory < 0 ? NULL : board_map(memory);
    if (memory >= 0 && !board)
        return NULL;
    LocalLine *line = (LocalLine *)type->tp_alloc(type, 0); /* all zero */
    if (!line) {
        board_unmap(board);
        return NULL;
    }
    line->descriptor = descriptor;
    line->board = board;
    return (PyObject *)line;
}

static void line_free(LocalLine *line)
{
    board_unmap(line->board);
    Py_TYPE(line)->tp_free((PyObject *)line);
}

static PyMethodDef line_methods[] = {
    {"ask", (PyCFunction)(void (*)(void))line_ask, METH_FASTCALL, line_ask_doc},
    {"send", (PyCFunction)(void (*)(void))line_send_only, METH_FASTCALL, line_send_doc},
    {"receive", (PyCFunction)(void (*)(void))line_receive_only, METH_FASTCALL, line_receive_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject local_line_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.LocalLine",
    .tp_doc = "LocalLine(descriptor, board=-1)\n--\n\nThe caller's end of a local control channel, "
              "on a blocking socket that somebody else owns; `board`: a descriptor of the memory that "
              "was offered to the server. Not thread-safe; of no use after an error.",
    .tp_basicsize = sizeof(LocalLine),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = line_new,
    .tp_dealloc = (destructor)line_free,
    .tp_methods = line_methods,
};
