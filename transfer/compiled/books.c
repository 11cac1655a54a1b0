/* The books about one peer: which transfers are unfinished, and how busy each rail is.
 *
 *     1 ......... oldest ................. following ......... oldest + ahead_max
 *      finished  |  unfinished or finished |  free            |  refused by the owner
 *
 * All of it is guarded by the interpreter's lock: no function here gives it up.
 */

#define BULK_LANES_MAX 16
#define PEER_RAILS_MAX 64

/* ---- how busy a rail is, and which lanes of its link take messages */

typedef struct {
    PyObject_HEAD
    bool open, healthy;
    bool attends_soon; /* the engine's thread is about to see to what has no leader */
    bool all_bulk;     /* there are as many lanes for bulk as there may be */
    long long out_bytes, urgent_bytes;
    long long messages_done, bytes_done; /* of the short way */
    double progressed_at, bandwidth;
    long long bulk_bytes_max, bulk_bytes_max_beside_urgent;
    Lane *urgent, *bulk[BULK_LANES_MAX];
    int num_bulk;
    PyObject *link, *rail, *attend_soon, *report;
} RailLoad;

static PyTypeObject rail_load_type;

static void drop_lanes(RailLoad *load)
{
    Py_CLEAR(load->urgent);
    while (load->num_bulk) {
        load->num_bulk--;
        Py_CLEAR(load->bulk[load->num_bulk]);
    }
}

static int rail_load_clear(RailLoad *load)
{
    drop_lanes(load);
    Py_CLEAR(load->link);
    Py_CLEAR(load->rail);
    Py_CLEAR(load->attend_soon);
    Py_CLEAR(load->report);
    return 0;
}

static int rail_load_traverse(RailLoad *load, visitproc visit, void *arg)
{
    Py_VISIT(load->link);
    Py_VISIT(load->rail);
    Py_VISIT(load->attend_soon);
    Py_VISIT(load->report);
    return 0;
}

static void rail_load_dealloc(RailLoad *load)
{
    PyObject_GC_UnTrack(load);
    rail_load_clear(load);
    Py_TYPE(load)->tp_free((PyObject *)load);
}

/* Have the engine's thread see soon to what has no leader. Returns 0, or -1 with an exception. */
static int attend_soon(RailLoad *load)
{
    if (load->attends_soon || !load->attend_soon)
        return 0; /* it does, or the link is gone */
    PyObject *call = Py_NewRef(load->attend_soon);
    PyObject *done = PyObject_CallNoArgs(call);
    Py_DECREF(call);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

PyDoc_STRVAR(rail_load_add_doc, "add(nbytes, urgent)\n--\n\nNote bytes under way.");

static PyObject *rail_load_add(RailLoad *load, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 2, "add") < 0)
        return NULL;
    long long nbytes = PyLong_AsLongLong(args[0]);
    int urgent = PyObject_IsTrue(args[1]);
    if (urgent < 0 || (nbytes == -1 && PyErr_Occurred()))
        return NULL;
    load->out_bytes += nbytes;
    load->urgent_bytes += urgent ? nbytes : 0;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(rail_load_bind_doc, "bind(link, rail, attend_soon, report)\n--\n\n"
                                 "Belong to a link: its name, how it has the engine's thread see "
                                 "to its lanes, and how it hears what is not settled here.");

static PyObject *rail_load_bind(RailLoad *load, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 4, "bind") < 0)
        return NULL;
    drop_lanes(load);
    load->attends_soon = false;
    Py_XSETREF(load->link, Py_NewRef(args[0]));
    Py_XSETREF(load->rail, Py_NewRef(args[1]));
    Py_XSETREF(load->attend_soon, Py_NewRef(args[2]));
    Py_XSETREF(load->report, Py_NewRef(args[3]));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(rail_load_carry_doc, "carry(urgent, bulk, all_bulk)\n--\n\n"
                                  "Say which lanes there are: one or None for urgent messages, a "
                                  "tuple for bulk, and whether no more of these are wanted.");

static PyObject *rail_load_carry(RailLoad *load, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 3, "carry") < 0)
        return NULL;
    int all_bulk = PyObject_IsTrue(args[2]);
    if (all_bulk < 0)
        return NULL;
    if (!PyTuple_Check(args[1]) || (args[0] != Py_None && !Py_IS_TYPE(args[0], &lane_type))) {
        PyErr_SetString(PyExc_TypeError, "carry takes a lane or None, and a tuple of lanes");
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(args[1]);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!Py_IS_TYPE(PyTuple_GET_ITEM(args[1], i), &lane_type)) {
            PyErr_SetString(PyExc_TypeError, "these are no lanes");
            return NULL;
        }
    }
    drop_lanes(load);
    load->all_bulk = all_bulk;
    if (args[0] != Py_None)
        load->urgent = (Lane *)Py_NewRef(args[0]);
    for (Py_ssize_t i = 0; i < n && i < BULK_LANES_MAX; i++)
        load->bulk[load->num_bulk++] = (Lane *)Py_NewRef(PyTuple_GET_ITEM(args[1], i));
    Py_RETURN_NONE;
}

