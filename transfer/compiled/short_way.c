/* The short ways of an engine to its peers: one call checks a transfer, numbers it and sends it.
 *
 * Where the peer's memory is mapped the same call copies instead (`mapped.c`). */

/* Transfers since they were taken last. */
typedef struct {
    long long operations[PRIORITIES], bytes[PRIORITIES], written, read, immediates;
} Counts;

typedef struct {
    PyObject_HEAD
    PyObject *peers;  /* dict: name -> Books */
    PyObject *mapped; /* dict: name -> (PeerLink, dict: token -> MappedWindow) */
    PyTypeObject *region_type, *key_type, *made_type, *copied_type;
    PyObject *priorities; /* tuple, the most urgent first: ACTIVATIONS, KV_GET, KV_PUT, ... */
    PyObject *on_post; /* called at the next post, and forgotten */
    double timeout_s;
    long long nbytes_max, slice_bytes, urgent_bytes_max;
    Counts sent, copied;
} ShortWay;

static PyTypeObject short_way_type;

static int short_way_clear(ShortWay *way)
{
    Py_CLEAR(way->peers);
    Py_CLEAR(way->mapped);
    Py_CLEAR(way->region_type);
    Py_CLEAR(way->key_type);
    Py_CLEAR(way->made_type);
    Py_CLEAR(way->copied_type);
    Py_CLEAR(way->priorities);
    Py_CLEAR(way->on_post);
    return 0;
}

static int short_way_traverse(ShortWay *way, visitproc visit, void *arg)
{
    Py_VISIT(way->peers);
    Py_VISIT(way->mapped);
    Py_VISIT(way->region_type);
    Py_VISIT(way->key_type);
    Py_VISIT(way->made_type);
    Py_VISIT(way->copied_type);
    Py_VISIT(way->priorities);
    Py_VISIT(way->on_post);
    return 0;
}

static void short_way_dealloc(ShortWay *way)
{
    PyObject_GC_UnTrack(way);
    short_way_clear(way);
    Py_TYPE(way)->tp_free((PyObject *)way);
}

static PyObject *short_way_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"region",     "key",        "made",             "copied",
                               "priorities", "nbytes_max", "slice_bytes", "urgent_bytes_max", NULL};
    PyObject *region, *key, *made, *copied, *priorities;
    long long nbytes_max, slice_bytes, urgent_bytes_max;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!O!LLL:ShortWay", keywords, &PyType_Type,
                                     &region, &PyType_Type, &key, &PyType_Type, &made,
                                     &PyType_Type, &copied, &PyTuple_Type, &priorities, &nbytes_max,
                                     &slice_bytes, &urgent_bytes_max))
        return NULL;
    if (PyTuple_GET_SIZE(priorities) != PRIORITIES ||
        !PyType_IsSubtype((PyTypeObject *)made, &message_type) ||
        !PyType_IsSubtype((PyTypeObject *)copied, &mapped_copy_type)) {
        PyErr_Format(PyExc_TypeError, "not %d priorities, or no class of messages or copies",
                     PRIORITIES);
        return NULL;
    }
    ShortWay *way = (ShortWay *)type->tp_alloc(type, 0);
    if (!way)
        return NULL;
    way->region_type = (PyTypeObject *)Py_NewRef(region);
    way->key_type = (PyTypeObject *)Py_NewRef(key);
    way->made_type = (PyTypeObject *)Py_NewRef(made);
    way->copied_type = (PyTypeObject *)Py_NewRef(copied);
    way->priorities = Py_NewRef(priorities);
    way->nbytes_max = nbytes_max;
    way->slice_bytes = slice_bytes;
    way->urgent_bytes_max = urgent_bytes_max;
    way->timeout_s = 30.0;
    way->peers = PyDict_New();
    way->mapped = PyDict_New();
    if (!way->peers || !way->mapped) {
        Py_DECREF(way);
        return NULL;
    }
    return (PyObject *)way;
}

/* ---- what is asked for */

