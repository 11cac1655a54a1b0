/* The master's end of posted puts: who may post, what is taken, and what is decided beside it. Its
 * words are in `own_words.c`, its clients in `rings.c`. Part of `kvstore/rows.c`. */

typedef struct {
    PyObject_HEAD
    OwnWords words;
    Rings rings;
} PostOffice;

/* ---- taking posts */

PyDoc_STRVAR(office_take_doc,
             "take()\n--\n\nReturn what is posted: [(number, kind, key, batch, length, checksum, "
             "count)], of a batch that was ended all its checksums in place of a key; None if nothing "
             "is. `release` follows once all is in the index.");

static PyObject *office_take(PostOffice *office, PyObject *ignored)
{
    (void)ignored;
    if (!is_any_posted(&office->rings))
        Py_RETURN_NONE;
    PyObject *found = PyList_New(0);
    for (int i = 0; found && i < office->rings.count; i++)
        if (!take_ring(&office->rings, office->rings.each + i, found))
            Py_CLEAR(found);
    return found;
}

PyDoc_STRVAR(office_release_doc,
             "release()\n--\n\nWhat `take` returned is in the index, or is not to be: its keys are "
             "not their clients' any more.");

static PyObject *office_release(PostOffice *office, PyObject *ignored)
{
    (void)ignored;
    release_taken(&office->words.keys, &office->rings);
    Py_RETURN_NONE;
}

/* ---- who may post */

PyDoc_STRVAR(office_add_doc,
             "add(ring, number)\n--\n\nTake posts of one more client, from memory whose descriptor "
             "stays the caller's; false if they are too many.");

static PyObject *office_add(PostOffice *office, PyObject *const *args, Py_ssize_t count)
{
    if (expect(count, 2, "add"))
        return NULL;
    int descriptor = (int)PyLong_AsLong(args[0]);
    long number = PyLong_AsLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (number <= OWNER_MASTER || number > UINT16_MAX || ring_of(&office->rings, (unsigned)number)) {
        PyErr_Format(PyExc_ValueError, "a client of number %ld", number);
        return NULL;
    }
    if (office->rings.count == RINGS_MAX)
        Py_RETURN_FALSE;
    return add_ring(&office->rings, descriptor, (unsigned)number) ? NULL : Py_NewRef(Py_True);
}

PyDoc_STRVAR(office_drop_doc,
             "drop(number)\n--\n\nA client is gone: it posts nothing more. What it posted comes with "
             "the next `take`, and `release` frees the rest.");

