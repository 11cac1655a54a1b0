/* The short way: a transfer of one piece that travels as one request.
 *
 * One object is handle and request in one, posted by one call and settled by another. What meets
 * trouble is taken out of the books here (`pull`), and Python makes of it the operation and the
 * slice that it would have been the long way. All of it is guarded by the interpreter's lock, which
 * is given up only while bytes move.
 */

#define PRIORITIES 5
#define OPERATIONS_MAX 256
/* As in `spray.py` and `bulk.py`. */
#define COST_BYTES_MIN 4096
#define PREFERENCE_FACTOR 2.0
#define SLICE_S 2e-3
#define URGENT_MEMORY_S 0.02
/* So long a waiting thread leads a lane before it looks whether its transfer has moved away. */
#define DRIVE_NS 20000000
#define ONE_PIECE_JOB_BYTES (sizeof(Job) + 3 * sizeof(struct iovec) + REQUEST_BYTES + 16)

typedef struct {
    PyObject_HEAD
    Unfinished number;
    bool pending; /* under way, and nothing is wrong with it */
    bool settled; /* ended here, and well */
    bool finished, writes, urgent, signals;
    uint32_t immediate;
    uint64_t oldest;
    long long our_offset, their_offset, nbytes, bytes_moved;
    double started, deadline;
    Books *books;
    RailLoad *load;
    Lane *lane;
    /* `lock` is made for whoever wants to be told of the end: without one nobody waits. */
    PyObject *peer, *region, *token, *priority, *rails, *rail, *link, *lock;
    PyObject *note; /* bytes, or NULL */
    _Alignas(16) char job[ONE_PIECE_JOB_BYTES];
} Message;

static PyTypeObject message_type;

static struct {
    PyObject *owner, *token, *nbytes, *rights, *kind, *start, *finish, *wait_long, *host;
    PyObject *evidence;
    PyObject *make_lock;
} names;

static bool make_names(void)
{
    PyObject *threading = PyImport_ImportModule("threading");
    names.make_lock = threading ? PyObject_GetAttrString(threading, "Lock") : NULL;
    Py_XDECREF(threading);
    return names.make_lock && (names.owner = PyUnicode_InternFromString("owner")) &&
           (names.token = PyUnicode_InternFromString("token")) &&
           (names.nbytes = PyUnicode_InternFromString("nbytes")) &&
           (names.rights = PyUnicode_InternFromString("rights")) &&
           (names.kind = PyUnicode_InternFromString("kind")) &&
           (names.start = PyUnicode_InternFromString("start")) &&
           (names.finish = PyUnicode_InternFromString("finish")) &&
           (names.wait_long = PyUnicode_InternFromString("wait_long")) &&
           (names.host = PyUnicode_InternFromString("host")) &&
           (names.evidence = PyUnicode_InternFromString("evidence"));
}

/* ---- its end */

static void message_dealloc(Message *message)
{
    Py_XDECREF(message->books);
    Py_XDECREF(message->load);
    Py_XDECREF(message->lane);
    Py_XDECREF(message->peer);
    Py_XDECREF(message->region);
    Py_XDECREF(message->token);
    Py_XDECREF(message->priority);
    Py_XDECREF(message->rails);
    Py_XDECREF(message->rail);
    Py_XDECREF(message->link);
    Py_XDECREF(message->lock);
    Py_XDECREF(message->note);
    Py_TYPE(message)->tp_free((PyObject *)message);
}

static void drop_load(Message *message)
{
    message->pending = false;
    message->load->out_bytes -= message->nbytes;
    if (message->urgent)
        message->load->urgent_bytes -= message->nbytes;
}

/* It was answered, and well. Returns 0, or -1 with an exception of whoever was told. */
static int settle(Message *message)
{
    RailLoad *load = message->load;
    Books *books = message->books;
    drop_load(message);
    load->messages_done++;
    load->bytes_done += message->nbytes;
    /* Not later than now, and the clock need not be asked. */
    if (load->progressed_at < message->started)
        load->progressed_at = message->started;
    message->bytes_moved = message->nbytes;
    message->settled = true;
    PyObject *told = Py_None, *heard = Py_None;
    if (message->lock)
        told = PyObject_CallMethodNoArgs((PyObject *)message, names.finish);
    else
        message->finished = true;
    unlink_unfinished(books, &message->number);
    Py_CLEAR(message->number.message); /* frees nothing: the job has a reference */
    PyObject *kind = NULL, *value = NULL, *trace = NULL;
    if (!told)
        PyErr_Fetch(&kind, &value, &trace);
    /* What is urgent leaves no room to bulk, which does not wait for it either. */
    long long waiting = message->urgent ? books->urgent_queued : books->num_queued;
    if ((waiting || books->awaited) && books->on_room)
        heard = PyObject_CallNoArgs(books->on_room);
    if (!told) {
        if (!heard)
            PyErr_Clear();
        PyErr_Restore(kind, value, trace);
    }
    if (told && told != Py_None)
        Py_DECREF(told);
    if (heard && heard != Py_None)
        Py_DECREF(heard);
    return told && heard ? 0 : -1;
}