typedef struct {
    bool writes, signals, urgent;
    int priority;
    uint32_t immediate;
    long long our_offset, their_offset, nbytes;
    long long window_bytes, rights; /* of the key */
    uintptr_t start;
    PyObject *token; /* a reference */
    PyObject *note;  /* bytes, borrowed; NULL if it carries none */
} Wanted;

/* An attribute that is a non-negative integer; -1 without an exception if it is something else. */
static long long number_of(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    long long number = value && PyLong_CheckExact(value) ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    if (PyErr_Occurred())
        PyErr_Clear();
    return number;
}

/* Whether an attribute is this text. */
static bool is_text(PyObject *object, PyObject *name, PyObject *wanted)
{
    PyObject *value = PyObject_GetAttr(object, name);
    bool same = value && (value == wanted || (PyUnicode_Check(value) &&
                                              PyUnicode_Compare(value, wanted) == 0));
    Py_XDECREF(value);
    if (PyErr_Occurred())
        PyErr_Clear();
    return same;
}

static bool take_number(PyObject *object, long long *number)
{
    int overflow;
    if (!PyLong_CheckExact(object))
        return false;
    *number = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow && *number >= 0;
}

/* The class of traffic: the given one, or as `class_of` in `priority.py` says. */
static int priority_of(const ShortWay *way, PyObject *given, const Wanted *wanted)
{
    if (given == Py_None) {
        if (wanted->signals || wanted->nbytes <= way->urgent_bytes_max)
            return 0;
        return wanted->writes ? 2 : 1;
    }
    for (int i = 0; i < PRIORITIES; i++)
        if (PyTuple_GET_ITEM(way->priorities, i) == given)
            return i;
    return -1;
}

/* Whether it is a piece that lies within what the region and the key say: (peer, region, key, our
 * offset, their offset, nbytes, immediate, priority). What is wrong with another is for others to
 * say. */
static bool understand_piece(const ShortWay *way, PyObject *const *args, Wanted *wanted)
{
    PyObject *region = args[1], *key = args[2];
    if (!Py_IS_TYPE(region, way->region_type) || !Py_IS_TYPE(key, way->key_type) ||
        !take_number(args[3], &wanted->our_offset) ||
        !take_number(args[4], &wanted->their_offset) || !take_number(args[5], &wanted->nbytes) ||
        (wanted->nbytes == 0 && !wanted->note))
        return false;
    wanted->priority = priority_of(way, args[7], wanted);
    wanted->urgent = wanted->priority == 0;
    long long theirs = number_of(key, names.nbytes), rights = number_of(key, names.rights);
    long long ours = number_of(region, names.nbytes), start = number_of(region, names.start);
    if (wanted->priority < 0 || theirs < 0 || rights < 0 || ours < 0 || start <= 0 ||
        !(rights & (wanted->writes ? MAY_WRITE : MAY_READ)) ||
        wanted->nbytes > theirs || wanted->their_offset > theirs - wanted->nbytes ||
        wanted->nbytes > ours || wanted->our_offset > ours - wanted->nbytes ||
        !is_text(key, names.owner, args[0]))
        return false;
    wanted->start = (uintptr_t)start;
    wanted->window_bytes = theirs;
    wanted->rights = rights;
    wanted->token = PyObject_GetAttr(key, names.token);
    if (wanted->token && PyBytes_CheckExact(wanted->token) &&
        PyBytes_GET_SIZE(wanted->token) == TOKEN_BYTES)
        return true;
    Py_CLEAR(wanted->token);
    PyErr_Clear();
    return false;
}

static size_t note_size(PyObject *note)
{
    return note ? (size_t)PyBytes_GET_SIZE(note) : 0;
}

