/* A client's end of posted puts: see `post_ring.c` and `taken_keys.c`. */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

/* A generation, as Python has it: a box's number | its ring's generation. */
#define SERIAL_SHIFT 40
#define SERIALS 0x7FFFFE /* of boxes, from 1 on: a place of an earlier one is not posted to a later one */
#define NEVER 0 /* no generation: what is of it is not posted */
#define POST_WAKE 32 /* posts that the master has not taken: it is woken for each so many */
#define CLAIM_TRIES 4

typedef struct {
    PyObject_HEAD
    TakenKeys keys;
    unsigned char *ring;
    size_t ring_bytes;
    int wake, master; /* descriptors: an eventfd, and one of the master's process */
    bool busy;        /* a put has its claim: there is one at a time */
    bool writing;     /* its call is under way, in which other threads may run */
    bool gone;        /* the master was seen to have ended */
    uint8_t turn;
    bool has_sums;                  /* a batch was ended by the post that is the first after ... */
    uint64_t sums_at;               /* ... so many */
    uint64_t serial;                /* of the boxes of this client */
    uint64_t state, word, *slot; /* of the put under way */
} PostBox;

static bool may_post(const PostBox *box)
{
    return shared_load(box->keys.memory + KEYS_OPEN) &&
           clock_ns() < (int64_t)shared_load(box->keys.memory + KEYS_LEADS_UNTIL);
}

static bool is_full(const PostBox *box, uint64_t state)
{
    return posts_waiting(box->ring, state) >= POSTS_MAX;
}

typedef enum {
    KEY_TAKEN,   /* by a block or another put */
    KEY_UNKNOWN, /* nothing is known of it here, and nobody posts it who knows no more */
    KEY_HELD,    /* for a put that is asked for */
    KEY_CLAIMED, /* for a put that may be posted */
} Claim;

/* Look through a bucket for this print beside `own`, and for an empty word. */
static Claim look_up_key(uint64_t *bucket, uint64_t print, const uint64_t *own, uint64_t **empty)
{
    Claim found = shared_load(bucket) ? KEY_UNKNOWN : KEY_HELD; /* keys without a word are there */
    for (int i = 1; i < KEYS_BUCKET_WORDS; i++) {
        uint64_t word = shared_load(bucket + i);
        if (bucket + i != own && word && has_print(word, print))
            return KEY_TAKEN;
        if (!word && empty)
            *empty = bucket + i;
    }
    return found;
}

static void withdraw_claim(PostBox *box)
{
    (void)shared_swap(box->slot, box->word, 0); /* unless the master has taken it back */
    shared_store(box->ring + RING_CLAIM_WORD, 0);
    box->busy = false;
}

/* Whether what is written into a place of this generation may be posted now. */
static bool is_postable(const PostBox *box, uint64_t generation)
{
    uint64_t of_place = generation & (((uint64_t)1 << SERIAL_SHIFT) - 1);
    return generation >> SERIAL_SHIFT == box->serial &&
           of_place >= shared_load(box->ring + RING_FLOOR) && !is_full(box, box->state);
}

/* Take a key that nobody has, for one put into a place of this generation, until it is posted or
 * `withdraw_claim`. Who is asked for holds it, too: what it notes is not to be found beside what
 * another has posted, should the master end before it answers. */