static int settle_job(Job *job)
{
    if (job->status != OK || !PyObject_TypeCheck(job->item, &message_type))
        return 0;
    Message *message = (Message *)job->item;
    if (!message->pending)
        return 0;
    return settle(message) < 0 ? -1 : 1;
}

/* ---- waiting for it */

/* Lead its lane until something ended, if nobody does. Returns 0, or -1 with an exception. */
static int lead(Message *message)
{
    Lane *lane = message->lane;
    if (!claim(lane))
        return 0;
    Finished finished = {NULL, &finished.first};
    Py_BEGIN_ALLOW_THREADS
    Courtesy courtesy;
    begin_courtesy(&courtesy, !lane->urgent);
    (void)progress_lanes(&lane, 1, DRIVE_NS, &finished);
    if (lane->urgent && finished.first)
        take_turn_for_bulk();
    end_courtesy(&courtesy);
    Py_END_ALLOW_THREADS
    bool left = release_lead(lane);
    bool broken = !finished.first && look_evidence(lane);
    PyObject *list = hand_over(finished.first);
    if (!list)
        return -1;
    int outcome = 0;
    if ((broken || PyList_GET_SIZE(list)) && message->load->report) {
        PyObject *report = Py_NewRef(message->load->report);
        PyObject *done = PyObject_CallFunction(report, "O(O)", list, lane);
        Py_DECREF(report);
        outcome = done ? 0 : -1;
        Py_XDECREF(done);
    }
    Py_DECREF(list);
    return outcome == 0 && left ? attend_soon(message->load) : outcome;
}

/* Wait as Python does: with a timeout, which it checks, or for what has not ended well at once. */
static PyObject *wait_long(PyObject *transfer, PyObject *const *args, Py_ssize_t count,
                           PyObject *keywords)
{
    PyObject *method = PyObject_GetAttr(transfer, names.wait_long);
    if (!method)
        return NULL;
    PyObject *done = PyObject_Vectorcall(method, args, (size_t)count, keywords);
    Py_DECREF(method);
    return done;
}

static bool without_timeout(PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    return !keywords && (count == 0 || (count == 1 && args[0] == Py_None));
}

PyDoc_STRVAR(message_wait_doc, "wait(timeout_s=None)\n--\n\nAs of any transfer.");

static PyObject *message_wait(Message *message, PyObject *const *args, Py_ssize_t count,
                              PyObject *keywords)
{
    if (!without_timeout(args, count, keywords))
        return wait_long((PyObject *)message, args, count, keywords);
    if (message->pending && lead(message) < 0)
        return NULL;
    if (message->settled && message->finished)
        Py_RETURN_NONE;
    return wait_long((PyObject *)message, args, count, keywords);
}

/* ---- its attributes */

static PyObject *message_operation(Message *message, void *ignored)
{
    (void)ignored;
    return PyUnicode_FromString(message->writes ? "write" : "read");
}

static PyObject *message_immediate(Message *message, void *ignored)
{
    (void)ignored;
    if (!message->signals)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(message->immediate);
}

static PyObject *message_transfer_id(Message *message, void *ignored)
{
    (void)ignored;
    return PyLong_FromUnsignedLongLong(message->number.id);
}

static PyObject *message_lock(Message *message, void *ignored)
{
    (void)ignored;
    if (!message->lock) {
        PyObject *lock = PyObject_CallNoArgs(names.make_lock);
        if (!lock)
            return NULL;
        if (message->lock) /* another thread was faster */
            Py_DECREF(lock);
        else
            message->lock = lock;
    }
    return Py_NewRef(message->lock);
}

static int message_set_lock(Message *message, PyObject *value, void *ignored)
{
    (void)ignored;
    Py_XINCREF(value);
    Py_XSETREF(message->lock, value);
    return 0;
}

static PyMethodDef message_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))message_wait, METH_FASTCALL | METH_KEYWORDS,
     message_wait_doc},
    {NULL, NULL, 0, NULL},
};

#define MESSAGE_MEMBER(name, type, flags) {#name, type, offsetof(Message, name), flags, NULL}