/* Whether it is a transfer that may go the short way over sockets. */
static bool understand(const ShortWay *way, PyObject *const *args, Wanted *wanted)
{
    wanted->signals = args[6] != Py_None;
    if (wanted->note && (!wanted->writes || wanted->signals || !note_size(wanted->note) ||
                         note_size(wanted->note) > NOTE_BYTES_MAX))
        return false;
    if (wanted->signals) {
        long long immediate;
        if (!wanted->writes || !take_number(args[6], &immediate) || immediate > UINT32_MAX)
            return false;
        wanted->immediate = (uint32_t)immediate;
    }
    if (!understand_piece(way, args, wanted))
        return false;
    if (wanted->nbytes <= way->nbytes_max && is_text(args[2], names.kind, names.host))
        return true;
    Py_CLEAR(wanted->token);
    return false;
}

/* ---- where it goes */

/* So many times its time counts a rail, for memory that others suit better. */
static double handicap(PyObject *tiers, int idx)
{
    double factor = 1.0;
    Py_ssize_t n = PyTuple_GET_SIZE(tiers);
    for (Py_ssize_t i = 0; i < n; i++, factor *= PREFERENCE_FACTOR) {
        PyObject *tier = PyTuple_GET_ITEM(tiers, i);
        for (Py_ssize_t k = 0; PyTuple_Check(tier) && k < PyTuple_GET_SIZE(tier); k++)
            if (PyLong_AsLong(PyTuple_GET_ITEM(tier, k)) == idx)
                return factor;
    }
    return factor;
}

/* The rail on which it should be done first; bulk over several is spread, and has none here. */
static RailLoad *choose_rail(const Books *books, const Wanted *wanted, PyObject *tiers)
{
    if (books->num_rails > 1 && !wanted->urgent)
        return NULL;
    RailLoad *best = NULL;
    double best_finish = 0;
    for (int i = 0; i < books->num_rails; i++) {
        RailLoad *load = books->rails[i];
        if (!load->open || !load->healthy || !load->link)
            continue;
        double finish =
            (double)(load->urgent_bytes + wanted->nbytes + COST_BYTES_MIN) / load->bandwidth;
        if (tiers && PyTuple_Check(tiers))
            finish *= handicap(tiers, i);
        if (!best || finish < best_finish) {
            best = load;
            best_finish = finish;
        }
    }
    return best;
}

static bool bulk_fits(const Books *books, const RailLoad *load, long long nbytes, double now)
{
    long long under_way = load->out_bytes - load->urgent_bytes;
    if (!under_way)
        return true;
    return under_way + nbytes <= (now - books->urgent_at < URGENT_MEMORY_S
                                      ? load->bulk_bytes_max_beside_urgent
                                      : load->bulk_bytes_max);
}

/* Whether it may travel as one request. What is larger than a slice may where that takes no longer
 * than a few slices elsewhere, and nothing urgent is about. */
static bool is_one_request(const ShortWay *way, const Books *books, const RailLoad *load,
                           const Wanted *wanted, double now)
{
    return wanted->nbytes <= way->slice_bytes ||
           (!wanted->urgent && load->bandwidth * SLICE_S >= (double)way->slice_bytes &&
            now - books->urgent_at >= URGENT_MEMORY_S);
}

/* The least busy lane of its kind; NULL where Python should open one. */
static Lane *choose_lane(const RailLoad *load, bool urgent)
{
    if (urgent)
        return load->urgent;
    Lane *best = NULL;
    for (int i = 0; i < load->num_bulk; i++)
        if (!best || look_in_flight(load->bulk[i]) < look_in_flight(best))
            best = load->bulk[i];
    return best && look_in_flight(best) > 1 && !load->all_bulk ? NULL : best;
}

/* ---- its way */

