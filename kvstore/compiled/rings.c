/* The rings of the clients that post to a master: who they are, and what they have posted. Part of
 * `kvstore/rows.c`; how a ring looks is in `post_ring.c`. */

#define RINGS_MAX 64 /* all of them are looked at with each request: further clients ask */

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
    Ring each[RINGS_MAX];
    int count;
    TakenPost *taken; /* posts whose keys are still their clients' */
    Py_ssize_t num_taken, taken_room;
} Rings;

static Ring *ring_of(Rings *rings, unsigned number)
{
    for (int i = 0; i < rings->count; i++)
        if (rings->each[i].number == number)
            return rings->each + i;
    return NULL;
}

/* The ring of a client, by its number as Python has it; null if there is none. -1 with an exception. */
static int find_ring(Rings *rings, PyObject *number, Ring **ring)
{
    unsigned long wanted = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return -1;
    *ring = wanted > UINT16_MAX ? NULL : ring_of(rings, (unsigned)wanted);
    return 0;
}

/* Map the ring of a further client, for whom there is room. -1 with an exception. */
static int add_ring(Rings *rings, int descriptor, unsigned number)
{
    Ring ring = {.number = number};
    size_t nbytes;
    if (map_shared(descriptor, &ring.memory, &nbytes))
        return -1;
    if (nbytes != RING_BYTES) {
        munmap(ring.memory, nbytes);
        PyErr_SetString(PyExc_ValueError, "memory of another size than that of posts");
        return -1;
    }
    shared_store(ring.memory + RING_NUMBER, ring.number);
    rings->each[rings->count++] = ring;
    return 0;
}

/* Raise the generation: what is under way is asked for. `more`: bits to set with it. */
static void raise_generation(unsigned char *ring, uint64_t more)
{
    uint64_t state, fresh;
    do {
        state = shared_load(ring + RING_STATE);
        fresh = (state + RING_COUNT_MASK + 1) | more;
    } while (!shared_swap(ring + RING_STATE, state, fresh));
}

/* Those of all. */
static void raise_generations(const Rings *rings, uint64_t more)
{
    for (int i = 0; i < rings->count; i++)
        raise_generation(rings->each[i].memory, more);
}

static void unmap_ring(const TakenKeys *keys, const Ring *ring)
{
    clear_last_claim(keys, ring->memory, ring->number);
    munmap(ring->memory, RING_BYTES);
}

static void drop_rings(const TakenKeys *keys, Rings *rings)
{
    for (int i = 0; i < rings->count; i++)
        unmap_ring(keys, rings->each + i);
    PyMem_Free(rings->taken);
}

/* ---- taking posts */

static bool keep_taken(Rings *rings, unsigned number, const unsigned char *key)
{
    if (rings->num_taken == rings->taken_room) {
        Py_ssize_t room = 2 * rings->taken_room + POSTS_MAX;
        TakenPost *more = PyMem_Realloc(rings->taken, (size_t)room * sizeof *more);
        if (!more) {
            PyErr_NoMemory();
            return false;
        }
        rings->taken = more;
        rings->taken_room = room;
    }
    TakenPost *one = rings->taken + rings->num_taken++;
    one->number = number;
    memcpy(one->key, key, KEY_BYTES);
    return true;
}

/* Append what one client has posted. The memory is its own: each post is copied before it is used. */
static bool take_ring(Rings *rings, const Ring *ring, PyObject *found)
{
    uint64_t end = shared_load(ring->memory + RING_STATE) & RING_COUNT_MASK;
    uint64_t at = shared_load(ring->memory + RING_TAKEN) & RING_COUNT_MASK;
    if (((end - at) & RING_COUNT_MASK) > POSTS_MAX) /* nobody of ours counts so */
        at = end;
    for (; at != end; at = (at + 1) & RING_COUNT_MASK) {
        Post one = *post_at(ring->memory, at);
        if (one.kind == POST_STORE && !keep_taken(rings, ring->number, one.key))
            return false;
        const unsigned char *what = one.key;
        Py_ssize_t nbytes = KEY_BYTES;
        if (one.kind == POST_FINISH && one.count <= SUMS_MAX) {
            what = ring->memory + RING_SUMS;
            nbytes = (Py_ssize_t)one.count * 8;
        }
        PyObject *entry = Py_BuildValue("(IKy#KKKK)", ring->number, (unsigned long long)one.kind,
                                        (const char *)what, nbytes,
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

/* Whether there is something to take, or somebody to let go of. */
static bool is_any_posted(const Rings *rings)
{
    for (int i = 0; i < rings->count; i++) {
        const unsigned char *memory = rings->each[i].memory;
        if (rings->each[i].left || posts_waiting(memory, shared_load(memory + RING_STATE)))
            return true;
    }
    return false;
}

/* What was taken is in the index, or is not to be: see `office_release_doc`. */
static void release_taken(const TakenKeys *keys, Rings *rings)
{
    for (Py_ssize_t i = 0; i < rings->num_taken; i++)
        clear_claims(keys, rings->taken[i].key, rings->taken[i].number);
    rings->num_taken = 0;
    for (int i = rings->count - 1; i >= 0; i--)
        if (rings->each[i].left) {
            unmap_ring(keys, rings->each + i);
            rings->each[i] = rings->each[--rings->count];
        }
}