static PyObject *office_drop(PostOffice *office, PyObject *number)
{
    Ring *ring;
    if (find_ring(&office->rings, number, &ring))
        return NULL;
    if (ring && !ring->left) {
        raise_generation(ring->memory, RING_CLOSED);
        ring->left = true;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(office_revoke_doc,
             "revoke()\n--\n\nPlaces that clients have may be another's from now on: puts into them "
             "are asked for. What was posted before counts: `take` it now.");

static PyObject *office_revoke(PostOffice *office, PyObject *ignored)
{
    (void)ignored;
    for (int i = 0; i < office->rings.count; i++) {
        unsigned char *memory = office->rings.each[i].memory;
        uint64_t floor = generation_of(shared_load(memory + RING_STATE)) + 1;
        shared_store(memory + RING_FLOOR, floor);
        raise_generation(memory, 0);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(office_close_doc,
             "close()\n--\n\nNobody posts anything more. What was posted before counts: `take` it.");

static PyObject *office_close(PostOffice *office, PyObject *ignored)
{
    (void)ignored;
    shared_store(office->words.keys.memory + KEYS_OPEN, 0);
    raise_generations(&office->rings, RING_CLOSED);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(office_grant_doc,
             "grant(number, first, length, payload)\n--\n\nTell a client what became of the places "
             "that it ordered, from number `first` on, for values of so many bytes; false if it is to "
             "ask.");

static PyObject *office_grant(PostOffice *office, PyObject *const *args, Py_ssize_t count)
{
    if (expect(count, 4, "grant"))
        return NULL;
    Ring *ring;
    if (find_ring(&office->rings, args[0], &ring))
        return NULL;
    uint64_t first = PyLong_AsUnsignedLongLong(args[1]), length = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred() || !PyBytes_Check(args[3])) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a grant is bytes");
        return NULL;
    }
    size_t nbytes = (size_t)PyBytes_GET_SIZE(args[3]);
    if (!ring || nbytes > GRANT_BYTES_MAX)
        Py_RETURN_FALSE;
    unsigned char *grant = grant_of(ring->memory, length);
    uint64_t turn = shared_load(grant) & ~(uint64_t)1;
    shared_store(grant, turn + 1);
    shared_store(grant + 8, first);
    shared_store(grant + 16, nbytes);
    memcpy(grant + GRANT_HEAD_BYTES, PyBytes_AS_STRING(args[3]), nbytes);
    shared_store(grant, turn + 2);
    Py_RETURN_TRUE;
}

/* ---- deciding about keys that clients may be putting */

PyDoc_STRVAR(office_announce_doc,
             "announce(keys)\n--\n\nA request is handled from now on, and nobody claims these keys, "
             "nor any that gets free meanwhile, until `retract`. Return the numbers of the clients "
             "that have claimed one already; None: nobody has.");

static PyObject *office_announce(PostOffice *office, PyObject *of_keys)
{
    PyObject *keys = PySequence_Fast(of_keys, "expected keys"), *found = NULL;
    if (!keys)
        return NULL;
    if (announce_words(&office->words, keys, &found))
        Py_CLEAR(found);
    else if (!found)
        found = Py_NewRef(Py_None);
    Py_DECREF(keys);
    return found;
}

PyDoc_STRVAR(office_retract_doc,
             "retract()\n--\n\nThe request was handled. What was announced, or was let go of, and is "
             "in no book now is taken no more.");

static PyObject *office_retract(PostOffice *office, PyObject *ignored)
{
    (void)ignored;
    free_loose(&office->words);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(office_stop_doc,
             "stop(number)\n--\n\nWhatever put of this client is under way is asked for. What it "
             "posted before counts: `take` it, and then `clear` what it claimed.");

static PyObject *office_stop(PostOffice *office, PyObject *number)
{
    Ring *ring;
    if (find_ring(&office->rings, number, &ring))
        return NULL;
    if (ring)
        raise_generation(ring->memory, 0);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(office_clear_doc,
             "clear(keys, numbers)\n--\n\nTake keys back from clients that were stopped.");

static PyObject *office_clear(PostOffice *office, PyObject *const *args, Py_ssize_t count)
{
    if (expect(count, 2, "clear"))
        return NULL;
    PyObject *keys = PySequence_Fast(args[0], "expected keys");
    PyObject *numbers = keys ? PySequence_Fast(args[1], "expected numbers") : NULL;
    for (Py_ssize_t i = 0; numbers && i < PySequence_Fast_GET_SIZE(numbers); i++) {
        unsigned long number = PyLong_AsUnsignedLong(PySequence_Fast_GET_ITEM(numbers, i));
        if (PyErr_Occurred())
            break;
        for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(keys); k++) {
            const unsigned char *key = key_of(PySequence_Fast_GET_ITEM(keys, k));
            if (key)
                clear_claims(&office->words.keys, key, (unsigned)number);
        }
    }
    Py_XDECREF(keys);
    Py_XDECREF(numbers);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* ---- the head */

PyDoc_STRVAR(office_say_doc,
             "say(open, leads_until_ns)\n--\n\nTell clients whether they may post, and until when "
             "this master leads.");

static PyObject *office_say(PostOffice *office, PyObject *const *args, Py_ssize_t count)
{
    if (expect(count, 2, "say"))
        return NULL;
    int open = PyObject_IsTrue(args[0]);
    long long leads = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    unsigned char *memory = office->words.keys.memory;
    shared_store(memory + KEYS_LEADS_UNTIL, (uint64_t)leads);
    shared_store(memory + KEYS_OPEN, (uint64_t)open);
    if (!open)
        raise_generations(&office->rings, 0);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(office_look_at_doc,
             "look_at(when_ns)\n--\n\nTell clients that posts are looked at then without anybody "
             "being woken; 0: not at all.");

static PyObject *office_look_at(PostOffice *office, PyObject *when_ns)
{
    long long when = PyLong_AsLongLong(when_ns);
    if (PyErr_Occurred())
        return NULL;
    shared_store(office->words.keys.memory + KEYS_LOOKS_AT, (uint64_t)when);
    Py_RETURN_NONE;
}

/* ---- its type */

static PyObject *office_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    static char *keywords[] = {"keys", "clock", NULL};
    int keys;
    const char *clock;
    Py_ssize_t clock_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, names, "iy#", keywords, &keys, &clock, &clock_bytes))
        return NULL;
    if (clock_bytes > CLOCK_BYTES)
        return PyErr_Format(PyExc_ValueError, "a clock's name of %zd bytes", clock_bytes);
    PostOffice *office = (PostOffice *)type->tp_alloc(type, 0); /* zeroed */
    if (office && map_taken_keys(keys, &office->words.keys))
        Py_CLEAR(office);
    if (office)
        memcpy(office->words.keys.memory + KEYS_CLOCK, clock, (size_t)clock_bytes);
    return (PyObject *)office;
}

static void office_free(PostOffice *office)
{
    drop_rings(&office->words.keys, &office->rings);
    drop_words(&office->words);
    Py_TYPE(office)->tp_free((PyObject *)office);
}

static PyObject *office_used(PostOffice *office, void *closure)
{
    (void)closure;
    return PyLong_FromSsize_t(office->words.used);
}

static PyObject *office_room(PostOffice *office, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(office->words.keys.num_buckets * (KEYS_BUCKET_WORDS - 1));
}

static PyObject *office_num_clients(PostOffice *office, void *closure)
{
    (void)closure;
    return PyLong_FromLong(office->rings.count);
}

static PyMethodDef office_methods[] = {
    METHOD_OF(office, take, METH_NOARGS),
    METHOD_OF(office, release, METH_NOARGS),
    METHOD_OF(office, add, METH_FASTCALL),
    METHOD_OF(office, drop, METH_O),
    METHOD_OF(office, revoke, METH_NOARGS),
    METHOD_OF(office, close, METH_NOARGS),
    METHOD_OF(office, grant, METH_FASTCALL),
    METHOD_OF(office, announce, METH_O),
    METHOD_OF(office, retract, METH_NOARGS),
    METHOD_OF(office, stop, METH_O),
    METHOD_OF(office, clear, METH_FASTCALL),
    METHOD_OF(office, say, METH_FASTCALL),
    METHOD_OF(office, look_at, METH_O),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef office_values[] = {
    {"used", (getter)office_used, NULL, "Keys that the master has entered.", NULL},
    {"room", (getter)office_room, NULL, "Words for keys.", NULL},
    {"num_clients", (getter)office_num_clients, NULL, "Clients that may post.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject post_office_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvstore._rows.PostOffice",
    .tp_doc = "PostOffice(keys, clock)\n--\n\nThe master's end of posted puts, on memory whose descriptor "
              "stays the caller's. Not thread-safe.",
    .tp_basicsize = sizeof(PostOffice),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = office_new,
    .tp_dealloc = (destructor)office_free,
    .tp_methods = office_methods,
    .tp_getset = office_values,
};