static Message *make_message(ShortWay *way, Books *books, RailLoad *load, Lane *lane,
                             const Wanted *wanted, PyObject *const *args, double now)
{
    Message *message = (Message *)way->made_type->tp_alloc(way->made_type, 0);
    if (!message)
        return NULL;
    message->writes = wanted->writes;
    message->urgent = wanted->urgent;
    message->signals = wanted->signals;
    message->immediate = wanted->immediate;
    message->our_offset = wanted->our_offset;
    message->their_offset = wanted->their_offset;
    message->nbytes = wanted->nbytes;
    message->started = now;
    message->deadline = now + way->timeout_s;
    message->books = (Books *)Py_NewRef(books);
    message->load = (RailLoad *)Py_NewRef(load);
    message->lane = (Lane *)Py_NewRef(lane);
    message->peer = Py_NewRef(args[0]);
    message->region = Py_NewRef(args[1]);
    message->token = Py_NewRef(wanted->token);
    message->priority = Py_NewRef(PyTuple_GET_ITEM(way->priorities, wanted->priority));
    message->rail = Py_NewRef(load->rail);
    message->link = Py_NewRef(load->link);
    message->note = Py_XNewRef(wanted->note);
    return message;
}

/* Number it, and give it to its lane. False if the lane takes nothing, or trouble came first. */
static bool send_message(Message *message, const Wanted *wanted)
{
    Books *books = message->books;
    /* Others may run until we have it. From there on this is one step for all of them. */
    lock_without_gil(&message->lane->mutex);
    if (books->stopped || is_exhausted(books)) {
        pthread_mutex_unlock(&message->lane->mutex);
        return false;
    }
    append_unfinished(books, &message->number);
    message->number.message = Py_NewRef(message);
    message->oldest = oldest_of(books);
    size_t note = note_size(message->note), n = message->nbytes ? 1 : 0;
    Request request = {.kind = message->writes ? WRITE_REQUEST : READ_REQUEST,
                       .flags = message->signals ? HAS_IMMEDIATE : note ? HAS_NOTE : 0,
                       .num_slices = 1,
                       .num_pieces = (uint32_t)n,
                       .immediate = note ? (uint32_t)note : message->immediate,
                       .nbytes = (uint64_t)message->nbytes,
                       .transfer_id = message->number.id,
                       .oldest = message->oldest};
    Job *job = (Job *)message->job;
    fill_job(job, &request, PyBytes_AS_STRING(message->token), n);
    job->embedded = true;
    if (n)
        set_piece(job, 1, 0, wanted->start + (uintptr_t)message->our_offset, message->their_offset,
                  message->nbytes);
    if (note)
        set_note(job, n, PyBytes_AS_STRING(message->note), note);
    message->pending = true;
    message->load->out_bytes += message->nbytes;
    message->load->urgent_bytes += message->urgent ? message->nbytes : 0;
    bool taken = queue_job(message->lane, job, (PyObject *)message);
    pthread_mutex_unlock(&message->lane->mutex);
    if (!taken) {
        drop_load(message);
        unlink_unfinished(books, &message->number);
        Py_CLEAR(message->number.message);
    }
    return taken;
}

static void count_transfer(Counts *counts, const Wanted *wanted)
{
    counts->operations[wanted->priority]++;
    counts->bytes[wanted->priority] += wanted->nbytes;
    *(wanted->writes ? &counts->written : &counts->read) += wanted->nbytes;
    counts->immediates += wanted->signals;
}

/* See to it that somebody receives its answer. Returns 0, or -1 with an exception. */
static int attend_to(Message *message)
{
    Lane *lane = message->lane;
    RailLoad *load = message->load;
    bool soon = attend_to_posted(lane);
    if (message->nbytes + (long long)note_size(message->note) > GIL_BYTES) {
        bool unsent;
        Py_BEGIN_ALLOW_THREADS
        unsent = push_jobs(lane);
        Py_END_ALLOW_THREADS
        soon |= unsent;
    }
    return soon ? attend_soon(load) : 0;
}

