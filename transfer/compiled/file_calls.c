/* The calls of a batch on a file: each moves some pieces of memory from or to one run of blocks. */

enum { CALLS_OK, CALLS_FAILED, CALLS_ENDED, CALLS_CUT, CALLS_LATE, CALLS_STOPPED };

typedef struct {
    int fd;
    bool writes;
    int64_t block, file_bytes, deadline_ns;
    uintptr_t memory;
    const int64_t *offsets, *lengths, *bounds, *lows, *highs;
    Py_ssize_t num_calls;
} FileCalls;

/* How a call went: the place, and an errno or the size of the file. */
typedef struct {
    int outcome;
    int64_t at, detail;
} CallEnd;

static int64_t size_of(int fd)
{
    struct stat status;
    return fstat(fd, &status) < 0 ? -1 : (int64_t)status.st_size;
}

static CallEnd call_end(int outcome, int64_t at, int64_t detail)
{
    return (CallEnd){.outcome = outcome, .at = at, .detail = detail};
}

/* Move pieces [first, last) from or to `at` on; they are vectors of one call, unless it is short. */
static CallEnd move_pieces(const FileCalls *calls, Py_ssize_t first, Py_ssize_t last, int64_t at)
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
            return call_end(CALLS_FAILED, at, errno);
        }
        if (!calls->writes && got < wanted)
            got -= got % calls->block; /* direct access cannot go on in the middle of a block */
        if (got == 0)
            return call_end(CALLS_ENDED, at, wanted);
        at += got;
        while (first < last && got >= calls->lengths[first] - skip) {
            got -= calls->lengths[first++] - skip;
            skip = 0;
        }
        skip += got;
    }
    return call_end(CALLS_OK, at, 0);
}

/* Make calls [first, last), which lie behind one another in the file, as one. */
static CallEnd make_calls(const FileCalls *calls, int64_t first, int64_t last)
{
    int64_t at = calls->lows[first];
    if (now_ns() > calls->deadline_ns)
        return call_end(CALLS_LATE, at, 0);
    if (calls->writes) {
        /* Behind the end of a file that was cut a write would quietly make it longer again. */
        int64_t size = size_of(calls->fd);
        if (size < 0)
            return call_end(CALLS_FAILED, at, errno);
        if (size < calls->file_bytes)
            return call_end(CALLS_CUT, at, size);
    }
    return move_pieces(calls, calls->bounds[first], calls->bounds[last], at);
}
