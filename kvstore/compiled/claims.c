/* Clients' words in the memory of taken keys, as the master finds and clears them. Part of
 * `kvstore/rows.c`; how they are made is in `post_box.c`. */

static unsigned owner_of(uint64_t word)
{
    return (unsigned)(word >> 8 & 0xFFFF);
}

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

/* Clear the words that one client has for a key. */
static void clear_claims(const TakenKeys *keys, const unsigned char *key, unsigned number)
{
    uint64_t print, *bucket = bucket_of(keys, key, &print);
    for (int i = 1; i < KEYS_BUCKET_WORDS; i++) {
        uint64_t word = shared_load(bucket + i);
        if (has_print(word, print) && owner_of(word) == number)
            (void)shared_swap(bucket + i, word, 0);
    }
}

/* Clear the word of a put that was under way when its client ended. What stands there is its own. */
static void clear_last_claim(const TakenKeys *keys, const unsigned char *ring, unsigned number)
{
    uint64_t at = shared_load(ring + RING_CLAIM_AT), word = shared_load(ring + RING_CLAIM_WORD);
    if (word && owner_of(word) == number && at % 8 == 0 && at >= KEYS_HEAD_BYTES &&
        at <= keys->nbytes - 8)
        (void)shared_swap(keys->memory + at, word, 0);
}
