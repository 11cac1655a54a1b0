/* The calls of a batch on a file, one after the other without the interpreter between them.
 *
 * Several threads take the calls of one batch, each the next that nobody has. */

enum { CALLS_OK, CALLS_FAILED, CALLS_ENDED, CALLS_CUT, CALLS_LATE };

typedef struct {
    int fd;
    bool writes;
    int64_t block, file_bytes, deadline_ns;
    int64_t *next;          /* the first call that nobody has taken; shared with other threads */
    const int64_t *crowded; /* not 0: others wait for this thread */
    int64_t turn_bytes;     /* after so many it lets them */
    uintptr_t memory;
    const int64_t *offsets, *lengths, *bounds, *lows;
    Py_ssize_t num_calls;
    /* How it went: the place, and an errno or the size of the file. */
    int64_t at, detail;
} FileCalls;

static int64_t size_of(int fd)
{
    struct stat status;
    return fstat(fd, &status) < 0 ? -1 : (int64_t)status.st_size;
}

static int call_failed(FileCalls *calls, int outcome, int64_t at, int64_t detail)
{
    calls->at = at;
    calls->detail = detail;
    return outcome;
}

/* Move pieces [first, last) from or to `at` on; they are vectors of one call, unless it is short. */
static int move_call(FileCalls *calls, Py_ssize_t first, Py_ssize_t last, int64_t at)
{
    struct iovec vectors[IOVECS_MAX];
    int64_t skip = 0; /* bytes of piece `first` that are done */
    while (first < last) {
        int count = 0;
        int64_t wanted = 0;
        for (Py_ssize_t i = first; i < last && count < IOVECS_MAX; i++, count++) {
            int64_t done = i == first ? skip : 0;
            vectors[count].iov_base = (void *)(calls->memory + (uintptr_t)(calls->offsets[i] + done));
            vectors[count].iov_len = (size_t)(calls->lengths[i] - done);
            wanted += calls->lengths[i] - done;
        }
        ssize_t got = calls->writes ? pwritev(calls->fd, vectors, count, at)
                                    : preadv(calls->fd, vectors, count, at);
        if (got < 0) {
            if (errno == EINTR)
                continue;
            return call_failed(calls, CALLS_FAILED, at, errno);
        }
        if (!calls->writes && got < wanted)
            got -= got % calls->block; /* direct access cannot go on in the middle of a block */
        if (got == 0)
            return call_failed(calls, CALLS_ENDED, at, wanted);
        at += got;
        while (first < last && got >= calls->lengths[first] - skip) {
            got -= calls->lengths[first++] - skip;
            skip = 0;
        }
        skip += got;
    }
    return CALLS_OK;
}

static int move_calls(FileCalls *calls)
{
    int64_t moved = 0;
    for (;;) {
        int64_t index = __atomic_fetch_add(calls->next, 1, __ATOMIC_RELAXED);
        if (index < 0 || index >= calls->num_calls)
            return CALLS_OK;
        int64_t at = calls->lows[index];
        if (now_ns() > calls->deadline_ns)
            return call_failed(calls, CALLS_LATE, at, 0);
        if (calls->writes) {
            /* Behind the end of a file that was cut a write would quietly make it longer again. */
            int64_t size = size_of(calls->fd);
            if (size < 0)
                return call_failed(calls, CALLS_FAILED, at, errno);
            if (size < calls->file_bytes)
                return call_failed(calls, CALLS_CUT, at, size);
        }
        Py_ssize_t first = calls->bounds[index], last = calls->bounds[index + 1];
        int outcome = move_call(calls, first, last, at);
        if (outcome != CALLS_OK)
            return outcome;
        for (Py_ssize_t i = first; i < last; i++)
            moved += calls->lengths[i];
        if (moved >= calls->turn_bytes && __atomic_load_n(calls->crowded, __ATOMIC_RELAXED))
            return CALLS_OK;
    }
}

PyDoc_STRVAR(file_calls_doc,
             "file_calls(fd, writes, block, file_bytes, deadline_ns, next, crowded, turn_bytes,\n"
             "           memory, offsets, lengths, bounds, lows)\n--\n\n"
             "Take calls of a batch until none is left, or others wait and the turn is over.\n"
             "Return (outcome, offset in the file, errno or size).");

enum { NEXT, CROWDED, OFFSETS, LENGTHS, BOUNDS, LOWS, NUM_COLUMNS };

/* Whether the bounds are those of the pieces, so that no call reaches beyond the arrays. */
static bool check_columns(const Py_buffer *views, FileCalls *calls)
{
    Py_ssize_t pieces = views[LENGTHS].shape[0];
    calls->num_calls = views[LOWS].shape[0];
    bool right = views[OFFSETS].shape[0] == pieces && views[NEXT].shape[0] == 1 &&
                 views[CROWDED].shape[0] == 1 && !views[NEXT].readonly &&
                 views[BOUNDS].shape[0] == calls->num_calls + 1 && calls->block > 0;
    for (Py_ssize_t i = 0; right && i < calls->num_calls; i++)
        right = calls->bounds[i] >= 0 && calls->bounds[i] <= calls->bounds[i + 1] &&
                calls->bounds[i + 1] <= pieces;
    for (Py_ssize_t i = 0; right && i < pieces; i++)
        right = calls->lengths[i] > 0;
    if (!right)
        PyErr_SetString(PyExc_ValueError, "columns of a batch of calls do not fit one another");
    return right;
}

static PyObject *file_calls(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    static const int places[NUM_COLUMNS] = {5, 6, 9, 10, 11, 12};
    if (check_count(count, 13, "file_calls"))
        return NULL;
    FileCalls calls = {.fd = (int)PyLong_AsLong(args[0]),
                       .writes = PyObject_IsTrue(args[1]) == 1,
                       .block = PyLong_AsLongLong(args[2]),
                       .file_bytes = PyLong_AsLongLong(args[3]),
                       .deadline_ns = PyLong_AsLongLong(args[4]),
                       .turn_bytes = PyLong_AsLongLong(args[7])};
    if (PyErr_Occurred() || take_address(args[8], &calls.memory))
        return NULL;
    Py_buffer views[NUM_COLUMNS];
    PyObject *found = NULL;
    int taken = 0;
    for (; taken < NUM_COLUMNS; taken++)
        if (take_int64(args[places[taken]], &views[taken], "a column of calls") < 0)
            goto out;
    calls.next = views[NEXT].buf;
    calls.crowded = views[CROWDED].buf;
    calls.offsets = views[OFFSETS].buf;
    calls.lengths = views[LENGTHS].buf;
    calls.bounds = views[BOUNDS].buf;
    calls.lows = views[LOWS].buf;
    if (!check_columns(views, &calls))
        goto out;
    int outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = move_calls(&calls);
    Py_END_ALLOW_THREADS
    found = Py_BuildValue("(iLL)", outcome, (long long)calls.at, (long long)calls.detail);
out:
    while (taken--)
        PyBuffer_Release(&views[taken]);
    return found;
}
