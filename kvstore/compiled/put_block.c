/* One plain put, up to its request: the copy with its checksum, the note to the node, and the post to
 * the master or the bytes of the request that it is asked with, all without Python in between.
 *
 * The request is the MessagePack of a `Store` (`kvstore/wire/requests.py`): its head up to the client
 * and its tail from `more` on are the same for many puts, and come as they are. */

#define STORE_NUMBERS_BYTES 128 /* names and values of the fields in between, at most */

static unsigned char *pack_bytes(unsigned char *at, const void *from, size_t nbytes)
{
    memcpy(at, from, nbytes);
    return at + nbytes;
}

/* An integer, in as few bytes as it takes. */
static unsigned char *pack_integer(unsigned char *at, uint64_t value)
{
    int width = value < 128 ? 0 : value < 1 << 8 ? 1 : value < 1 << 16 ? 2 : value >> 32 ? 8 : 4;
    if (width)
        *at++ = (unsigned char)(width == 1 ? 0xCC : width == 2 ? 0xCD : width == 4 ? 0xCE : 0xCF);
    else
        width = 1;
    for (int shift = 8 * (width - 1); shift >= 0; shift -= 8)
        *at++ = (unsigned char)(value >> shift);
    return at;
}

static unsigned char *pack_name(unsigned char *at, const char *name)
{
    size_t nbytes = strlen(name);
    *at++ = (unsigned char)(0xA0 + nbytes);
    return pack_bytes(at, name, nbytes);
}

typedef struct {
    uint64_t batch, following, length, checksum;
    const unsigned char *key; /* [KEY_BYTES] */
} StoreNumbers;

static unsigned char *pack_store(unsigned char *at, const StoreNumbers *store)
{
    static const unsigned char key_head[] = {0xC4, KEY_BYTES};
    at = pack_integer(pack_name(at, "batch"), store->batch);
    at = pack_bytes(pack_name(at, "key"), key_head, sizeof key_head);
    at = pack_bytes(at, store->key, KEY_BYTES);
    at = pack_integer(pack_name(at, "length"), store->length);
    at = pack_integer(pack_name(at, "checksum"), store->checksum);
    return pack_integer(pack_name(at, "following"), store->following);
}

static PyObject *store_request(PyObject *head, PyObject *tail, const StoreNumbers *store)
{
    unsigned char numbers[STORE_NUMBERS_BYTES];
    size_t nbytes = (size_t)(pack_store(numbers, store) - numbers);
    size_t before = (size_t)PyBytes_GET_SIZE(head), after = (size_t)PyBytes_GET_SIZE(tail);
    PyObject *request = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(before + nbytes + after));
    if (request) {
        unsigned char *at = (unsigned char *)PyBytes_AS_STRING(request);
        at = pack_bytes(at, PyBytes_AS_STRING(head), before);
        at = pack_bytes(at, numbers, nbytes);
        pack_bytes(at, PyBytes_AS_STRING(tail), after);
    }
    return request;
}

/* The note of one block without labels: see `kvstore/wire/left_notes.py`. */
static bool leave_row(const Mailbox *box, uint32_t segment, uint64_t offset, const StoreNumbers *store)
{
    unsigned char note[48] = {1};
    memcpy(note + 1, &segment, 4);
    memcpy(note + 5, store->key, KEY_BYTES);
    memcpy(note + 21, &offset, 8);
    memcpy(note + 29, &store->length, 8);
    memcpy(note + 37, &store->checksum, 8); /* 45: not pinned; 46: a tenant of no bytes */
    return leave_note(box, note, sizeof note);
}

PyDoc_STRVAR(put_block_doc,
             "put_block(target, target_offset, source, source_offset, nbytes, stream_bytes, box, "
             "box_bytes, segment, key, batch, following, head, tail, posts, generation)\n--\n\nCopy "
             "one piece as `copy_one_summed`, leave a note of it in a mailbox, and post it: None if "
             "it is a block now. Else return the request that makes it one; its checksum if no "
             "note could be left; False, and nothing was done, if its key is taken. `posts`: a "
             "`PostBox`, whose `let_go` follows but after None and False; or None.");

/* Claim the put's key, if there is a box. */
static Claim take_claim(PyObject *posts, PyObject *generation, const unsigned char *key)
{
    if (posts == Py_None)
        return KEY_UNKNOWN;
    uint64_t of_place = PyLong_AsUnsignedLongLong(generation);
    return PyErr_Occurred() ? KEY_UNKNOWN : claim_key((PostBox *)posts, key, of_place);
}

static PyObject *put_block(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 16 || !PyBytes_Check(args[9]) || PyBytes_GET_SIZE(args[9]) != KEY_BYTES ||
        !PyBytes_Check(args[12]) || !PyBytes_Check(args[13]) ||
        (args[14] != Py_None && !Py_IS_TYPE(args[14], &post_box_type))) {
        PyErr_SetString(PyExc_TypeError, "put_block takes 16 arguments, among them a key of 16 bytes");
        return NULL;
    }
    Mailbox box;
    if (take_mailbox(args[6], args[7], &box))
        return NULL;
    unsigned long segment = PyLong_AsUnsignedLong(args[8]);
    StoreNumbers store = {.batch = PyLong_AsUnsignedLongLong(args[10]),
                          .following = PyLong_AsUnsignedLongLong(args[11]),
                          .key = (const unsigned char *)PyBytes_AS_STRING(args[9])};
    if (PyErr_Occurred() || segment > UINT32_MAX) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no number of a segment");
        return NULL;
    }
    Claim claim = take_claim(args[14], args[15], store.key);
    if (claim == KEY_TAKEN)
        Py_RETURN_FALSE;
    bool has_claim = claim == KEY_CLAIMED || claim == KEY_HELD;
    if (has_claim)
        ((PostBox *)args[14])->writing = true;
    PyObject *checksum = PyErr_Occurred() ? NULL : copy_one_summed(module, args, 6);
    if (has_claim)
        ((PostBox *)args[14])->writing = false;
    if (checksum) {
        store.length = PyLong_AsUnsignedLongLong(args[4]);
        store.checksum = PyLong_AsUnsignedLongLong(checksum);
    }
    if (!checksum || !leave_row(&box, (uint32_t)segment, PyLong_AsUnsignedLongLong(args[1]), &store))
        return checksum;
    Py_DECREF(checksum);
    Post fresh = {.batch = store.batch, .length = store.length, .checksum = store.checksum};
    if (claim == KEY_CLAIMED && post_store((PostBox *)args[14], store.key, &fresh))
        Py_RETURN_NONE;
    return store_request(args[12], args[13], &store);
}