/* Returns 0, or -1 with an exception. */
static int call_once(PyObject **at)
{
    PyObject *function = *at;
    if (!function || function == Py_None)
        return 0;
    *at = NULL;
    PyObject *done = PyObject_CallNoArgs(function);
    Py_DECREF(function);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

PyDoc_STRVAR(short_way_post_doc,
             "post(writes, peer, region, key, our_offset, their_offset, nbytes, immediate, "
             "priority, note=None)\n--\n\nSend one piece at once, or copy it where it is mapped. "
             "Returns its handle, or None if it has to go the long way: whatever is unusual, or "
             "wrong.");

static PyObject *post_mapped(ShortWay *way, bool writes, PyObject *const *args);

static PyObject *short_way_post(ShortWay *way, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count < 10 ? count : count - 1, 9, "post") < 0)
        return NULL;
    PyObject *note = count == 10 && args[9] != Py_None ? args[9] : NULL;
    if (note && !PyBytes_CheckExact(note))
        Py_RETURN_NONE;
    Books *books = (Books *)PyDict_GetItemWithError(way->peers, args[1]);
    if (!books) {
        if (!PyErr_Occurred() && !note)
            return post_mapped(way, args[0] == Py_True, args + 1);
        PyErr_Clear(); /* what cannot be a key is no peer's name */
        Py_RETURN_NONE;
    }
    if (books->stopped || books->count >= OPERATIONS_MAX || is_exhausted(books))
        Py_RETURN_NONE;
    Wanted wanted = {.writes = args[0] == Py_True, .note = note};
    if (!understand(way, args + 1, &wanted))
        Py_RETURN_NONE;
    /* Nothing overtakes its own kind; what is urgent does not queue behind bulk. */
    if (wanted.urgent ? books->urgent_queued : books->num_queued) {
        Py_DECREF(wanted.token);
        Py_RETURN_NONE;
    }
    PyObject *tiers = NULL;
    Message *message = NULL;
    double now = (double)now_ns() * 1e-9;
    Py_INCREF(books);
    if (books->num_rails > 1 && books->prefer) {
        tiers = PyObject_CallOneArg(books->prefer, args[2]);
        if (!tiers)
            goto failed;
    }
    RailLoad *load = books->stopped ? NULL : choose_rail(books, &wanted, tiers);
    if (load && !is_one_request(way, books, load, &wanted, now))
        load = NULL;
    Lane *lane = load ? choose_lane(load, wanted.urgent) : NULL;
    if (!lane || (!wanted.urgent && !bulk_fits(books, load, wanted.nbytes, now))) {
        Py_XDECREF(tiers);
        Py_DECREF(wanted.token);
        Py_DECREF(books);
        Py_RETURN_NONE;
    }
    if (wanted.urgent)
        books->urgent_at = now;
    message = make_message(way, books, load, lane, &wanted, args + 1, now);
    if (!message)
        goto failed;
    message->rails = tiers ? Py_NewRef(tiers) : PyTuple_New(0);
    if (!message->rails)
        goto failed;
    if (!send_message(message, &wanted)) {
        Py_DECREF(message);
        message = (Message *)Py_NewRef(Py_None);
    } else {
        count_transfer(&way->sent, &wanted);
        if (attend_to(message) < 0 || call_once(&way->on_post) < 0)
            Py_CLEAR(message);
    }
    Py_XDECREF(tiers);
    Py_DECREF(wanted.token);
    Py_DECREF(books);
    return (PyObject *)message;
failed:
    Py_XDECREF(message);
    Py_XDECREF(tiers);
    Py_DECREF(wanted.token);
    Py_DECREF(books);
    return NULL;
}

PyDoc_STRVAR(short_way_add_doc, "add(peer, books)\n--\n\nOpen the short way to a peer.");

static PyObject *short_way_add(ShortWay *way, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 2, "add") < 0)
        return NULL;
    if (!PyUnicode_CheckExact(args[0]) || !Py_IS_TYPE(args[1], &books_type)) {
        PyErr_SetString(PyExc_TypeError, "add takes a name and books");
        return NULL;
    }
    return PyDict_SetItem(way->peers, args[0], args[1]) < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(short_way_remove_doc, "remove(peer, books)\n--\n\nClose it, if it is still these "
                                   "books'; idempotent.");