static PyMethodDef rail_load_methods[] = {
    {"add", (PyCFunction)(void (*)(void))rail_load_add, METH_FASTCALL, rail_load_add_doc},
    {"bind", (PyCFunction)(void (*)(void))rail_load_bind, METH_FASTCALL, rail_load_bind_doc},
    {"carry", (PyCFunction)(void (*)(void))rail_load_carry, METH_FASTCALL, rail_load_carry_doc},
    {NULL, NULL, 0, NULL},
};

#define LOAD_MEMBER(name, type) {#name, type, offsetof(RailLoad, name), 0, NULL}

static PyMemberDef rail_load_members[] = {
    LOAD_MEMBER(open, T_BOOL),
    LOAD_MEMBER(healthy, T_BOOL),
    LOAD_MEMBER(attends_soon, T_BOOL),
    LOAD_MEMBER(out_bytes, T_LONGLONG),
    LOAD_MEMBER(urgent_bytes, T_LONGLONG),
    LOAD_MEMBER(messages_done, T_LONGLONG),
    LOAD_MEMBER(bytes_done, T_LONGLONG),
    LOAD_MEMBER(progressed_at, T_DOUBLE),
    LOAD_MEMBER(bandwidth, T_DOUBLE),
    LOAD_MEMBER(bulk_bytes_max, T_LONGLONG),
    LOAD_MEMBER(bulk_bytes_max_beside_urgent, T_LONGLONG),
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject rail_load_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.RailLoad",
    .tp_doc = "How busy a rail is, and which lanes of its link take messages.",
    .tp_basicsize = sizeof(RailLoad),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)rail_load_dealloc,
    .tp_traverse = (traverseproc)rail_load_traverse,
    .tp_clear = (inquiry)rail_load_clear,
    .tp_methods = rail_load_methods,
    .tp_members = rail_load_members,
};

/* ---- what is unfinished */

/* A number that is unfinished: of a message, which it lies in, or of an operation in Python. */
typedef struct Unfinished {
    struct Unfinished *next, *previous;
    uint64_t id;
    PyObject *message; /* a reference; NULL of an operation */
} Unfinished;

typedef struct {
    PyObject_HEAD
    Unfinished list; /* a ring, ascending; this one is between its ends */
    Py_ssize_t count;
    uint64_t following, limit, ahead_max;
    long long num_queued, urgent_queued;
    bool stopped; /* nothing takes the short way */
    bool awaited; /* somebody may be waiting for a turn */
    double urgent_at;
    RailLoad *rails[PEER_RAILS_MAX];
    int num_rails;
    PyObject *prefer, *on_room;
} Books;

static PyTypeObject books_type;

static void append_unfinished(Books *books, Unfinished *number)
{
    number->id = books->following++;
    number->next = &books->list;
    number->previous = books->list.previous;
    number->previous->next = books->list.previous = number;
    books->count++;
}

static void unlink_unfinished(Books *books, Unfinished *number)
{
    number->previous->next = number->next;
    number->next->previous = number->previous;
    number->next = number->previous = NULL;
    books->count--;
}

/* Take it out; what it lies in is freed with the last reference, or here. */
static void remove_unfinished(Books *books, Unfinished *number)
{
    unlink_unfinished(books, number);
    PyObject *message = number->message;
    number->message = NULL;
    if (message)
        Py_DECREF(message);
    else
        free(number);
}

static uint64_t oldest_of(const Books *books)
{
    const Unfinished *first = books->list.next;
    return first == &books->list ? books->following : first->id;
}

/* Whether the next number has to wait for the oldest transfer to end. */
static bool is_exhausted(Books *books)
{
    if (books->following < books->limit)
        return false;
    /* Only looked at again when it is reached: the oldest never gets younger. */
    books->limit = oldest_of(books) + books->ahead_max;
    return books->following >= books->limit;
}

static int books_clear(Books *books)
{
    while (books->list.next && books->list.next != &books->list)
        remove_unfinished(books, books->list.next);
    while (books->num_rails) {
        books->num_rails--;
        Py_CLEAR(books->rails[books->num_rails]);
    }
    Py_CLEAR(books->prefer);
    Py_CLEAR(books->on_room);
    return 0;
}