static Claim claim_key(PostBox *box, const unsigned char *key, uint64_t generation)
{
    uint64_t print, *bucket = bucket_of(&box->keys, key, &print), *empty = NULL;
    if (box->busy)
        return has_print(box->word, print) ? KEY_TAKEN : KEY_UNKNOWN;
    box->state = shared_load(box->ring + RING_STATE);
    if (box->gone || box->state & RING_CLOSED || !may_post(box))
        return KEY_UNKNOWN; /* nobody posts anything there */
    Claim wanted = is_postable(box, generation) ? KEY_CLAIMED : KEY_HELD;
    box->word = print | shared_load(box->ring + RING_NUMBER) << 8 | ++box->turn;
    for (int i = 0; i < CLAIM_TRIES; i++) {
        Claim found = look_up_key(bucket, print, NULL, &empty);
        if (found != KEY_HELD || !empty)
            return found == KEY_TAKEN ? KEY_TAKEN : KEY_UNKNOWN;
        /* Where it is, for the master to clear should we end here. */
        shared_store(box->ring + RING_CLAIM_AT, (uint64_t)((unsigned char *)empty - box->keys.memory));
        shared_store(box->ring + RING_CLAIM_WORD, box->word);
        if (!shared_swap(empty, 0, box->word)) {
            shared_store(box->ring + RING_CLAIM_WORD, 0);
            empty = NULL;
            continue;
        }
        box->slot = empty;
        box->busy = true;
        found = look_up_key(bucket, print, empty, NULL);
        if (found == KEY_HELD && may_post(box))
            return wanted;
        withdraw_claim(box);
        return found == KEY_TAKEN ? KEY_TAKEN : KEY_UNKNOWN;
    }
    return KEY_UNKNOWN;
}

static void wake_master(const PostBox *box)
{
    uint64_t one = 1;
    ssize_t written;
    do
        written = write(box->wake, &one, sizeof one);
    while (written < 0 && errno == EINTR); /* any other failure: it is awake, or gone */
}

/* Count one more in the state, if it is still that of when the put began. */
static bool post(PostBox *box, const Post *fresh)
{
    uint64_t count = (box->state + 1) & RING_COUNT_MASK;
    memcpy(post_at(box->ring, box->state & RING_COUNT_MASK), fresh, sizeof *fresh);
    if (!shared_swap(box->ring + RING_STATE, box->state, (box->state & ~RING_COUNT_MASK) | count))
        return false;
    uint64_t waiting = posts_waiting(box->ring, count);
    if ((waiting && waiting % POST_WAKE == 0) || fresh->kind != POST_STORE ||
        clock_ns() > (int64_t)shared_load(box->keys.memory + KEYS_LOOKS_AT))
        wake_master(box);
    return true;
}

/* Whether the master that was posted to is there to take it: it led at a time after the post. */
static bool master_is_there(PostBox *box)
{
    struct pollfd process = {.fd = box->master, .events = POLLIN};
    if (clock_ns() >= (int64_t)shared_load(box->keys.memory + KEYS_LEADS_UNTIL))
        return false;
    if (poll(&process, 1, 0) != 0)
        box->gone = true;
    return !box->gone;
}

/* Post what was claimed, written and noted; false: ask the master, as if nothing had been posted. The
 * key is held on then, if it is ours still. */
static bool post_store(PostBox *box, const unsigned char *key, const Post *fresh)
{
    Post whole = *fresh;
    whole.kind = POST_STORE;
    memcpy(whole.key, key, KEY_BYTES);
    if (!post(box, &whole))
        return false;
    shared_store(box->ring + RING_CLAIM_WORD, 0); /* the master clears the word, with the post */
    box->busy = false;
    return master_is_there(box);
}

/* ---- its type */

PyDoc_STRVAR(post_box_generation_doc,
             "generation()\n--\n\nReturn what places that are asked for from now on are of; 0 if "
             "nothing can be posted here any more.");

static PyObject *post_box_generation(PostBox *box, PyObject *ignored)
{
    (void)ignored;
    uint64_t state = shared_load(box->ring + RING_STATE);
    uint64_t leads_until = shared_load(box->keys.memory + KEYS_LEADS_UNTIL); /* 0: not said yet */
    bool is_over = leads_until && clock_ns() >= (int64_t)leads_until; /* stopped, it closes nothing */
    if (box->gone || is_over || state & RING_CLOSED)
        return PyLong_FromLong(NEVER);
    return PyLong_FromUnsignedLongLong(box->serial << SERIAL_SHIFT | generation_of(state));
}

/* Null with an exception if it is none. */
static const unsigned char *take_key(PyObject *of_key)
{
    const unsigned char *key = key_of(of_key);
    if (!key)
        PyErr_SetString(PyExc_TypeError, "a key is 16 bytes");
    return key;
}

