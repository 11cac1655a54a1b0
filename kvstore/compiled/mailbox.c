/* Notes that one process leaves in memory of another, which takes them when it has reason to.
 *
 *   words     0 head | 64 tail | 128 closed | 192 data, a ring
 *   note      length (u32) | 0 (u32) | stamp (u64) | payload, up to a multiple of 8 bytes
 *
 * One process leaves, one takes; each keeps its own place and only tells the other of it. Head is
 * told after the note is there: who is killed in between has left nothing. Stamps are those of
 * CLOCK_MONOTONIC, from before head is told: a note that was left because of what happened after
 * another one was there has a later stamp, and so have notes in different mailboxes. */

#define MAILBOX_HEAD 0
#define MAILBOX_TAIL 64
#define MAILBOX_CLOSED 128
#define MAILBOX_DATA 192
#define NOTE_HEADER 16
#define NOTE_PADDED(length) ((((uint64_t)(length)) + 7) & ~(uint64_t)7)

typedef struct {
    unsigned char *words;
    uint64_t capacity; /* of the ring; a multiple of 8 */
} Mailbox;

static int take_mailbox(PyObject *address, PyObject *nbytes, Mailbox *box)
{
    uintptr_t start;
    unsigned long long size = PyLong_AsUnsignedLongLong(nbytes);
    if (PyErr_Occurred() || take_address(address, &start))
        return -1;
    if (start % 64 || size % 8 || size < MAILBOX_DATA + 8 * NOTE_HEADER) {
        PyErr_SetString(PyExc_ValueError, "no place for a mailbox");
        return -1;
    }
    box->words = (unsigned char *)start;
    box->capacity = size - MAILBOX_DATA;
    return 0;
}

static uint64_t *mailbox_word(const Mailbox *box, size_t at)
{
    return (uint64_t *)(box->words + at);
}

/* Copy between the ring and memory, over the ring's end where need be. */
static void ring_write(const Mailbox *box, uint64_t at, const void *from, uint64_t nbytes)
{
    unsigned char *data = box->words + MAILBOX_DATA;
    uint64_t start = at % box->capacity, first = box->capacity - start;
    first = first < nbytes ? first : nbytes;
    memcpy(data + start, from, first);
    memcpy(data, (const unsigned char *)from + first, nbytes - first);
}

static void ring_read(const Mailbox *box, uint64_t at, void *into, uint64_t nbytes)
{
    const unsigned char *data = box->words + MAILBOX_DATA;
    uint64_t start = at % box->capacity, first = box->capacity - start;
    first = first < nbytes ? first : nbytes;
    memcpy(into, data + start, first);
    memcpy((unsigned char *)into + first, data, nbytes - first);
}

/* Leave a note; false if there is no room, or if nobody may look any more. */
static bool leave_note(const Mailbox *box, const void *note, uint64_t length)
{
    /* All threads of this process come here one after the other: they hold the GIL. */
    uint64_t head = *mailbox_word(box, MAILBOX_HEAD);
    uint64_t tail = __atomic_load_n(mailbox_word(box, MAILBOX_TAIL), __ATOMIC_ACQUIRE);
    uint64_t used = head - tail, wanted = NOTE_HEADER + NOTE_PADDED(length);
    if (length > UINT32_MAX || used > box->capacity || wanted > box->capacity - used)
        return false;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t header[2] = {0, (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec};
    memcpy(header, &(uint32_t){(uint32_t)length}, sizeof(uint32_t));
    ring_write(box, head, header, NOTE_HEADER);
    ring_write(box, head + NOTE_HEADER, note, length);
    __atomic_store_n(mailbox_word(box, MAILBOX_HEAD), head + wanted, __ATOMIC_SEQ_CST);
    /* Whoever closes it looks once more afterwards: one of the two sees what the other did. */
    return __atomic_load_n(mailbox_word(box, MAILBOX_CLOSED), __ATOMIC_SEQ_CST) == 0;
}

PyDoc_STRVAR(mailbox_leave_doc,
             "mailbox_leave(address, nbytes, payload)\n--\n\nLeave a note; False if there is no "
             "room, or if nobody may look any more.");

static PyObject *mailbox_leave(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Mailbox box;
    if (count != 3 || !PyBytes_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "mailbox_leave takes an address, a size and bytes");
        return NULL;
    }
    if (take_mailbox(args[0], args[1], &box))
        return NULL;
    uint64_t length = (uint64_t)PyBytes_GET_SIZE(args[2]);
    return PyBool_FromLong(leave_note(&box, PyBytes_AS_STRING(args[2]), length));
}

PyDoc_STRVAR(mailbox_take_doc,
             "mailbox_take(address, nbytes, tail, until_ns)\n--\n\nTake what was left up to a "
             "time: (tail from now on, [(stamp, payload), ...]).\n\nRaises ValueError if what is "
             "there cannot have been left by `mailbox_leave`.");

static PyObject *mailbox_take(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Mailbox box;
    if (expect(count, 4, "mailbox_take"))
        return NULL;
    uint64_t tail = PyLong_AsUnsignedLongLong(args[2]);
    uint64_t until_ns = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred() || take_mailbox(args[0], args[1], &box))
        return NULL;
    uint64_t head = __atomic_load_n(mailbox_word(&box, MAILBOX_HEAD), __ATOMIC_ACQUIRE);
    PyObject *notes = PyList_New(0);
    bool nonsense = head - tail > box.capacity || head % 8;
    while (notes && !nonsense && tail != head) {
        uint64_t header[2], left = head - tail;
        uint32_t length;
        nonsense = left < NOTE_HEADER;
        if (nonsense)
            break;
        ring_read(&box, tail, header, NOTE_HEADER);
        memcpy(&length, header, sizeof length);
        uint64_t whole = NOTE_HEADER + NOTE_PADDED(length);
        nonsense = whole > left;
        if (nonsense || header[1] > until_ns)
            break;
        PyObject *payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
        if (payload)
            ring_read(&box, tail + NOTE_HEADER, PyBytes_AS_STRING(payload), length);
        PyObject *note = payload ? Py_BuildValue("KN", (unsigned long long)header[1], payload)
                                 : NULL;
        if (!note || PyList_Append(notes, note))
            Py_CLEAR(notes);
        Py_XDECREF(note);
        tail += whole;
    }
    if (notes && nonsense) {
        PyErr_SetString(PyExc_ValueError, "what is in the mailbox was not left there by a client");
        Py_CLEAR(notes);
    }
    if (!notes)
        return NULL;
    __atomic_store_n(mailbox_word(&box, MAILBOX_TAIL), tail, __ATOMIC_RELEASE);
    return Py_BuildValue("KN", (unsigned long long)tail, notes);
}

PyDoc_STRVAR(mailbox_close_doc,
             "mailbox_close(address, nbytes)\n--\n\nLet further notes be refused; what was left "
             "before can still be taken.");

static PyObject *mailbox_close(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Mailbox box;
    if (expect(count, 2, "mailbox_close"))
        return NULL;
    if (take_mailbox(args[0], args[1], &box))
        return NULL;
    __atomic_store_n(mailbox_word(&box, MAILBOX_CLOSED), 1, __ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}
