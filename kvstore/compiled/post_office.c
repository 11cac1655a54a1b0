/* The master's end of posted puts: see `post_ring.c` and `taken_keys.c`. Part of `kvstore/rows.c`. */

#define BOXES_MAX 64 /* all of them are looked at with each request: further clients ask */
#define LOOSE_MIN 64
#define LOOSE_KEPT 4096
#define LOOSE_LOOKS 8

typedef struct {
    unsigned char *memory;
    unsigned number; /* never 0 */
    bool left;       /* its client hung up: what it posted before counts */
} Ring;

typedef struct {
    unsigned number;
    unsigned char key[KEY_BYTES];
} TakenPost;

typedef struct {
    unsigned char key[KEY_BYTES];
    bool needed; /* again */
} LooseWord;

typedef struct {
    PyObject_HEAD
    TakenKeys keys;
    Ring rings[BOXES_MAX];
    int num_rings;
    TakenPost *taken; /* posts whose keys are still their clients' */
    Py_ssize_t num_taken, taken_room;
    Py_ssize_t used; /* keys that have a word of the master's, or are counted */
    bool deciding;     /* a request is being handled */
    LooseWord *loose;  /* words of the master's that are freed after it */
    Py_ssize_t num_loose, loose_room, next_loose;
} PostOffice;

/* ---- the master's own words */

static const unsigned char *post_key(PyObject *key)
{
    bool fits = PyBytes_CheckExact(key) && PyBytes_GET_SIZE(key) == KEY_BYTES;
    return fits ? (const unsigned char *)PyBytes_AS_STRING(key) : NULL;
}

/* Put a word; where there is no room it is counted, and nobody claims in its bucket. */
static void put_word(PostOffice *office, uint64_t *bucket, uint64_t print)
{
    office->used++;
    for (int i = 1; i < KEYS_BUCKET_WORDS; i++)
        if (!shared_load(bucket + i) && shared_swap(bucket + i, 0, print))
            return;
    __atomic_fetch_add(bucket, 1, __ATOMIC_SEQ_CST);
}

static void free_word(PostOffice *office, const unsigned char *key)
{
    uint64_t print, *bucket = bucket_of(&office->keys, key, &print);
    office->used--;
    for (int i = 1; i < KEYS_BUCKET_WORDS; i++)
        if (shared_load(bucket + i) == print) {
            __atomic_store_n(bucket + i, 0, __ATOMIC_RELEASE);
            return;
        }
    if (shared_load(bucket)) /* else somebody has spoilt it: as good as gone */
        __atomic_fetch_sub(bucket, 1, __ATOMIC_SEQ_CST);
}

/* Whether a word that is to be freed is of this key: it is not, then. They come in one order mostly. */
static bool take_loose(PostOffice *office, const unsigned char *key)
{
    Py_ssize_t end = office->next_loose + LOOSE_LOOKS;
    for (Py_ssize_t i = office->next_loose; i < end && i < office->num_loose; i++)
        if (!office->loose[i].needed && !memcmp(office->loose[i].key, key, KEY_BYTES)) {
            office->loose[i].needed = true;
            office->next_loose = i + 1;
            return true;
        }
    return false;
}

static void loosen_word(PostOffice *office, const unsigned char *key)
{
    if (office->num_loose == office->loose_room) {
        Py_ssize_t room = 2 * office->loose_room + LOOSE_MIN;
        LooseWord *more = PyMem_Realloc(office->loose, (size_t)room * sizeof *more);
        if (!more)
            return; /* it stays taken: the master is asked */
        office->loose = more;
        office->loose_room = room;
    }
    LooseWord *one = office->loose + office->num_loose++;
    memcpy(one->key, key, KEY_BYTES);
    one->needed = false;
}

/* A key is in one of the master's books. */
static void enter_word(PostOffice *office, PyObject *of_key)
{
    const unsigned char *key = post_key(of_key);
    if (!key || (office->deciding && take_loose(office, key)))
        return; /* keys of other than 16 bytes are claimed by no client */
    uint64_t print, *bucket = bucket_of(&office->keys, key, &print);
    put_word(office, bucket, print);
}

/* It is there no more. While a request is handled its word stays: what ends as a put may be a block
 * in the next moment, and in between nobody is to take it for free. */
static void leave_word(PostOffice *office, PyObject *of_key)
{
    const unsigned char *key = post_key(of_key);
    if (key && office->deciding)
        loosen_word(office, key);
    else if (key)
        free_word(office, key);
}