PyDoc_STRVAR(post_box_hold_doc,
             "hold(key)\n--\n\nKeep others from posting a put of this key, if that is possible, until "
             "`let_go`; false: it is taken, by a block or another put.");

static PyObject *post_box_hold(PostBox *box, PyObject *of_key)
{
    const unsigned char *key = take_key(of_key);
    return key ? PyBool_FromLong(claim_key(box, key, NEVER) != KEY_TAKEN) : NULL;
}

PyDoc_STRVAR(post_box_let_go_doc,
             "let_go(key)\n--\n\nA put of this key has ended. To be called by whom `hold` did not "
             "say false, or whose `put_block` did not post and did not return False.");

static PyObject *post_box_let_go(PostBox *box, PyObject *of_key)
{
    const unsigned char *key = take_key(of_key);
    if (!key)
        return NULL;
    uint64_t print;
    (void)bucket_of(&box->keys, key, &print);
    /* Who held nothing, as another's put had the claim, does not end the claim of a third's. */
    if (box->busy && !box->writing && has_print(box->word, print))
        withdraw_claim(box);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(post_box_order_doc,
             "order(first, count, length)\n--\n\nPost a wish for places, by their numbers, for "
             "values of so many bytes; false if it is to be asked for.");

static PyObject *post_box_order(PostBox *box, PyObject *const *args, Py_ssize_t count)
{
    if (expect(count, 3, "order"))
        return NULL;
    Post fresh = {.kind = POST_ORDER, .batch = PyLong_AsUnsignedLongLong(args[0]),
                  .count = PyLong_AsUnsignedLongLong(args[1]),
                  .length = PyLong_AsUnsignedLongLong(args[2])};
    if (PyErr_Occurred())
        return NULL;
    if (box->busy || box->gone)
        Py_RETURN_FALSE;
    box->state = shared_load(box->ring + RING_STATE);
    bool possible = !(box->state & RING_CLOSED) && may_post(box) && !is_full(box, box->state);
    return PyBool_FromLong(possible && post(box, &fresh) && master_is_there(box));
}

/* Whether the master has not taken the last batch that was ended: its checksums still lie there. */
static bool is_finishing(const PostBox *box)
{
    uint64_t since = (box->state - box->sums_at) & RING_COUNT_MASK;
    return box->has_sums && since && since <= posts_waiting(box->ring, box->state);
}

PyDoc_STRVAR(post_box_finish_doc,
             "finish(batch, checksums, generation)\n--\n\nPost that all blocks of a batch are written "
             "and noted, with the 8 bytes of the checksum of each; false if that is to be asked for. "
             "`generation`: from before the places of the batch were asked for.");

static PyObject *post_box_finish(PostBox *box, PyObject *const *args, Py_ssize_t count)
{
    if (expect(count, 3, "finish"))
        return NULL;
    if (!PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "checksums are bytes");
        return NULL;
    }
    size_t nbytes = (size_t)PyBytes_GET_SIZE(args[1]);
    Post fresh = {.kind = POST_FINISH, .batch = PyLong_AsUnsignedLongLong(args[0]), .count = nbytes / 8};
    uint64_t generation = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (box->busy || box->gone || !fresh.count || fresh.count > SUMS_MAX || nbytes % 8)
        Py_RETURN_FALSE;
    box->state = shared_load(box->ring + RING_STATE);
    if (box->state & RING_CLOSED || !may_post(box) || !is_postable(box, generation) ||
        is_finishing(box))
        Py_RETURN_FALSE;
    memcpy(box->ring + RING_SUMS, PyBytes_AS_STRING(args[1]), nbytes);
    if (!post(box, &fresh))
        Py_RETURN_FALSE;
    box->has_sums = true;
    box->sums_at = box->state & RING_COUNT_MASK;
    return PyBool_FromLong(master_is_there(box));
}

PyDoc_STRVAR(post_box_granted_doc,
             "granted(first, length)\n--\n\nReturn what the master has said of the places that were "
             "ordered, from this number on, for values of so many bytes; None: nothing yet, or "
             "something else since.");