static PyObject *short_way_remove(ShortWay *way, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 2, "remove") < 0)
        return NULL;
    PyObject *found = PyDict_GetItemWithError(way->peers, args[0]);
    if (found == args[1] && found && PyDict_DelItem(way->peers, args[0]) < 0)
        return NULL;
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(short_way_take_counts_doc,
             "take_counts()\n--\n\nReturn what was posted since the last call: bytes written and "
             "read, immediates, then operations and bytes of each class.");

static PyObject *take_counts(Counts *counts)
{
    const long long *n = counts->operations, *bytes = counts->bytes;
    PyObject *taken = Py_BuildValue("LLL(LLLLL)(LLLLL)", counts->written, counts->read,
                                    counts->immediates, n[0], n[1], n[2], n[3], n[4], bytes[0],
                                    bytes[1], bytes[2], bytes[3], bytes[4]);
    if (taken)
        memset(counts, 0, sizeof *counts);
    return taken;
}

static PyObject *short_way_take_counts(ShortWay *way, PyObject *ignored)
{
    (void)ignored;
    return take_counts(&way->sent);
}

PyDoc_STRVAR(short_way_take_copied_doc,
             "take_copied()\n--\n\nReturn what was copied at once since the last call; as of "
             "`take_counts`.");

static PyObject *short_way_take_copied(ShortWay *way, PyObject *ignored)
{
    (void)ignored;
    return take_counts(&way->copied);
}

PyDoc_STRVAR(short_way_map_doc,
             "map(peer, link, windows)\n--\n\nCopy at once what lies in `windows`, by token, while "
             "the link has no `evidence`.");

static PyObject *short_way_map(ShortWay *way, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 3, "map") < 0)
        return NULL;
    if (!PyUnicode_CheckExact(args[0]) || !PyDict_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "map takes a name, a link and a dict of windows");
        return NULL;
    }
    PyObject *place = PyTuple_Pack(2, args[1], args[2]);
    int failed = place ? PyDict_SetItem(way->mapped, args[0], place) : -1;
    Py_XDECREF(place);
    return failed < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(short_way_unmap_doc, "unmap(peer, link)\n--\n\nDo so no more, if it is still this "
                                  "link's; idempotent.");

static PyObject *short_way_unmap(ShortWay *way, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 2, "unmap") < 0)
        return NULL;
    PyObject *found = PyDict_GetItemWithError(way->mapped, args[0]);
    if (found && PyTuple_GET_ITEM(found, 0) == args[1] && PyDict_DelItem(way->mapped, args[0]) < 0)
        return NULL;
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef short_way_methods[] = {
    {"post", (PyCFunction)(void (*)(void))short_way_post, METH_FASTCALL, short_way_post_doc},
    {"add", (PyCFunction)(void (*)(void))short_way_add, METH_FASTCALL, short_way_add_doc},
    {"remove", (PyCFunction)(void (*)(void))short_way_remove, METH_FASTCALL, short_way_remove_doc},
    {"take_counts", (PyCFunction)short_way_take_counts, METH_NOARGS, short_way_take_counts_doc},
    {"map", (PyCFunction)(void (*)(void))short_way_map, METH_FASTCALL, short_way_map_doc},
    {"unmap", (PyCFunction)(void (*)(void))short_way_unmap, METH_FASTCALL, short_way_unmap_doc},
    {"take_copied", (PyCFunction)short_way_take_copied, METH_NOARGS, short_way_take_copied_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef short_way_members[] = {
    {"on_post", T_OBJECT, offsetof(ShortWay, on_post), 0, NULL},
    {"timeout_s", T_DOUBLE, offsetof(ShortWay, timeout_s), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject short_way_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.ShortWay",
    .tp_doc = "The short ways of an engine to its peers. Thread-safe.",
    .tp_basicsize = sizeof(ShortWay),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = short_way_new,
    .tp_dealloc = (destructor)short_way_dealloc,
    .tp_traverse = (traverseproc)short_way_traverse,
    .tp_clear = (inquiry)short_way_clear,
    .tp_methods = short_way_methods,
    .tp_members = short_way_members,
};