static PyMemberDef message_members[] = {
    {"_finished", T_BOOL, offsetof(Message, finished), 0, NULL},
    MESSAGE_MEMBER(pending, T_BOOL, READONLY),
    MESSAGE_MEMBER(writes, T_BOOL, READONLY),
    MESSAGE_MEMBER(urgent, T_BOOL, READONLY),
    MESSAGE_MEMBER(oldest, T_ULONGLONG, READONLY),
    MESSAGE_MEMBER(our_offset, T_LONGLONG, READONLY),
    MESSAGE_MEMBER(their_offset, T_LONGLONG, READONLY),
    MESSAGE_MEMBER(nbytes, T_LONGLONG, READONLY),
    MESSAGE_MEMBER(bytes_moved, T_LONGLONG, 0),
    MESSAGE_MEMBER(started, T_DOUBLE, READONLY),
    MESSAGE_MEMBER(deadline, T_DOUBLE, READONLY),
    MESSAGE_MEMBER(load, T_OBJECT, READONLY),
    MESSAGE_MEMBER(lane, T_OBJECT, READONLY),
    MESSAGE_MEMBER(peer, T_OBJECT, READONLY),
    MESSAGE_MEMBER(region, T_OBJECT, READONLY),
    MESSAGE_MEMBER(token, T_OBJECT, READONLY),
    MESSAGE_MEMBER(priority, T_OBJECT, READONLY),
    MESSAGE_MEMBER(rails, T_OBJECT, READONLY),
    MESSAGE_MEMBER(note, T_OBJECT, READONLY),
    MESSAGE_MEMBER(rail, T_OBJECT, 0),
    MESSAGE_MEMBER(link, T_OBJECT, 0),
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef message_properties[] = {
    {"operation", (getter)message_operation, NULL, "\"write\" or \"read\".", NULL},
    {"immediate", (getter)message_immediate, NULL, "Counted at the owner; None.", NULL},
    {"transfer_id", (getter)message_transfer_id, NULL, "Its number.", NULL},
    {"_lock", (getter)message_lock, (setter)message_set_lock, "Guards its end.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Made by `ShortWay.post` only, as a class in Python that has the rest of a transfer. */
static PyTypeObject message_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.Message",
    .tp_doc = "A transfer of one piece: handle and request in one.",
    .tp_basicsize = sizeof(Message),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_dealloc = (destructor)message_dealloc,
    .tp_methods = message_methods,
    .tp_members = message_members,
    .tp_getset = message_properties,
};

/* ---- books that have messages */

/* Those that are under way, a list; with `taken` out of the short way. */
static PyObject *list_messages(Books *books)
{
    PyObject *list = PyList_New(0);
    for (Unfinished *n = books->list.next; list && n != &books->list; n = n->next)
        if (n->message && ((Message *)n->message)->pending && PyList_Append(list, n->message) < 0)
            Py_CLEAR(list);
    return list;
}

PyDoc_STRVAR(books_messages_doc, "messages()\n--\n\nReturn what is under way the short way.");

static PyObject *books_messages(Books *books, PyObject *ignored)
{
    (void)ignored;
    return list_messages(books);
}

PyDoc_STRVAR(books_stop_doc, "stop()\n--\n\nClose the short way, until `stopped` is taken back, "
                             "and return what is under way.");

static PyObject *books_stop(Books *books, PyObject *ignored)
{
    (void)ignored;
    books->stopped = true;
    return list_messages(books);
}

PyDoc_STRVAR(books_pull_doc, "pull(message)\n--\n\nKeep only its number from here on: it is an "
                             "operation now. Returns False if it has ended, or was one already.");

static PyObject *books_pull(Books *books, PyObject *object)
{
    if (!PyObject_TypeCheck(object, &message_type)) {
        PyErr_SetString(PyExc_TypeError, "pull takes a message");
        return NULL;
    }
    Message *message = (Message *)object;
    if (!message->pending || message->books != books)
        Py_RETURN_FALSE;
    drop_load(message);
    Py_RETURN_TRUE;
}

static PyMethodDef books_methods[] = {
    {"take", (PyCFunction)books_take, METH_NOARGS, books_take_doc},
    {"end", (PyCFunction)books_end, METH_O, books_end_doc},
    {"messages", (PyCFunction)books_messages, METH_NOARGS, books_messages_doc},
    {"stop", (PyCFunction)books_stop, METH_NOARGS, books_stop_doc},
    {"pull", (PyCFunction)books_pull, METH_O, books_pull_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject books_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.Books",
    .tp_doc = "Which transfers to a peer are unfinished, and how busy its rails are.",
    .tp_basicsize = sizeof(Books),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = books_new,
    .tp_dealloc = (destructor)books_dealloc,
    .tp_traverse = (traverseproc)books_traverse,
    .tp_clear = (inquiry)books_clear,
    .tp_as_sequence = &books_sequence,
    .tp_methods = books_methods,
    .tp_members = books_members,
    .tp_getset = books_properties,
};
