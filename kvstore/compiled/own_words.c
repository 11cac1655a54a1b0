/* The master's own words in the memory of taken keys: for each key of its books, and for those that
 * it has been asked about. Part of `kvstore/rows.c`.
 *
 * What leaves the books while a request is handled has its word until the end of it (it is loose):
 * what ends as a put may be a block in the next moment, and in between nobody is to take it for
 * free. */

#define LOOSE_MIN 64
#define LOOSE_KEPT 4096
#define LOOSE_LOOKS 8

typedef struct {
    unsigned char key[KEY_BYTES];
    bool needed; /* again */
} LooseWord;

typedef struct {
    TakenKeys keys;
    Py_ssize_t used;  /* keys that have a word of the master's, or are counted */
    bool deciding;    /* a request is being handled */
    LooseWord *loose; /* words that are freed after it */
    Py_ssize_t num_loose, loose_room, next_loose;
} OwnWords;

/* Put a word; where there is no room it is counted, and nobody claims in its bucket. */
static void put_word(OwnWords *own, uint64_t *bucket, uint64_t print)
{
    own->used++;
    for (int i = 1; i < KEYS_BUCKET_WORDS; i++)
        if (!shared_load(bucket + i) && shared_swap(bucket + i, 0, print))
            return;
    __atomic_fetch_add(bucket, 1, __ATOMIC_SEQ_CST);
}

static void free_word(OwnWords *own, const unsigned char *key)
{
    uint64_t print, *bucket = bucket_of(&own->keys, key, &print);
    own->used--;
    for (int i = 1; i < KEYS_BUCKET_WORDS; i++)
        if (shared_load(bucket + i) == print) {
            __atomic_store_n(bucket + i, 0, __ATOMIC_RELEASE);
            return;
        }
    if (shared_load(bucket)) /* else somebody has spoilt it: as good as gone */
        __atomic_fetch_sub(bucket, 1, __ATOMIC_SEQ_CST);
}

/* Whether a word that is to be freed is of this key: it is not, then. They come in one order mostly. */
static bool take_loose(OwnWords *own, const unsigned char *key)
{
    Py_ssize_t end = own->next_loose + LOOSE_LOOKS;
    for (Py_ssize_t i = own->next_loose; i < end && i < own->num_loose; i++)
        if (!own->loose[i].needed && !memcmp(own->loose[i].key, key, KEY_BYTES)) {
            own->loose[i].needed = true;
            own->next_loose = i + 1;
            return true;
        }
    return false;
}

static void loosen_word(OwnWords *own, const unsigned char *key)
{
    if (own->num_loose == own->loose_room) {
        Py_ssize_t room = 2 * own->loose_room + LOOSE_MIN;
        LooseWord *more = PyMem_Realloc(own->loose, (size_t)room * sizeof *more);
        if (!more)
            return; /* it stays taken: the master is asked */
        own->loose = more;
        own->loose_room = room;
    }
    LooseWord *one = own->loose + own->num_loose++;
    memcpy(one->key, key, KEY_BYTES);
    one->needed = false;
}

/* A key is in one of the master's books. */
static void enter_word(OwnWords *own, PyObject *of_key)
{
    const unsigned char *key = key_of(of_key);
    if (!key || (own->deciding && take_loose(own, key)))
        return; /* keys of other than 16 bytes are claimed by no client */
    uint64_t print, *bucket = bucket_of(&own->keys, key, &print);
    put_word(own, bucket, print);
}

/* It is there no more. */
static void leave_word(OwnWords *own, PyObject *of_key)
{
    const unsigned char *key = key_of(of_key);
    if (key && own->deciding)
        loosen_word(own, key);
    else if (key)
        free_word(own, key);
}

/* A request about these keys is handled from now on, until `free_loose`. Adds the clients that have
 * claimed one of them to a set, which is made when it is needed. -1 with an exception. */
static int announce_words(OwnWords *own, PyObject *keys, PyObject **rivals)
{
    own->deciding = true;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
    uint64_t print;
    for (Py_ssize_t i = 0; i < count; i++) { /* so that they are all fetched at once */
        const unsigned char *key = key_of(PySequence_Fast_GET_ITEM(keys, i));
        if (key)
            __builtin_prefetch(bucket_of(&own->keys, key, &print), 1);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const unsigned char *key = key_of(PySequence_Fast_GET_ITEM(keys, i));
        if (!key)
            continue;
        uint64_t *bucket = bucket_of(&own->keys, key, &print);
        put_word(own, bucket, print);
        loosen_word(own, key);
        if (find_rivals(bucket, print, rivals))
            return -1;
    }
    return 0;
}

/* The request was handled. */
static void free_loose(OwnWords *own)
{
    own->deciding = false;
    uint64_t print;
    for (Py_ssize_t i = 0; i < own->num_loose; i++)
        if (!own->loose[i].needed)
            __builtin_prefetch(bucket_of(&own->keys, own->loose[i].key, &print), 1);
    for (Py_ssize_t i = 0; i < own->num_loose; i++)
        if (!own->loose[i].needed)
            free_word(own, own->loose[i].key);
    own->num_loose = own->next_loose = 0;
    if (own->loose_room > LOOSE_KEPT) {
        PyMem_Free(own->loose);
        own->loose = NULL;
        own->loose_room = 0;
    }
}

static void drop_words(OwnWords *own)
{
    PyMem_Free(own->loose);
    unmap_taken_keys(&own->keys);
}