/* ---- clients' claims */

static unsigned owner_of(uint64_t word)
{
    return (unsigned)(word >> 8 & 0xFFFF);
}

static Ring *ring_of(PostOffice *office, unsigned number)
{
    for (int i = 0; i < office->num_rings; i++)
        if (office->rings[i].number == number)
            return office->rings + i;
    return NULL;
}

/* The ring of a client, by its number as Python has it; null if there is none. -1 with an exception. */
static int find_ring(PostOffice *office, PyObject *number, Ring **ring)
{
    unsigned long wanted = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return -1;
    *ring = wanted > UINT16_MAX ? NULL : ring_of(office, (unsigned)wanted);
    return 0;
}

/* Clear the words that one client has for a key. */
static void clear_claims(const PostOffice *office, const unsigned char *key, unsigned number)
{
    uint64_t print, *bucket = bucket_of(&office->keys, key, &print);
    for (int i = 1; i < KEYS_BUCKET_WORDS; i++) {
        uint64_t word = shared_load(bucket + i);
        if (has_print(word, print) && owner_of(word) == number)
            (void)shared_swap(bucket + i, word, 0);
    }
}

/* Raise the generation: what is under way is asked for. `more`: bits to set with it. */
static void raise_generation(const Ring *ring, uint64_t more)
{
    uint64_t state, fresh;
    do {
        state = shared_load(ring->memory + RING_STATE);
        fresh = (state + RING_COUNT_MASK + 1) | more;
    } while (!shared_swap(ring->memory + RING_STATE, state, fresh));
}

/* Clear the word of a put that was under way when its client ended. */
static void clear_last_claim(const PostOffice *office, const Ring *ring)
{
    uint64_t at = shared_load(ring->memory + RING_CLAIM);
    uint64_t word = shared_load(ring->memory + RING_CLAIM + 8);
    if (word && owner_of(word) == ring->number && at % 8 == 0 && at >= KEYS_HEAD_BYTES &&
        at <= office->keys.nbytes - 8)
        (void)shared_swap(office->keys.memory + at, word, 0);
}

static void unmap_ring(const PostOffice *office, const Ring *ring)
{
    clear_last_claim(office, ring);
    munmap(ring->memory, RING_BYTES);
}

/* ---- taking posts */

static bool keep_taken(PostOffice *office, unsigned number, const unsigned char *key)
{
    if (office->num_taken == office->taken_room) {
        Py_ssize_t room = 2 * office->taken_room + POSTS_MAX;
        TakenPost *more = PyMem_Realloc(office->taken, (size_t)room * sizeof *more);
        if (!more) {
            PyErr_NoMemory();
            return false;
        }
        office->taken = more;
        office->taken_room = room;
    }
    TakenPost *one = office->taken + office->num_taken++;
    one->number = number;
    memcpy(one->key, key, KEY_BYTES);
    return true;
}

/* Append what one client has posted. The memory is its own: each post is copied before it is used. */
static bool take_ring(PostOffice *office, const Ring *ring, PyObject *found)
{
    uint64_t end = shared_load(ring->memory + RING_STATE) & RING_COUNT_MASK;
    uint64_t at = shared_load(ring->memory + RING_TAKEN) & RING_COUNT_MASK;
    if (((end - at) & RING_COUNT_MASK) > POSTS_MAX) /* nobody of ours counts so */
        at = end;
    for (; at != end; at = (at + 1) & RING_COUNT_MASK) {
        Post one = *post_at(ring->memory, at);
        if (one.kind == POST_STORE && !keep_taken(office, ring->number, one.key))
            return false;
        PyObject *entry = Py_BuildValue("(IKy#KKKK)", ring->number, (unsigned long long)one.kind,
                                        (const char *)one.key, (Py_ssize_t)KEY_BYTES,
                                        (unsigned long long)one.batch, (unsigned long long)one.length,
                                        (unsigned long long)one.checksum, (unsigned long long)one.count);
        if (!entry || PyList_Append(found, entry)) {
            Py_XDECREF(entry);
            return false;
        }
        Py_DECREF(entry);
    }
    shared_store(ring->memory + RING_TAKEN, end);
    return true;
}

PyDoc_STRVAR(office_take_doc,
             "take()\n--\n\nReturn what is posted: [(number, kind, key, batch, length, checksum, "
             "count)]; None if nothing is. `release` follows once all is in the index.");