static int books_traverse(Books *books, visitproc visit, void *arg)
{
    for (int i = 0; i < books->num_rails; i++)
        Py_VISIT(books->rails[i]);
    for (Unfinished *n = books->list.next; n && n != &books->list; n = n->next)
        Py_VISIT(n->message);
    Py_VISIT(books->prefer);
    Py_VISIT(books->on_room);
    return 0;
}

static void books_dealloc(Books *books)
{
    PyObject_GC_UnTrack(books);
    books_clear(books);
    Py_TYPE(books)->tp_free((PyObject *)books);
}

static PyObject *books_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ahead_max", "rails", "prefer", "on_room", NULL};
    unsigned long long ahead_max;
    PyObject *rails = NULL, *prefer = NULL, *on_room = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K|O!OO:Books", names, &ahead_max, &PyTuple_Type,
                                     &rails, &prefer, &on_room))
        return NULL;
    Books *books = (Books *)type->tp_alloc(type, 0);
    if (!books)
        return NULL;
    books->list.next = books->list.previous = &books->list;
    books->following = 1;
    books->ahead_max = ahead_max;
    books->limit = 1 + ahead_max;
    books->urgent_at = -Py_HUGE_VAL;
    books->prefer = prefer && prefer != Py_None ? Py_NewRef(prefer) : NULL;
    books->on_room = on_room && on_room != Py_None ? Py_NewRef(on_room) : NULL;
    Py_ssize_t n = rails ? PyTuple_GET_SIZE(rails) : 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *load = PyTuple_GET_ITEM(rails, i);
        if (n > PEER_RAILS_MAX || !Py_IS_TYPE(load, &rail_load_type)) {
            PyErr_Format(PyExc_TypeError, "rails are up to %d loads", PEER_RAILS_MAX);
            Py_DECREF(books);
            return NULL;
        }
        books->rails[books->num_rails++] = (RailLoad *)Py_NewRef(load);
    }
    return (PyObject *)books;
}

PyDoc_STRVAR(books_take_doc, "take()\n--\n\nReturn the next number; it is unfinished.");

static PyObject *books_take(Books *books, PyObject *ignored)
{
    (void)ignored;
    Unfinished *number = calloc(1, sizeof *number);
    if (!number)
        return PyErr_NoMemory();
    append_unfinished(books, number);
    return PyLong_FromUnsignedLongLong(number->id);
}

PyDoc_STRVAR(books_end_doc, "end(number)\n--\n\nIt is finished; idempotent.");

static PyObject *books_end(Books *books, PyObject *object)
{
    unsigned long long id = PyLong_AsUnsignedLongLong(object);
    if (id == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    Unfinished *number = books->list.next;
    while (number != &books->list && number->id < id)
        number = number->next;
    if (number != &books->list && number->id == id)
        remove_unfinished(books, number);
    Py_RETURN_NONE;
}

static Py_ssize_t books_length(Books *books)
{
    return books->count;
}

static PyObject *books_oldest(Books *books, void *ignored)
{
    (void)ignored;
    return PyLong_FromUnsignedLongLong(oldest_of(books));
}

static PyObject *books_ahead_max(Books *books, void *ignored)
{
    (void)ignored;
    return PyLong_FromUnsignedLongLong(books->ahead_max);
}

static int books_set_ahead_max(Books *books, PyObject *value, void *ignored)
{
    (void)ignored;
    unsigned long long ahead_max = value ? PyLong_AsUnsignedLongLong(value) : 0;
    if (PyErr_Occurred())
        return -1;
    books->ahead_max = ahead_max;
    books->limit = 0;
    return 0;
}

static PyObject *books_is_exhausted(Books *books, void *ignored)
{
    (void)ignored;
    return PyBool_FromLong(is_exhausted(books));
}

#define BOOKS_MEMBER(name, type) {#name, type, offsetof(Books, name), 0, NULL}

static PyMemberDef books_members[] = {
    BOOKS_MEMBER(num_queued, T_LONGLONG),
    BOOKS_MEMBER(urgent_queued, T_LONGLONG),
    BOOKS_MEMBER(stopped, T_BOOL),
    BOOKS_MEMBER(awaited, T_BOOL),
    BOOKS_MEMBER(urgent_at, T_DOUBLE),
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef books_properties[] = {
    {"oldest", (getter)books_oldest, NULL, "The lowest number that is unfinished.", NULL},
    {"ahead_max", (getter)books_ahead_max, (setter)books_set_ahead_max,
     "How far a number may be ahead of the oldest.", NULL},
    {"is_exhausted", (getter)books_is_exhausted, NULL,
     "Whether the next number has to wait for the oldest transfer to end.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PySequenceMethods books_sequence = {.sq_length = (lenfunc)books_length};
