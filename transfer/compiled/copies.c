/* Copies of scattered pieces, in this process and between processes.
 *
 * Much at once goes past the caches: a store that misses them first reads the line it overwrites,
 * and pushes out what somebody uses. The C library does so only for single pieces, far larger. */

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* From so many bytes of one call on. Their source and target hardly fit a shared cache. */
#define STREAM_BYTES (8 << 20)
#define STREAM_PIECE_BYTES (2 << 10) /* shorter pieces have too many incomplete lines */
#define LINE_BYTES 64

/* Copy past the caches. Other threads see it in order only after `end_streams`. */
static void stream_copy(unsigned char *target, const unsigned char *source, size_t nbytes)
{
#if defined(__SSE2__)
    size_t head = -(uintptr_t)target & (LINE_BYTES - 1);
    if (head > nbytes)
        head = nbytes;
    memcpy(target, source, head);
    target += head, source += head, nbytes -= head;
    for (; nbytes >= LINE_BYTES; target += LINE_BYTES, source += LINE_BYTES, nbytes -= LINE_BYTES) {
        const __m128i *from = (const __m128i *)source;
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        __m128i *to = (__m128i *)target;
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
#endif
    memcpy(target, source, nbytes);
}

static void end_streams(void)
{
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* Copy one piece; `large`: as part of so much that it should go past the caches. */
static void copy_piece(uintptr_t target, uintptr_t source, size_t nbytes, bool large)
{
    bool overlap = target - source < nbytes || source - target < nbytes;
    if (large && nbytes >= STREAM_PIECE_BYTES && !overlap)
        stream_copy((unsigned char *)target, (const unsigned char *)source, nbytes);
    else
        memmove((void *)target, (const void *)source, nbytes);
}

PyDoc_STRVAR(copy_one_doc, "copy_one(target, source, nbytes)\n--\n\n"
             "Copy bytes between two addresses, which may overlap.");

static PyObject *copy_one(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    uintptr_t target, source;
    if (check_count(count, 3, "copy_one") || take_address(args[0], &target) ||
        take_address(args[1], &source))
        return NULL;
    Py_ssize_t nbytes = PyLong_AsSsize_t(args[2]);
    if (nbytes < 0) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "negative length %zd", nbytes);
        return NULL;
    }
    if (nbytes < GIL_BYTES) {
        memmove((void *)target, (const void *)source, (size_t)nbytes);
    } else {
        Py_BEGIN_ALLOW_THREADS
        copy_piece(target, source, (size_t)nbytes, nbytes >= STREAM_BYTES);
        end_streams();
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static void copy_each(uintptr_t target, uintptr_t source, const Pieces *pieces)
{
    bool large = pieces->nbytes >= STREAM_BYTES;
    for (Py_ssize_t i = 0; i < pieces->count; i++)
        copy_piece(target + (uintptr_t)pieces->target[i], source + (uintptr_t)pieces->source[i],
                   (size_t)pieces->lengths[i], large);
    if (large)
        end_streams();
}

PyDoc_STRVAR(copy_pieces_doc,
             "copy_pieces(target_base, source_base, target_offsets, source_offsets, lengths)\n--\n\n"
             "Copy scattered pieces between two areas; offsets count from the bases.");

static PyObject *copy_pieces(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    uintptr_t target, source;
    Pieces pieces;
    if (check_count(count, 5, "copy_pieces") || take_address(args[0], &target) ||
        take_address(args[1], &source) || take_pieces(&pieces, args[2], args[3], args[4]))
        return NULL;
    if (pieces.nbytes < GIL_BYTES) {
        copy_each(target, source, &pieces);
    } else {
        Py_BEGIN_ALLOW_THREADS
        copy_each(target, source, &pieces);
        Py_END_ALLOW_THREADS
    }
    drop_pieces(&pieces);
    Py_RETURN_NONE;
}

/* ---- copies between processes ------------------------------------------------------------- */

typedef ssize_t (*VmCall)(pid_t, const struct iovec *, unsigned long, const struct iovec *,
                          unsigned long, unsigned long);

/* Move all pieces; `pieces->target` are remote offsets. Returns 0 or an errno. */
static int move_between(VmCall call, pid_t pid, uintptr_t remote, uintptr_t local,
                        const Pieces *pieces, int64_t *moved)
{
    struct iovec near[IOVECS_MAX], far[IOVECS_MAX];
    Py_ssize_t i = 0;
    int64_t skip = 0; /* bytes of piece i that are done: a call may stop anywhere (at 2 GiB, say) */
    *moved = 0;
    while (i < pieces->count) {
        unsigned long n = 0;
        for (Py_ssize_t j = i; j < pieces->count && n < IOVECS_MAX; j++, n++) {
            int64_t done = j == i ? skip : 0;
            near[n].iov_base = (void *)(local + (uintptr_t)(pieces->source[j] + done));
            far[n].iov_base = (void *)(remote + (uintptr_t)(pieces->target[j] + done));
            near[n].iov_len = far[n].iov_len = (size_t)(pieces->lengths[j] - done);
        }
        ssize_t got = call(pid, near, n, far, n, 0);
        if (got < 0) {
            if (errno == EINTR)
                continue;
            return errno;
        }
        *moved += got;
        int64_t left = got;
        while (i < pieces->count && left >= pieces->lengths[i] - skip) {
            left -= pieces->lengths[i++] - skip;
            skip = 0;
        }
        skip += left;
        /* Nothing moved, yet something is wanted: neither an error nor progress. */
        if (got == 0 && i < pieces->count && pieces->lengths[i] > 0)
            return EFAULT;
    }
    return 0;
}

static PyObject *process_vm(VmCall call, PyObject *const *args, Py_ssize_t count, const char *name)
{
    uintptr_t remote, local;
    Pieces pieces;
    if (check_count(count, 6, name))
        return NULL;
    long pid = PyLong_AsLong(args[0]);
    if ((pid == -1 && PyErr_Occurred()) || take_address(args[1], &remote) ||
        take_address(args[2], &local) || take_pieces(&pieces, args[3], args[4], args[5]))
        return NULL;
    int64_t moved;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = move_between(call, (pid_t)pid, remote, local, &pieces, &moved);
    Py_END_ALLOW_THREADS
    drop_pieces(&pieces);
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromLongLong(moved);
}

PyDoc_STRVAR(process_vm_write_doc,
             "process_vm_write(pid, remote_base, local_base, remote_offsets, local_offsets, lengths)"
             "\n--\n\nCopy our pieces into another process; return the bytes moved.");

static PyObject *process_vm_write(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    return process_vm(process_vm_writev, args, count, "process_vm_write");
}

PyDoc_STRVAR(process_vm_read_doc,
             "process_vm_read(pid, remote_base, local_base, remote_offsets, local_offsets, lengths)"
             "\n--\n\nCopy another process's pieces into ours; return the bytes moved.");

static PyObject *process_vm_read(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    return process_vm(process_vm_readv, args, count, "process_vm_read");
}