static PyObject *office_take(PostOffice *office, PyObject *ignored)
{
    (void)ignored;
    bool any = false;
    for (int i = 0; i < office->num_rings && !any; i++) {
        unsigned char *memory = office->rings[i].memory;
        uint64_t end = shared_load(memory + RING_STATE) & RING_COUNT_MASK;
        any = office->rings[i].left || end != (shared_load(memory + RING_TAKEN) & RING_COUNT_MASK);
    }
    if (!any)
        Py_RETURN_NONE;
    PyObject *found = PyList_New(0);
    for (int i = 0; found && i < office->num_rings; i++)
        if (!take_ring(office, office->rings + i, found))
            Py_CLEAR(found);
    return found;
}

PyDoc_STRVAR(office_release_doc,
             "release()\n--\n\nWhat `take` returned is in the index, or is not to be: its keys are "
             "not their clients' any more.");

static PyObject *office_release(PostOffice *office, PyObject *ignored)
{
    (void)ignored;
    for (Py_ssize_t i = 0; i < office->num_taken; i++)
        clear_claims(office, office->taken[i].key, office->taken[i].number);
    office->num_taken = 0;
    for (int i = office->num_rings - 1; i >= 0; i--)
        if (office->rings[i].left) {
            unmap_ring(office, office->rings + i);
            office->rings[i] = office->rings[--office->num_rings];
        }
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
    if (number <= OWNER_MASTER || number > UINT16_MAX || ring_of(office, (unsigned)number)) {
        PyErr_Format(PyExc_ValueError, "a client of number %ld", number);
        return NULL;
    }
    if (office->num_rings == BOXES_MAX)
        Py_RETURN_FALSE;
    Ring ring = {.number = (unsigned)number};
    size_t nbytes;
    if (map_shared(descriptor, &ring.memory, &nbytes))
        return NULL;
    if (nbytes != RING_BYTES) {
        munmap(ring.memory, nbytes);
        PyErr_SetString(PyExc_ValueError, "memory of another size than that of posts");
        return NULL;
    }
    shared_store(ring.memory + RING_NUMBER, ring.number);
    office->rings[office->num_rings++] = ring;
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(office_drop_doc,
             "drop(number)\n--\n\nA client is gone: it posts nothing more. What it posted comes with "
             "the next `take`, and `release` frees the rest.");

static PyObject *office_drop(PostOffice *office, PyObject *number)
{
    Ring *ring;
    if (find_ring(office, number, &ring))
        return NULL;
    if (ring && !ring->left) {
        raise_generation(ring, RING_CLOSED);
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
    for (int i = 0; i < office->num_rings; i++) {
        unsigned char *memory = office->rings[i].memory;
        uint64_t floor = generation_of(shared_load(memory + RING_STATE)) + 1;
        shared_store(memory + RING_FLOOR, floor);
        raise_generation(office->rings + i, 0);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(office_close_doc,
             "close()\n--\n\nNobody posts anything more. What was posted before counts: `take` it.");

static PyObject *office_close(PostOffice *office, PyObject *ignored)
{
    (void)ignored;
    shared_store(office->keys.memory + KEYS_OPEN, 0);
    for (int i = 0; i < office->num_rings; i++)
        raise_generation(office->rings + i, RING_CLOSED);
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
    if (find_ring(office, args[0], &ring))
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

/* Add the owners of claims on a key to a set, which is made when it is needed. -1: failed. */
static int find_rivals(const uint64_t *bucket, uint64_t print, PyObject **found)
{
    for (int i = 1; i < KEYS_BUCKET_WORDS; i++) {
        uint64_t word = shared_load(bucket + i);
        if (!has_print(word, print) || owner_of(word) == OWNER_MASTER)
            continue;
        PyObject *number = PyLong_FromUnsignedLong(owner_of(word));
        if (number && !*found)
            *found = PySet_New(NULL);
        int failed = !number || !*found || PySet_Add(*found, number);
        Py_XDECREF(number);
        if (failed)
            return -1;
    }
    return 0;
}

static PyObject *office_announce(PostOffice *office, PyObject *of_keys)
{
    PyObject *keys = PySequence_Fast(of_keys, "expected keys"), *found = NULL;
    if (!keys)
        return NULL;
    office->deciding = true;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
    uint64_t print;
    for (Py_ssize_t i = 0; i < count; i++) { /* so that they are all fetched at once */
        const unsigned char *key = post_key(PySequence_Fast_GET_ITEM(keys, i));
        if (key)
            __builtin_prefetch(bucket_of(&office->keys, key, &print), 1);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const unsigned char *key = post_key(PySequence_Fast_GET_ITEM(keys, i));
        if (!key)
            continue;
        uint64_t *bucket = bucket_of(&office->keys, key, &print);
        put_word(office, bucket, print);
        loosen_word(office, key);
        if (find_rivals(bucket, print, &found)) {
            Py_CLEAR(found);
            Py_DECREF(keys);
            return NULL;
        }
    }
    Py_DECREF(keys);
    return found ? found : Py_NewRef(Py_None);
}

PyDoc_STRVAR(office_retract_doc,
             "retract()\n--\n\nThe request was handled. What was announced, or was let go of, and is "
             "in no book now is taken no more.");

static PyObject *office_retract(PostOffice *office, PyObject *ignored)
{
    (void)ignored;
    office->deciding = false;
    uint64_t print;
    for (Py_ssize_t i = 0; i < office->num_loose; i++)
        if (!office->loose[i].needed)
            __builtin_prefetch(bucket_of(&office->keys, office->loose[i].key, &print), 1);
    for (Py_ssize_t i = 0; i < office->num_loose; i++)
        if (!office->loose[i].needed)
            free_word(office, office->loose[i].key);
    office->num_loose = office->next_loose = 0;
    if (office->loose_room > LOOSE_KEPT) {
        PyMem_Free(office->loose);
        office->loose = NULL;
        office->loose_room = 0;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(office_stop_doc,
             "stop(number)\n--\n\nWhatever put of this client is under way is asked for. What it "
             "posted before counts: `take` it, and then `clear` what it claimed.");

static PyObject *office_stop(PostOffice *office, PyObject *number)
{
    Ring *ring;
    if (find_ring(office, number, &ring))
        return NULL;
    if (ring)
        raise_generation(ring, 0);
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
            const unsigned char *key = post_key(PySequence_Fast_GET_ITEM(keys, k));
            if (key)
                clear_claims(office, key, (unsigned)number);
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
    unsigned char *memory = office->keys.memory;
    shared_store(memory + KEYS_LEADS_UNTIL, (uint64_t)leads);
    shared_store(memory + KEYS_OPEN, (uint64_t)open);
    for (int i = 0; !open && i < office->num_rings; i++)
        raise_generation(office->rings + i, 0);
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
    shared_store(office->keys.memory + KEYS_LOOKS_AT, (uint64_t)when);
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
    if (office && map_taken_keys(keys, &office->keys))
        Py_CLEAR(office);
    if (office)
        memcpy(office->keys.memory + KEYS_CLOCK, clock, (size_t)clock_bytes);
    return (PyObject *)office;
}

static void office_free(PostOffice *office)
{
    for (int i = 0; i < office->num_rings; i++)
        unmap_ring(office, office->rings + i);
    PyMem_Free(office->taken);
    PyMem_Free(office->loose);
    unmap_taken_keys(&office->keys);
    Py_TYPE(office)->tp_free((PyObject *)office);
}

static PyObject *office_used(PostOffice *office, void *closure)
{
    (void)closure;
    return PyLong_FromSsize_t(office->used);
}

static PyObject *office_room(PostOffice *office, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(office->keys.num_buckets * (KEYS_BUCKET_WORDS - 1));
}

static PyObject *office_num_clients(PostOffice *office, void *closure)
{
    (void)closure;
    return PyLong_FromLong(office->num_rings);
}

#define OFFICE_METHOD(name, flags)                                                                 \
    {#name, (PyCFunction)(void (*)(void))office_##name, flags, office_##name##_doc}

static PyMethodDef office_methods[] = {
    OFFICE_METHOD(add, METH_FASTCALL),    OFFICE_METHOD(drop, METH_O),
    OFFICE_METHOD(take, METH_NOARGS),     OFFICE_METHOD(release, METH_NOARGS),
    OFFICE_METHOD(revoke, METH_NOARGS),   OFFICE_METHOD(close, METH_NOARGS),
    OFFICE_METHOD(grant, METH_FASTCALL),
    OFFICE_METHOD(announce, METH_O),      OFFICE_METHOD(retract, METH_NOARGS),
    OFFICE_METHOD(stop, METH_O),          OFFICE_METHOD(clear, METH_FASTCALL),
    OFFICE_METHOD(say, METH_FASTCALL),    OFFICE_METHOD(look_at, METH_O),
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