static PyObject *post_box_granted(PostBox *box, PyObject *const *args, Py_ssize_t count)
{
    if (expect(count, 2, "granted"))
        return NULL;
    uint64_t first = PyLong_AsUnsignedLongLong(args[0]), length = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    const unsigned char *grant = grant_of(box->ring, length);
    uint64_t turn = shared_load(grant), nbytes = shared_load(grant + 16);
    if (turn & 1 || !turn || shared_load(grant + 8) != first || nbytes > GRANT_BYTES_MAX)
        Py_RETURN_NONE;
    PyObject *payload =
        PyBytes_FromStringAndSize((const char *)grant + GRANT_HEAD_BYTES, (Py_ssize_t)nbytes);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (payload && shared_load(grant) != turn) /* it was written anew meanwhile */
        Py_SETREF(payload, Py_NewRef(Py_None));
    return payload;
}

PyDoc_STRVAR(post_box_waiting_doc, "waiting()\n--\n\nReturn how many posts the master has not taken.");

static PyObject *post_box_waiting(PostBox *box, PyObject *ignored)
{
    (void)ignored;
    uint64_t state = shared_load(box->ring + RING_STATE);
    return PyLong_FromUnsignedLongLong(posts_waiting(box->ring, state));
}

static PyObject *post_box_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    static char *keywords[] = {"keys", "ring", "wake", "master", "clock", "serial", NULL};
    int keys, ring, wake, master;
    unsigned int serial;
    const char *clock;
    Py_ssize_t clock_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, names, "iiiiy#I", keywords, &keys, &ring, &wake, &master,
                                     &clock, &clock_bytes, &serial))
        return NULL;
    PostBox *box = (PostBox *)type->tp_alloc(type, 0); /* zeroed */
    if (!box)
        return NULL;
    box->wake = box->master = -1;
    box->serial = 1 + serial % SERIALS;
    if (map_taken_keys(keys, &box->keys) || map_shared(ring, &box->ring, &box->ring_bytes)) {
        Py_DECREF(box);
        return NULL;
    }
    char name[CLOCK_BYTES + 1] = {0};
    memcpy(name, clock, clock_bytes < CLOCK_BYTES ? (size_t)clock_bytes : CLOCK_BYTES);
    bool same_clock = !memcmp(box->keys.memory + KEYS_CLOCK, name, CLOCK_BYTES);
    if (box->ring_bytes != RING_BYTES || !same_clock) {
        PyErr_SetString(PyExc_ValueError, same_clock ? "memory of another size than that of posts"
                                                     : "a master with another clock");
        Py_DECREF(box);
        return NULL;
    }
    box->wake = fcntl(wake, F_DUPFD_CLOEXEC, 0);
    box->master = fcntl(master, F_DUPFD_CLOEXEC, 0);
    if (box->wake < 0 || box->master < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(box);
        return NULL;
    }
    return (PyObject *)box;
}

static void post_box_free(PostBox *box)
{
    unmap_taken_keys(&box->keys);
    if (box->ring)
        munmap(box->ring, box->ring_bytes);
    if (box->wake >= 0)
        close(box->wake);
    if (box->master >= 0)
        close(box->master);
    Py_TYPE(box)->tp_free((PyObject *)box);
}

static PyMethodDef post_box_methods[] = {
    METHOD_OF(post_box, generation, METH_NOARGS),
    METHOD_OF(post_box, hold, METH_O),
    METHOD_OF(post_box, let_go, METH_O),
    METHOD_OF(post_box, order, METH_FASTCALL),
    METHOD_OF(post_box, finish, METH_FASTCALL),
    METHOD_OF(post_box, granted, METH_FASTCALL),
    METHOD_OF(post_box, waiting, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyTypeObject post_box_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvstore._native.PostBox",
    .tp_doc = "PostBox(keys, ring, wake, master, clock, serial)\n--\n\nA client's end of posted puts, from the "
              "descriptors that its master lent, which stay the caller's. Used with the GIL only.",
    .tp_basicsize = sizeof(PostBox),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = post_box_new,
    .tp_dealloc = (destructor)post_box_free,
    .tp_methods = post_box_methods,
};
