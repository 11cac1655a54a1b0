/* The compiled part of the package: loops that would cost Python work per piece or per system call.
 *
 * Optional. `transfer/native.py` imports it as `transfer._native` and has the same names in Python
 * for where it was not built. Callers have checked all bounds; what is checked here is what would
 * corrupt memory however careful they are (sizes of arrays, negative lengths).
 */
#define PY_SSIZE_T_CLEAN
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <Python.h>

#include <assert.h>
#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Below this many bytes a copy is over before another thread could have used the lock. */
#define GIL_BYTES (64 << 10)
/* Elements of one vectored system call (the kernel's UIO_MAXIOV is 1024). */
#define IOVECS_MAX 512

/* ---- arrays of int64 ---------------------------------------------------------------------- */

/* Borrow a one-dimensional, contiguous int64 buffer. Returns 0, or -1 with an exception set. */
static int take_int64(PyObject *object, Py_buffer *view, const char *name)
{
    if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_ND) < 0)
        return -1;
    const char *format = view->format ? view->format : "B";
    if (*format == '<' || *format == '=' || *format == '@')
        format++;
    if (view->ndim != 1 || view->itemsize != 8 || (strcmp(format, "l") && strcmp(format, "q"))) {
        PyErr_Format(PyExc_ValueError, "%s must be a 1-d array of int64", name);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

/* Three arrays of one length: where pieces start at both ends, and how long they are. */
typedef struct {
    Py_buffer views[3];
    const int64_t *target, *source, *lengths;
    Py_ssize_t count;
    int64_t nbytes;
} Pieces;

static void drop_pieces(Pieces *pieces)
{
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&pieces->views[i]);
}

static int take_pieces(Pieces *pieces, PyObject *target, PyObject *source, PyObject *lengths)
{
    static const char *const names[] = {"target_offsets", "source_offsets", "lengths"};
    PyObject *const objects[] = {target, source, lengths};
    for (int i = 0; i < 3; i++) {
        if (take_int64(objects[i], &pieces->views[i], names[i]) < 0) {
            while (i--)
                PyBuffer_Release(&pieces->views[i]);
            return -1;
        }
    }
    pieces->target = pieces->views[0].buf;
    pieces->source = pieces->views[1].buf;
    pieces->lengths = pieces->views[2].buf;
    pieces->count = pieces->views[2].shape[0];
    pieces->nbytes = 0;
    if (pieces->views[0].shape[0] != pieces->count || pieces->views[1].shape[0] != pieces->count) {
        PyErr_SetString(PyExc_ValueError, "offsets and lengths differ in number");
        drop_pieces(pieces);
        return -1;
    }
    for (Py_ssize_t i = 0; i < pieces->count; i++) {
        if (pieces->lengths[i] < 0 ||
            __builtin_add_overflow(pieces->nbytes, pieces->lengths[i], &pieces->nbytes)) {
            PyErr_Format(PyExc_ValueError, "length %lld of piece %zd is out of range",
                         (long long)pieces->lengths[i], i);
            drop_pieces(pieces);
            return -1;
        }
    }
    return 0;
}

static int take_address(PyObject *number, uintptr_t *address)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred())
        return -1;
    *address = (uintptr_t)value;
    return 0;
}

static int check_count(Py_ssize_t given, Py_ssize_t wanted, const char *name)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, given);
    return -1;
}

/* ---- copies in this process --------------------------------------------------------------- */

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
        memmove((void *)target, (const void *)source, (size_t)nbytes);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static void copy_each(uintptr_t target, uintptr_t source, const Pieces *pieces)
{
    for (Py_ssize_t i = 0; i < pieces->count; i++)
        memmove((void *)(target + (uintptr_t)pieces->target[i]),
                (const void *)(source + (uintptr_t)pieces->source[i]), (size_t)pieces->lengths[i]);
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

/* ---- bytes on data connections: `wire.py` describes them --------------------------------- */

#define MAGIC 0x4D54
#define REQUEST_BYTES 60
#define REPLY_BYTES 24
#define TOKEN_BYTES 16
#define PLACE_BYTES 16
#define HAS_IMMEDIATE 1
enum { WRITE_REQUEST = 1, READ_REQUEST = 2, MAP_REQUEST = 3 };
enum { OK = 0, UNKNOWN = 1, NO_RIGHT = 2, OUT_OF_BOUNDS = 3, GONE = 4 };
enum { MAY_READ = 1, MAY_WRITE = 2 };

/* Bytes taken ahead of what is being parsed: a small request or reply costs one system call, and
 * of a long one no more than this is copied twice. */
#define AHEAD_BYTES (8 << 10)
/* One system call moves at most so much, so that a lock around it is never held for long. */
#define STEP_BYTES (256 << 10)
/* What is no larger is taken for something that somebody waits for (`priority.py`). While such
 * ones are about, the server's steps are shorter: they would wait for the one that goes on. */
#define SMALL_BYTES (64 << 10)
#define SMALL_STEP_BYTES (64 << 10)
#define SMALL_MEMORY_NS 20000000
#define LOW_WATER_BYTES_MIN (96 << 10)
#define EVIDENCE_BYTES 128

typedef struct {
    uint8_t kind, flags;
    uint32_t slice_idx, num_slices, num_pieces, immediate;
    uint64_t nbytes, transfer_id, oldest;
    uint8_t token[TOKEN_BYTES];
} Request;

static uint16_t load16(const uint8_t *p)
{
    uint16_t value;
    memcpy(&value, p, sizeof value);
    return le16toh(value);
}

static uint32_t load32(const uint8_t *p)
{
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return le32toh(value);
}

static uint64_t load64(const uint8_t *p)
{
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return le64toh(value);
}

static void load_request(Request *request, const uint8_t *p)
{
    request->kind = p[2];
    request->flags = p[3];
    request->slice_idx = load32(p + 4);
    request->num_slices = load32(p + 8);
    request->num_pieces = load32(p + 12);
    request->immediate = load32(p + 16);
    request->nbytes = load64(p + 20);
    request->transfer_id = load64(p + 28);
    request->oldest = load64(p + 36);
    memcpy(request->token, p + 44, TOKEN_BYTES);
}

static void store16(uint8_t *p, uint16_t value)
{
    value = htole16(value);
    memcpy(p, &value, sizeof value);
}

static void store32(uint8_t *p, uint32_t value)
{
    value = htole32(value);
    memcpy(p, &value, sizeof value);
}

static void store64(uint8_t *p, uint64_t value)
{
    value = htole64(value);
    memcpy(p, &value, sizeof value);
}

static void store_request(uint8_t *p, const Request *request, const char *token)
{
    store16(p, MAGIC);
    p[2] = request->kind;
    p[3] = request->flags;
    store32(p + 4, request->slice_idx);
    store32(p + 8, request->num_slices);
    store32(p + 12, request->num_pieces);
    store32(p + 16, request->immediate);
    store64(p + 20, request->nbytes);
    store64(p + 28, request->transfer_id);
    store64(p + 36, request->oldest);
    memcpy(p + 44, token, TOKEN_BYTES);
}

static void store_reply(uint8_t *p, int status, uint32_t slice_idx, uint64_t transfer_id,
                        uint64_t nbytes)
{
    store16(p, MAGIC);
    p[2] = (uint8_t)status;
    p[3] = 0;
    store32(p + 4, slice_idx);
    store64(p + 8, transfer_id);
    store64(p + 16, nbytes);
}

/* A list of places that bytes fill, or come from, in order. The elements are consumed in place. */
typedef struct {
    struct iovec *at;
    size_t count;
    size_t nbytes;
} Places;

static void consume(Places *places, size_t moved)
{
    places->nbytes -= moved;
    while (places->count && moved >= places->at->iov_len) {
        moved -= places->at->iov_len;
        places->at++;
        places->count--;
    }
    if (moved) {
        places->at->iov_base = (char *)places->at->iov_base + moved;
        places->at->iov_len -= moved;
    }
}

/* Send once: `head` (may be empty), then the places (may be NULL). Consumes the places.
 * Returns the bytes that went, 0 if the kernel takes none now, -1 with errno. */
static ssize_t send_places(int fd, const struct iovec *head, Places *places, size_t step)
{
    struct iovec batch[IOVECS_MAX + 1];
    size_t n = 0, nbytes = 0;
    if (head->iov_len)
        batch[n++] = *head;
    for (size_t i = 0; places && i < places->count && n < IOVECS_MAX && nbytes < step; i++) {
        batch[n] = places->at[i];
        if (batch[n].iov_len > step - nbytes)
            batch[n].iov_len = step - nbytes;
        nbytes += batch[n++].iov_len;
    }
    struct msghdr message = {.msg_iov = batch, .msg_iovlen = n};
    ssize_t sent;
    do
        sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    if (places && (size_t)sent > head->iov_len)
        consume(places, (size_t)sent - head->iov_len);
    return sent;
}

/* The receiving half of a connection: bytes taken ahead, and where the next ones belong. */
typedef struct {
    int fd;
    int low_water;     /* so many bytes make it readable; 0 = any */
    size_t start, end; /* of `ahead` */
    uint8_t ahead[AHEAD_BYTES];
} Input;

/* Move bytes that were taken ahead to their places. */
static size_t land_ahead(Input *input, Places *places)
{
    size_t moved = 0;
    while (places->count && input->start < input->end) {
        size_t n = input->end - input->start;
        if (n > places->at->iov_len)
            n = places->at->iov_len;
        memcpy(places->at->iov_base, input->ahead + input->start, n);
        input->start += n;
        moved += n;
        consume(places, n);
    }
    return moved;
}

/* Before a sleep: of a long payload a step's bytes shall come before the thread is woken. It would
 * overtake the sender else, and be woken for each packet, which costs the sender most. Its end, or
 * a failure, wakes at once. */
static void set_low_water(Input *input, size_t remaining)
{
    size_t wanted = remaining < STEP_BYTES ? remaining : STEP_BYTES;
    int low_water = wanted > LOW_WATER_BYTES_MIN ? (int)wanted : 0;
    if (low_water == input->low_water)
        return;
    input->low_water = low_water;
    /* Where the kernel does not know it, it wakes more often. */
    (void)setsockopt(input->fd, SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof low_water);
}

enum { MORE, DRY, ENDED, FAILED };

/* Take the descriptor that came with a message, if any. False if there is more than one. */
static bool take_descriptor(struct msghdr *message, int *descriptor)
{
    bool single = !(message->msg_flags & MSG_CTRUNC);
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
            if (*descriptor < 0) {
                *descriptor = fd;
            } else {
                close(fd);
                single = false;
            }
        }
    }
    return single;
}

/* Receive once: into the places first (at most a step), what follows them is taken ahead.
 *
 * MORE: as much came as was asked for. DRY: less, or nothing, so the socket is empty.
 * A `descriptor` that comes is taken (NULL: the kernel drops it); more than one are a failure. */
static int receive(Input *input, Places *places, size_t step, size_t *received, int *descriptor)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec batch[IOVECS_MAX + 1];
    size_t n = 0, wanted = 0;
    if (places) {
        assert(input->start == input->end);
        for (; n < places->count && n < IOVECS_MAX && wanted < step; n++) {
            batch[n] = places->at[n];
            if (batch[n].iov_len > step - wanted)
                batch[n].iov_len = step - wanted;
            wanted += batch[n].iov_len;
        }
    }
    size_t landing = wanted;
    bool all = !places || landing == places->nbytes;
    if (input->start == input->end)
        input->start = input->end = 0;
    else if (input->start) {
        memmove(input->ahead, input->ahead + input->start, input->end - input->start);
        input->end -= input->start;
        input->start = 0;
    }
    if (all) { /* else the bytes behind this step still belong to the places */
        batch[n++] = (struct iovec){input->ahead + input->end, AHEAD_BYTES - input->end};
        wanted += AHEAD_BYTES - input->end;
    }
    struct msghdr message = {.msg_iov = batch, .msg_iovlen = n};
    if (descriptor) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
    }
    ssize_t got;
    do
        got = recvmsg(input->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    *received = 0;
    if (got > 0 && descriptor && !take_descriptor(&message, descriptor)) {
        errno = EPROTO;
        return FAILED;
    }
    if (got < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? DRY : FAILED;
    if (got == 0)
        return ENDED;
    *received = (size_t)got;
    if ((size_t)got > landing)
        input->end += (size_t)got - landing;
    if (places)
        consume(places, (size_t)got < landing ? (size_t)got : landing);
    return (size_t)got == wanted ? MORE : DRY;
}

/* Take the lock; whoever waits for it meanwhile lets the interpreter run. */
static void lock_without_gil(pthread_mutex_t *mutex)
{
    if (pthread_mutex_trylock(mutex) == 0)
        return;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(mutex);
    Py_END_ALLOW_THREADS
}

/* ---- Lane: the requester's end of a data connection -----------------------------------------
 *
 * The owner answers requests of a connection in their order, so what is under way is one queue:
 *
 *     first ... waiting for replies ...  sending ... not sent yet ... last
 *
 * `mutex` guards everything. It is held while bytes move, never while a thread sleeps.
 */

typedef struct Job {
    struct Job *next;
    PyObject *item; /* given back with the status; touched with the interpreter's lock only */
    uint64_t transfer_id;
    uint32_t slice_idx;
    uint8_t kind;
    uint8_t status;
    Places out, in;
    uint64_t expected; /* payload of the reply, if all is well */
    int descriptor;    /* of a map request that succeeded, -1 */
    uint8_t place[PLACE_BYTES];
    struct iovec iovecs[];
} Job;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex;
    int users;   /* threads that sleep in poll() on the descriptor */
    bool closed; /* no byte moves any more */
    bool landing;
    bool local;     /* a unix socket: descriptors may come */
    int descriptor; /* one that has come, -1 */
    Job *first, *sending, *last;
    int looks_to_leave_out, looks_left_out;
    Py_ssize_t in_flight;
    char evidence[EVIDENCE_BYTES];
    Input input;
} Lane;

static PyTypeObject lane_type;

static void break_lane(Lane *lane, const char *what, int error)
{
    if (!lane->evidence[0])
        snprintf(lane->evidence, EVIDENCE_BYTES, "%s%s%s", what, error ? ": " : "",
                 error ? strerror(error) : "");
}

/* Append finished jobs here. */
typedef struct {
    Job *first, **last;
} Finished;

static void send_jobs(Lane *lane)
{
    static const struct iovec nothing = {NULL, 0};
    while (lane->sending && !lane->evidence[0]) {
        Job *job = lane->sending;
        ssize_t sent = send_places(lane->input.fd, &nothing, &job->out, STEP_BYTES);
        if (sent < 0) {
            break_lane(lane, "send failed", errno);
            return;
        }
        if (!job->out.nbytes)
            lane->sending = job->next;
        else if (!sent)
            return;
    }
}

static void finish_first(Lane *lane, Finished *finished)
{
    Job *job = lane->first;
    lane->first = job->next;
    if (!lane->first)
        lane->last = NULL;
    lane->in_flight--;
    lane->landing = false;
    job->next = NULL;
    *finished->last = job;
    finished->last = &job->next;
}

/* Take the replies that were taken ahead. */
static void parse_replies(Lane *lane, Finished *finished)
{
    Input *input = &lane->input;
    while (!lane->evidence[0]) {
        Job *job = lane->first;
        if (lane->landing) {
            land_ahead(input, &job->in);
            if (job->in.nbytes)
                return;
            finish_first(lane, finished);
            continue;
        }
        if (input->end - input->start < REPLY_BYTES)
            return;
        const uint8_t *p = input->ahead + input->start;
        uint8_t status = p[2];
        uint64_t nbytes = load64(p + 16);
        if (load16(p) != MAGIC || p[3] || status > GONE) {
            break_lane(lane, "malformed: a reply that makes no sense", 0);
        } else if (!job || job == lane->sending || load32(p + 4) != job->slice_idx ||
                   load64(p + 8) != job->transfer_id) {
            break_lane(lane, "malformed: a reply to what was not asked", 0);
        } else if (nbytes != (status == OK ? job->expected : 0)) {
            break_lane(lane, "malformed: a reply of another size", 0);
        } else if ((lane->descriptor >= 0) != (job->kind == MAP_REQUEST && status == OK)) {
            break_lane(lane, "malformed: a descriptor too many or too few", 0);
        } else {
            job->descriptor = lane->descriptor;
            lane->descriptor = -1;
            input->start += REPLY_BYTES;
            job->status = status;
            if (nbytes)
                lane->landing = true;
            else
                finish_first(lane, finished);
        }
    }
}

/* Receive until the socket is empty, or a turn's bytes have come. */
static void receive_replies(Lane *lane, Finished *finished)
{
    size_t budget = 16 * STEP_BYTES;
    int outcome = MORE;
    while (outcome == MORE && budget && !lane->evidence[0]) {
        size_t received;
        outcome = receive(&lane->input, lane->landing ? &lane->first->in : NULL, STEP_BYTES,
                          &received, lane->local ? &lane->descriptor : NULL);
        if (outcome == ENDED)
            break_lane(lane, "closed by the other side", 0);
        else if (outcome == FAILED)
            break_lane(lane, "receive failed", errno);
        budget -= received < budget ? received : budget;
        parse_replies(lane, finished);
    }
}

/* Move what can be moved both ways, without waiting. */
static void move_lane(Lane *lane, int events, Finished *finished)
{
    pthread_mutex_lock(&lane->mutex);
    if (!lane->closed) {
        if (events & POLLOUT)
            send_jobs(lane);
        if (events & ~POLLOUT) {
            receive_replies(lane, finished);
            /* Whoever waits next, here or in an epoll: for no more than is still to come. */
            set_low_water(&lane->input, lane->landing ? lane->first->in.nbytes : 0);
        }
    }
    pthread_mutex_unlock(&lane->mutex);
}

static void close_descriptor(Lane *lane)
{
    close(lane->input.fd);
    lane->input.fd = -1;
}

static short enter_poll(Lane *lane, int *fd, bool *busy)
{
    short events = 0;
    pthread_mutex_lock(&lane->mutex);
    *fd = -1; /* poll() ignores it */
    if (!lane->closed) {
        lane->users++;
        *fd = lane->input.fd;
        /* An idle one is looked at too: the other side may have closed it. */
        events = (short)(POLLIN | (lane->sending ? POLLOUT : 0));
        *busy |= lane->in_flight != 0;
    }
    pthread_mutex_unlock(&lane->mutex);
    return events;
}

static void leave_poll(Lane *lane)
{
    pthread_mutex_lock(&lane->mutex);
    if (--lane->users == 0 && lane->closed)
        close_descriptor(lane);
    pthread_mutex_unlock(&lane->mutex);
}

static void free_job(Job *job)
{
    if (job->descriptor >= 0)
        close(job->descriptor);
    Py_DECREF(job->item);
    free(job);
}

static PyObject *lane_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", NULL};
    int fd;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i:Lane", names, &fd))
        return NULL;
    Lane *lane = (Lane *)type->tp_alloc(type, 0);
    if (!lane)
        return NULL;
    pthread_mutex_init(&lane->mutex, NULL);
    lane->input.fd = fd;
    lane->descriptor = -1;
    int domain = AF_UNSPEC;
    socklen_t size = sizeof domain;
    (void)getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
    lane->local = domain == AF_UNIX;
    return (PyObject *)lane;
}

/* A request of n pieces, its table and its places still to be filled in. NULL with an exception
 * set. The block is the job, the places (one more for the header, one for an answer's place), then
 * the header and the table. */
static Job *new_job(const uint8_t *header, bool writes, size_t n, uint64_t nbytes)
{
    Request request;
    load_request(&request, header);
    if (request.num_pieces != n || request.nbytes != nbytes) {
        PyErr_SetString(PyExc_ValueError, "the pieces are not those of the header");
        return NULL;
    }
    size_t head_bytes = REQUEST_BYTES + 16 * n;
    Job *job = malloc(sizeof *job + (n + 2) * sizeof(struct iovec) + head_bytes);
    if (!job) {
        PyErr_NoMemory();
        return NULL;
    }
    uint8_t *head = (uint8_t *)&job->iovecs[n + 2];
    memcpy(head, header, REQUEST_BYTES);
    job->iovecs[0] = (struct iovec){head, head_bytes};
    job->next = NULL;
    job->transfer_id = request.transfer_id;
    job->slice_idx = request.slice_idx;
    job->kind = request.kind;
    job->descriptor = -1;
    job->out = (Places){job->iovecs, writes ? n + 1 : 1, head_bytes + (writes ? nbytes : 0)};
    job->in = (Places){job->iovecs + 1, writes ? 0 : n, writes ? 0 : nbytes};
    if (job->kind == MAP_REQUEST) {
        job->iovecs[1] = (struct iovec){job->place, PLACE_BYTES};
        job->in = (Places){job->iovecs + 1, 1, PLACE_BYTES};
    }
    job->expected = job->in.nbytes;
    return job;
}

static void set_piece(Job *job, size_t n, size_t i, uintptr_t ours, int64_t theirs, int64_t length)
{
    uint8_t *table = (uint8_t *)&job->iovecs[n + 2] + REQUEST_BYTES;
    uint64_t offset = htole64((uint64_t)theirs), size = htole64((uint64_t)length);
    memcpy(table + 8 * i, &offset, 8);
    memcpy(table + 8 * (n + i), &size, 8);
    job->iovecs[i + 1] = (struct iovec){(void *)ours, (size_t)length};
}

/* Queue a job, and send it if it is small and its turn has come. */
static PyObject *queue_job(Lane *lane, Job *job, PyObject *item)
{
    job->item = Py_NewRef(item);
    /* The interpreter's lock is kept: a small request is sent before another thread could have
     * used it. */
    lock_without_gil(&lane->mutex);
    bool taken = !lane->closed && !lane->evidence[0];
    if (taken) {
        if (lane->last)
            lane->last->next = job;
        else
            lane->first = job;
        lane->last = job;
        lane->in_flight++;
        if (!lane->sending) {
            lane->sending = job;
            /* A large one is for a thread that has no locks to hold meanwhile. */
            if (job->out.nbytes <= GIL_BYTES + 16 * IOVECS_MAX)
                send_jobs(lane);
        }
    }
    pthread_mutex_unlock(&lane->mutex);
    if (!taken)
        free_job(job);
    return PyBool_FromLong(taken);
}

PyDoc_STRVAR(lane_post_doc,
             "post(item, header, writes, base, ours, theirs, lengths)\n--\n\n"
             "Send one request. Returns False if the lane is broken or closed.");

static PyObject *lane_post(Lane *lane, PyObject *const *args, Py_ssize_t count)
{
    uintptr_t base;
    Pieces pieces;
    char *header;
    Py_ssize_t header_bytes;
    if (check_count(count, 7, "post") ||
        PyBytes_AsStringAndSize(args[1], &header, &header_bytes) < 0)
        return NULL;
    if (header_bytes != REQUEST_BYTES) {
        PyErr_Format(PyExc_ValueError, "a header has %d bytes", REQUEST_BYTES);
        return NULL;
    }
    int writes = PyObject_IsTrue(args[2]);
    if (writes < 0 || take_address(args[3], &base) ||
        take_pieces(&pieces, args[5], args[4], args[6]))
        return NULL;
    size_t n = (size_t)pieces.count;
    Job *job = new_job((const uint8_t *)header, writes, n, (uint64_t)pieces.nbytes);
    for (size_t i = 0; job && i < n; i++)
        set_piece(job, n, i, base + (uintptr_t)pieces.source[i], pieces.target[i],
                  pieces.lengths[i]);
    drop_pieces(&pieces);
    return job ? queue_job(lane, job, args[0]) : NULL;
}

PyDoc_STRVAR(lane_post_message_doc,
             "post_message(item, kind, immediate, transfer_id, oldest, token, address, offset, "
             "nbytes)\n--\n\nSend a write or read of one slice and one piece. A large one is left "
             "to `push`. Returns False if the lane is broken or closed.");

static PyObject *lane_post_message(Lane *lane, PyObject *const *args, Py_ssize_t count)
{
    uintptr_t address;
    char *token;
    Py_ssize_t token_bytes;
    if (check_count(count, 9, "post_message") || take_address(args[6], &address) ||
        PyBytes_AsStringAndSize(args[5], &token, &token_bytes) < 0)
        return NULL;
    long kind = PyLong_AsLong(args[1]);
    bool signals = args[2] != Py_None;
    unsigned long immediate = signals ? PyLong_AsUnsignedLong(args[2]) : 0;
    uint64_t transfer_id = PyLong_AsUnsignedLongLong(args[3]);
    uint64_t oldest = PyLong_AsUnsignedLongLong(args[4]);
    int64_t offset = PyLong_AsLongLong(args[7]), nbytes = PyLong_AsLongLong(args[8]);
    if (PyErr_Occurred())
        return NULL;
    if (token_bytes != TOKEN_BYTES || nbytes <= 0 || immediate > UINT32_MAX ||
        (kind != WRITE_REQUEST && kind != READ_REQUEST)) {
        PyErr_SetString(PyExc_ValueError, "neither a write nor a read of one piece");
        return NULL;
    }
    uint8_t header[REQUEST_BYTES];
    store_request(header, &(Request){.kind = (uint8_t)kind,
                                     .flags = signals ? HAS_IMMEDIATE : 0,
                                     .num_slices = 1,
                                     .num_pieces = 1,
                                     .immediate = (uint32_t)immediate,
                                     .nbytes = (uint64_t)nbytes,
                                     .transfer_id = transfer_id,
                                     .oldest = oldest}, token);
    Job *job = new_job(header, kind == WRITE_REQUEST, 1, (uint64_t)nbytes);
    if (!job)
        return NULL;
    set_piece(job, 1, 0, address, offset, nbytes);
    return queue_job(lane, job, args[0]);
}

PyDoc_STRVAR(lane_push_doc, "push()\n--\n\nSend what the kernel takes now, without the "
                            "interpreter's lock. Returns whether all is sent.");

static PyObject *lane_push(Lane *lane, PyObject *ignored)
{
    (void)ignored;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&lane->mutex);
    if (!lane->closed)
        send_jobs(lane);
    pthread_mutex_unlock(&lane->mutex);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(lane->sending == NULL);
}

/* (item, status, None), or with (descriptor, offset, nbytes) for a map request. */
static PyObject *outcome_of(Job *job)
{
    if (job->descriptor < 0)
        return Py_BuildValue("OiO", job->item, (int)job->status, Py_None);
    PyObject *outcome = Py_BuildValue("Oi(iKK)", job->item, (int)job->status, job->descriptor,
                                      (unsigned long long)load64(job->place),
                                      (unsigned long long)load64(job->place + 8));
    if (outcome)
        job->descriptor = -1; /* the caller's now */
    return outcome;
}

/* Make a list of jobs that are in no queue any more, and free them. */
static PyObject *hand_over(Job *job)
{
    PyObject *list = PyList_New(0);
    while (job) {
        Job *next = job->next;
        PyObject *outcome = list ? outcome_of(job) : NULL;
        if (list && (!outcome || PyList_Append(list, outcome) < 0))
            Py_CLEAR(list);
        Py_XDECREF(outcome);
        free_job(job);
        job = next;
    }
    return list;
}

PyDoc_STRVAR(lane_close_doc,
             "close()\n--\n\nStop; what the kernel still holds is thrown away. No memory is "
             "touched any more. Returns the items of unfinished requests.");

static PyObject *lane_close(Lane *lane, PyObject *ignored)
{
    (void)ignored;
    static const struct linger none = {.l_onoff = 1, .l_linger = 0};
    lock_without_gil(&lane->mutex);
    Job *job = lane->first;
    lane->first = lane->sending = lane->last = NULL;
    lane->in_flight = 0;
    lane->landing = false;
    if (lane->descriptor >= 0)
        close(lane->descriptor);
    lane->descriptor = -1;
    if (!lane->closed) {
        lane->closed = true;
        struct sockaddr unspecified = {.sa_family = AF_UNSPEC};
        (void)setsockopt(lane->input.fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
        /* Reset, which also wakes who sleeps on it; unix sockets know only the shutdown. */
        if (connect(lane->input.fd, &unspecified, sizeof unspecified) < 0)
            (void)shutdown(lane->input.fd, SHUT_RDWR);
        if (!lane->users)
            close_descriptor(lane);
    }
    pthread_mutex_unlock(&lane->mutex);
    PyObject *list = PyList_New(0);
    while (job) {
        Job *next = job->next;
        if (list && PyList_Append(list, job->item) < 0)
            Py_CLEAR(list);
        free_job(job);
        job = next;
    }
    return list;
}

PyDoc_STRVAR(lane_abandon_doc, "abandon()\n--\n\nClose the descriptor only, touching no lock: the "
                               "way out after a fork.");

static PyObject *lane_abandon(Lane *lane, PyObject *ignored)
{
    (void)ignored;
    if (lane->input.fd >= 0)
        close(lane->input.fd);
    lane->input.fd = -1;
    lane->closed = true;
    Py_RETURN_NONE;
}

static void lane_dealloc(Lane *lane)
{
    for (Job *job = lane->first, *next; job; job = next) {
        next = job->next;
        free_job(job);
    }
    if (lane->descriptor >= 0)
        close(lane->descriptor);
    if (lane->input.fd >= 0)
        close(lane->input.fd);
    pthread_mutex_destroy(&lane->mutex);
    Py_TYPE(lane)->tp_free((PyObject *)lane);
}

static PyObject *lane_fileno(Lane *lane, PyObject *ignored)
{
    (void)ignored;
    return PyLong_FromLong(lane->input.fd);
}

static PyObject *lane_evidence(Lane *lane, void *ignored)
{
    (void)ignored;
    lock_without_gil(&lane->mutex);
    char evidence[EVIDENCE_BYTES];
    memcpy(evidence, lane->evidence, sizeof evidence);
    bool closed = lane->closed;
    pthread_mutex_unlock(&lane->mutex);
    if (evidence[0])
        return PyUnicode_DecodeUTF8(evidence, (Py_ssize_t)strlen(evidence), "replace");
    if (closed)
        return PyUnicode_FromString("closed here");
    Py_RETURN_NONE;
}

/* A look without the mutex, of a word that is read whole: no promise, and no race that matters. */
#define JUST_A_LOOK __attribute__((no_sanitize("thread")))

JUST_A_LOOK static PyObject *lane_in_flight(Lane *lane, void *ignored)
{
    (void)ignored;
    return PyLong_FromSsize_t(lane->in_flight);
}

JUST_A_LOOK static PyObject *lane_unsent(Lane *lane, void *ignored)
{
    (void)ignored;
    return PyBool_FromLong(lane->sending != NULL);
}

static PyMethodDef lane_methods[] = {
    {"post", (PyCFunction)(void (*)(void))lane_post, METH_FASTCALL, lane_post_doc},
    {"post_message", (PyCFunction)(void (*)(void))lane_post_message, METH_FASTCALL,
     lane_post_message_doc},
    {"push", (PyCFunction)lane_push, METH_NOARGS, lane_push_doc},
    {"close", (PyCFunction)lane_close, METH_NOARGS, lane_close_doc},
    {"abandon", (PyCFunction)lane_abandon, METH_NOARGS, lane_abandon_doc},
    {"fileno", (PyCFunction)lane_fileno, METH_NOARGS, "fileno()\n--\n\nThe socket, -1 if closed."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef lane_properties[] = {
    {"evidence", (getter)lane_evidence, NULL, "Why it can be used no more, None if it can.", NULL},
    {"in_flight", (getter)lane_in_flight, NULL, "Requests without an answer.", NULL},
    {"unsent", (getter)lane_unsent, NULL, "Whether something waits for the kernel.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject lane_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.Lane",
    .tp_doc = "The requester's end of a data connection. Owns the descriptor. Thread-safe.",
    .tp_basicsize = sizeof(Lane),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = lane_new,
    .tp_dealloc = (destructor)lane_dealloc,
    .tp_methods = lane_methods,
    .tp_getset = lane_properties,
};

#define LANES_MAX 64
#define LOOK_NS 25000
#define LOOK_BYTES_MAX (64 << 10)
#define LOOKS_LEFT_OUT_MAX 255

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Whether a lane waits for nothing but a small answer, and looking for it has paid lately. */
static bool may_look(Lane *lane)
{
    pthread_mutex_lock(&lane->mutex);
    bool may = !lane->closed && lane->first && !lane->sending && !lane->landing &&
               lane->first->expected <= LOOK_BYTES_MAX &&
               lane->looks_left_out++ >= lane->looks_to_leave_out;
    pthread_mutex_unlock(&lane->mutex);
    return may;
}

/* Look for an answer for a moment, before going to sleep for it: to wake a core that has gone idle
 * takes longer than most answers take. Whoever else wants this core has it in between. Where
 * answers take longer, or the other side has no other core, it is tried less and less. */
static bool look(Lane *lane, Finished *finished)
{
    int64_t end = now_ns() + LOOK_NS;
    bool over;
    do {
        move_lane(lane, POLLIN, finished);
        over = finished->first || lane->evidence[0];
        if (!over)
            sched_yield();
    } while (!over && now_ns() < end);
    pthread_mutex_lock(&lane->mutex);
    lane->looks_left_out = 0;
    int more = 2 * lane->looks_to_leave_out + 1;
    lane->looks_to_leave_out = over ? 0 : more < LOOKS_LEFT_OUT_MAX ? more : LOOKS_LEFT_OUT_MAX;
    pthread_mutex_unlock(&lane->mutex);
    return over;
}

/* Sleep until a lane is ready, move bytes, until something has finished or time is over. */
static int progress_lanes(Lane **lanes, int count, int64_t timeout_ns, Finished *finished)
{
    struct pollfd polled[LANES_MAX];
    int64_t deadline = timeout_ns ? now_ns() + timeout_ns : 0;
    if (timeout_ns && count == 1 && may_look(lanes[0]) && look(lanes[0], finished))
        return 0;
    for (;;) {
        int64_t left = timeout_ns ? deadline - now_ns() : 0;
        if (left < 0)
            left = 0;
        int usable = 0;
        bool busy = false;
        for (int i = 0; i < count; i++) {
            polled[i].events = enter_poll(lanes[i], &polled[i].fd, &busy);
            polled[i].revents = 0;
            usable += polled[i].fd >= 0;
        }
        int ready = 0;
        if (busy || !timeout_ns) {
            struct timespec span = {left / 1000000000, left % 1000000000};
            ready = ppoll(polled, (nfds_t)count, &span, NULL);
        }
        int error = ready < 0 ? errno : 0;
        bool broken = usable < count;
        for (int i = 0; i < count; i++) {
            if (polled[i].fd < 0)
                continue;
            leave_poll(lanes[i]);
            if (ready > 0 && polled[i].revents) {
                move_lane(lanes[i], polled[i].revents, finished);
                broken |= lanes[i]->evidence[0] != 0;
            }
        }
        if (error)
            return error;
        if (finished->first || broken || !busy || !timeout_ns || (ready == 0 && left == 0))
            return 0;
    }
}

PyDoc_STRVAR(progress_doc,
             "progress(lanes, timeout_s)\n--\n\n"
             "Move bytes both ways, sleeping without the interpreter's lock, until a request has "
             "ended, a lane is broken, nothing is under way, or time is over. Returns [(item, "
             "status, place)]. Several threads may do so at once.");

static PyObject *progress(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (check_count(count, 2, "progress"))
        return NULL;
    double timeout_s = PyFloat_AsDouble(args[1]);
    if (timeout_s == -1.0 && PyErr_Occurred())
        return NULL;
    if (timeout_s < 0)
        timeout_s = 0;
    else if (timeout_s > 3600) /* also keeps the product below in range */
        timeout_s = 3600;
    PyObject *given = PySequence_Tuple(args[0]);
    if (!given)
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(given);
    Lane *lanes[LANES_MAX];
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *lane = PyTuple_GET_ITEM(given, i);
        if (n > LANES_MAX || !Py_IS_TYPE(lane, &lane_type)) {
            PyErr_Format(PyExc_TypeError, "progress takes up to %d lanes", LANES_MAX);
            Py_DECREF(given);
            return NULL;
        }
        lanes[i] = (Lane *)lane;
    }
    Finished finished = {NULL, &finished.first};
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = progress_lanes(lanes, (int)n, (int64_t)(timeout_s * 1e9), &finished);
    Py_END_ALLOW_THREADS
    Py_DECREF(given);
    PyObject *list = hand_over(finished.first);
    if (error && error != EINTR) {
        Py_XDECREF(list);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    /* A signal ends the sleep early: its Python handler runs when we are back. */
    return list;
}

/* ---- Server: the owner's end of all data connections -----------------------------------------
 *
 * One thread calls `run`; all others add, withdraw, attach and close. One mutex guards everything:
 * `run` holds it while it serves one connection for a turn (a step's bytes, so microseconds), and
 * never while it sleeps. So after `withdraw` or `close_peer` have returned nothing lands any more.
 * `gate` keeps `run` from taking the mutex again before those who waited had it.
 */

#define OFFER_BUCKETS 1024
#define EVENTS_MAX 16
#define SLOTS_MAX (1u << 16)
#define ACK_BYTES (64 * REPLY_BYTES)
#define OPEN_WRITES_MAX 4096
#define BITMAP_BYTES_MAX (64u << 20)
#define NAME_BYTES 256
/* How far a peer's transfers may run ahead of its oldest unfinished one (`wire.py`). */
#define TRANSFERS_AHEAD_MAX (1u << 20)
#define AHEAD_WORDS (TRANSFERS_AHEAD_MAX / 64)

typedef struct Offer {
    struct Offer *next;
    uint8_t token[TOKEN_BYTES];
    char to[NAME_BYTES];
    uintptr_t base;
    uint64_t nbytes;
    int rights;
} Offer;

/* A write of several slices of which some are in place. */
typedef struct OpenWrite {
    struct OpenWrite *next;
    uint64_t transfer_id;
    uint32_t num_slices, arrived;
    size_t words;
    uint64_t *bitmap; /* slice is in place; grows with the highest that came */
} OpenWrite;

typedef struct Peer {
    struct Peer *next;
    uint64_t id;
    char name[NAME_BYTES];
    uint64_t oldest;
    uint64_t *finished; /* ring of bits, one per transfer from `oldest` on */
    OpenWrite *writes;
    size_t num_writes, bitmap_bytes;
    struct Connection *connections;
    size_t num_connections;
} Peer;

typedef enum { HEADER, TABLE, LANDING, DISCARDING, REPLYING, ASKING } Stage;

typedef struct Connection {
    struct Connection *next; /* of the peer */
    uint64_t id;             /* its slot, and a number that makes it unique */
    Peer *peer;
    Stage stage;
    Request request;
    int status;             /* of the request whose payload is discarded */
    const Offer *offer;     /* what lands or is sent now; NULL once it was withdrawn */
    uint64_t turn;          /* when it was served last, if it carries bulk */
    bool superseded;        /* the slice that lands here has come again over another connection */
    uint32_t interest;
    uint8_t *table;
    struct iovec *iovecs;
    size_t room;            /* pieces that `table` and `iovecs` have room for */
    Places places;
    uint8_t acks[ACK_BYTES];
    size_t acks_start, acks_end;
    Input input;
} Connection;

enum { IMMEDIATE_EVENT, CLOSED_EVENT, MAP_EVENT };

typedef struct Event {
    struct Event *next;
    int kind;
    uint64_t peer_id, connection_id;
    Request request;
    bool malformed;
    char evidence[EVIDENCE_BYTES];
} Event;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex, gate;
    int epoll, wakeup;
    bool closed;
    uint64_t slice_bytes_max, next_id;
    uint32_t slice_pieces_max, slices_max;
    uint64_t num_turns; /* of connections that carry bulk */
    int64_t small_at;   /* when a small request was served last */
    Offer *offers[OFFER_BUCKETS];
    Peer *peers;
    Connection **slots;
    size_t num_slots;
    Event *first_event, **last_event;
    uint64_t bytes_served, refused, malformed;
} Server;

static PyTypeObject server_type;

static void lock_server(Server *server)
{
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&server->gate);
    pthread_mutex_lock(&server->mutex);
    pthread_mutex_unlock(&server->gate);
    Py_END_ALLOW_THREADS
}

static void unlock_server(Server *server)
{
    pthread_mutex_unlock(&server->mutex);
}

static void wake_server(Server *server)
{
    uint64_t one = 1;
    /* It can only fail because the counter is full, and then the thread wakes anyway. */
    while (write(server->wakeup, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Say something to Python. Without memory the connection's end must do: false. */
static bool tell(Server *server, Connection *connection, int kind, bool malformed,
                 const char *evidence)
{
    Event *event = calloc(1, sizeof *event);
    if (!event)
        return false;
    event->kind = kind;
    event->peer_id = connection->peer->id;
    event->connection_id = connection->id;
    event->request = connection->request;
    event->malformed = malformed;
    snprintf(event->evidence, EVIDENCE_BYTES, "%s", evidence);
    *server->last_event = event;
    server->last_event = &event->next;
    return true;
}

/* ---- offers */

static Offer **find_offer(Server *server, const uint8_t *token)
{
    /* Tokens are random: any of their bytes spread well. */
    Offer **at = &server->offers[load16(token) % OFFER_BUCKETS];
    while (*at && memcmp((*at)->token, token, TOKEN_BYTES))
        at = &(*at)->next;
    return at;
}

static void remove_offer(Server *server, Offer **at)
{
    Offer *offer = *at;
    *at = offer->next;
    for (size_t i = 0; i < server->num_slots; i++)
        if (server->slots[i] && server->slots[i]->offer == offer)
            server->slots[i]->offer = NULL;
    free(offer);
}

/* ---- which slices are in place */

static void forget_write(Peer *peer, OpenWrite **at)
{
    OpenWrite *write = *at;
    *at = write->next;
    peer->num_writes--;
    peer->bitmap_bytes -= write->words * 8;
    free(write->bitmap);
    free(write);
}

static bool is_finished(const Peer *peer, uint64_t transfer_id)
{
    size_t bit = transfer_id % TRANSFERS_AHEAD_MAX;
    return transfer_id < peer->oldest || peer->finished[bit / 64] >> bit % 64 & 1;
}

static void forget_below(Peer *peer, uint64_t oldest)
{
    if (oldest <= peer->oldest)
        return;
    if (oldest - peer->oldest >= TRANSFERS_AHEAD_MAX) {
        memset(peer->finished, 0, AHEAD_WORDS * 8);
    } else {
        for (uint64_t id = peer->oldest; id < oldest; id++) {
            size_t bit = id % TRANSFERS_AHEAD_MAX;
            peer->finished[bit / 64] &= ~((uint64_t)1 << bit % 64);
        }
    }
    peer->oldest = oldest;
    for (Connection *c = peer->connections; c; c = c->next)
        if (c->stage == LANDING && c->request.transfer_id < oldest)
            c->superseded = true;
    for (OpenWrite **at = &peer->writes; *at;) {
        if ((*at)->transfer_id < oldest)
            forget_write(peer, at);
        else
            at = &(*at)->next;
    }
}

static OpenWrite **find_write(Peer *peer, uint64_t transfer_id)
{
    OpenWrite **at = &peer->writes;
    while (*at && (*at)->transfer_id != transfer_id)
        at = &(*at)->next;
    return at;
}

/* Whether a slice is in place, or its write is given up. */
static bool is_in_place(Peer *peer, const Request *request)
{
    if (is_finished(peer, request->transfer_id))
        return true;
    const OpenWrite *write = *find_write(peer, request->transfer_id);
    size_t word = request->slice_idx / 64;
    return write && word < write->words && write->bitmap[word] >> request->slice_idx % 64 & 1;
}

/* Make room for the bit of a slice. Returns NULL, or what is wrong. */
static const char *grow_bitmap(Peer *peer, OpenWrite *write, uint32_t slice_idx)
{
    size_t words = slice_idx / 64 + 1;
    if (words <= write->words)
        return NULL;
    size_t most = ((size_t)write->num_slices + 63) / 64;
    if (words < 2 * write->words) /* amortised; never beyond what the write can need */
        words = 2 * write->words < most ? 2 * write->words : most;
    if (peer->bitmap_bytes + (words - write->words) * 8 > BITMAP_BYTES_MAX)
        return "malformed: too many open slices";
    uint64_t *bitmap = realloc(write->bitmap, words * 8);
    if (!bitmap)
        return "out of memory";
    memset(bitmap + write->words, 0, (words - write->words) * 8);
    peer->bitmap_bytes += (words - write->words) * 8;
    write->bitmap = bitmap;
    write->words = words;
    return NULL;
}

/* Decide about the slice of a write: `fresh` if it is to be written by this connection.
 *
 * A write of one slice is either finished or not, and has no OpenWrite. Returns NULL, or what is
 * wrong with it. */
static const char *begin_slice(Connection *connection, bool *fresh)
{
    Peer *peer = connection->peer;
    const Request *request = &connection->request;
    forget_below(peer, request->oldest);
    *fresh = false;
    if (request->transfer_id >= peer->oldest + TRANSFERS_AHEAD_MAX)
        return "malformed: a transfer too far ahead of the oldest";
    if (is_finished(peer, request->transfer_id))
        return NULL;
    if (request->num_slices > 1) {
        OpenWrite *write = *find_write(peer, request->transfer_id);
        if (!write) {
            if (peer->num_writes >= OPEN_WRITES_MAX)
                return "malformed: too many open writes";
            if (!(write = calloc(1, sizeof *write)))
                return "out of memory";
            write->transfer_id = request->transfer_id;
            write->num_slices = request->num_slices;
            write->next = peer->writes;
            peer->writes = write;
            peer->num_writes++;
        }
        if (write->num_slices != request->num_slices)
            return "malformed: slices of one write differ in their number";
        const char *problem = grow_bitmap(peer, write, request->slice_idx);
        if (problem)
            return problem;
        if (write->bitmap[request->slice_idx / 64] >> request->slice_idx % 64 & 1)
            return NULL;
    }
    /* Of several receivers of one slice only the latest may write. */
    for (Connection *c = peer->connections; c; c = c->next)
        if (c != connection && c->stage == LANDING &&
            c->request.transfer_id == request->transfer_id &&
            c->request.slice_idx == request->slice_idx)
            c->superseded = true;
    *fresh = true;
    return NULL;
}

/* Note that a slice is in place. True exactly once: when it completes its write. */
static bool finish_slice(Connection *connection)
{
    Peer *peer = connection->peer;
    const Request *request = &connection->request;
    if (is_finished(peer, request->transfer_id)) /* the peer has given it up meanwhile */
        return false;
    if (request->num_slices > 1) {
        OpenWrite **at = find_write(peer, request->transfer_id);
        OpenWrite *write = *at;
        uint64_t bit = (uint64_t)1 << request->slice_idx % 64;
        if (!write || write->bitmap[request->slice_idx / 64] & bit)
            return false;
        write->bitmap[request->slice_idx / 64] |= bit;
        if (++write->arrived < write->num_slices)
            return false;
        forget_write(peer, at);
    }
    size_t bit = request->transfer_id % TRANSFERS_AHEAD_MAX;
    peer->finished[bit / 64] |= (uint64_t)1 << bit % 64;
    return true;
}

/* ---- connections */

static void free_connection(Connection *connection)
{
    if (connection->input.fd >= 0)
        close(connection->input.fd);
    free(connection->table);
    free(connection->iovecs);
    free(connection);
}

static void end_connection(Server *server, Connection *connection, bool abort)
{
    static const struct linger none = {.l_onoff = 1, .l_linger = 0};
    Connection **at = &connection->peer->connections;
    while (*at != connection)
        at = &(*at)->next;
    *at = connection->next;
    connection->peer->num_connections--;
    server->slots[connection->id % SLOTS_MAX] = NULL;
    (void)epoll_ctl(server->epoll, EPOLL_CTL_DEL, connection->input.fd, NULL);
    if (abort)
        (void)setsockopt(connection->input.fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    /* A fork may hold a copy of the descriptor: the shutdown is what the peer sees. */
    (void)shutdown(connection->input.fd, SHUT_RDWR);
    free_connection(connection);
}

static bool begins(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* Close because of what came over it, and tell. */
static void fail_connection(Server *server, Connection *connection, const char *evidence)
{
    bool malformed = begins(evidence, "malformed: ");
    server->malformed += malformed;
    (void)tell(server, connection, CLOSED_EVENT, malformed, evidence);
    end_connection(server, connection, false);
}

static bool has_output(const Connection *connection)
{
    return connection->acks_start < connection->acks_end ||
           (connection->stage == REPLYING && connection->places.nbytes);
}

/* Send what is to be sent: answers, then at most the turn's bytes of a payload, as far as the
 * kernel takes it. Returns NULL, or why it failed. */
static const char *flush(Connection *connection, size_t step, size_t *budget)
{
    while (has_output(connection)) {
        bool replying = connection->stage == REPLYING;
        if (replying && !connection->offer)
            return "a key was withdrawn while its memory was read";
        struct iovec acks = {connection->acks + connection->acks_start,
                             connection->acks_end - connection->acks_start};
        if (!acks.iov_len && !*budget)
            return NULL; /* the others' turn */
        /* The head of a reply leaves in one packet with its payload. */
        size_t head = acks.iov_len;
        ssize_t sent =
            send_places(connection->input.fd, &acks, replying ? &connection->places : NULL, step);
        if (sent < 0)
            return "send failed";
        if (sent == 0)
            return NULL;
        size_t payload = (size_t)sent > head ? (size_t)sent - head : 0;
        connection->acks_start += (size_t)sent - payload;
        *budget -= payload < *budget ? payload : *budget;
    }
    connection->acks_start = connection->acks_end = 0;
    if (connection->stage == REPLYING) {
        connection->offer = NULL;
        connection->stage = HEADER;
    }
    return NULL;
}

/* Queue a reply; there is room, because no request is begun without it. */
static void acknowledge(Connection *connection, int status, uint64_t nbytes)
{
    const Request *request = &connection->request;
    assert(connection->acks_end + REPLY_BYTES <= ACK_BYTES);
    store_reply(connection->acks + connection->acks_end, status, request->slice_idx,
                request->transfer_id, nbytes);
    connection->acks_end += REPLY_BYTES;
}

static const char *check_header(const Server *server, const uint8_t *p, const Request *request)
{
    if (load16(p) != MAGIC || request->kind < WRITE_REQUEST || request->kind > MAP_REQUEST ||
        request->flags & ~HAS_IMMEDIATE)
        return "malformed: a request that makes no sense";
    if (request->slice_idx >= request->num_slices || request->num_slices > server->slices_max)
        return "malformed: a slice beyond the number of slices";
    if (request->num_pieces > server->slice_pieces_max ||
        request->nbytes > server->slice_bytes_max ||
        (request->num_pieces == 0) != (request->nbytes == 0))
        return "malformed: a slice of too many pieces or bytes";
    if (request->oldest > request->transfer_id)
        return "malformed: a transfer older than the oldest";
    return NULL;
}

/* Room for the table and places of a request. */
static const char *make_room(Connection *connection)
{
    size_t n = connection->request.num_pieces;
    if (n <= connection->room)
        return NULL;
    uint8_t *table = realloc(connection->table, 16 * n);
    if (!table)
        return "out of memory";
    connection->table = table;
    struct iovec *iovecs = realloc(connection->iovecs, n * sizeof *iovecs);
    if (!iovecs)
        return "out of memory";
    connection->iovecs = iovecs;
    connection->room = n;
    return NULL;
}

static const char *take_header(Server *server, Connection *connection)
{
    Input *input = &connection->input;
    const uint8_t *p = input->ahead + input->start;
    load_request(&connection->request, p);
    const char *problem = check_header(server, p, &connection->request);
    if (!problem)
        problem = make_room(connection);
    if (problem)
        return problem;
    input->start += REQUEST_BYTES;
    size_t nbytes = 16 * (size_t)connection->request.num_pieces;
    if (nbytes)
        connection->iovecs[0] = (struct iovec){connection->table, nbytes};
    connection->places = (Places){connection->iovecs, nbytes ? 1 : 0, nbytes};
    connection->stage = TABLE;
    return NULL;
}

/* Turn the table into places in the window. Returns a status, or -1 if it makes no sense. */
static int place_pieces(const Server *server, Connection *connection, const Offer *offer)
{
    size_t n = connection->request.num_pieces;
    uint64_t total = 0;
    int status = OK;
    for (size_t i = 0; i < n; i++) {
        uint64_t offset = load64(connection->table + 8 * i);
        uint64_t length = load64(connection->table + 8 * (n + i));
        if (length == 0 || length > server->slice_bytes_max)
            return -1;
        total += length; /* 2^32 pieces of a slice's bytes at most: no overflow */
        if (!offer || length > offer->nbytes || offset > offer->nbytes - length)
            status = OUT_OF_BOUNDS; /* negative offsets are huge ones here */
        else
            connection->iovecs[i] = (struct iovec){(void *)(offer->base + offset), length};
    }
    if (total != connection->request.nbytes)
        return -1;
    connection->places = (Places){connection->iovecs, n, connection->request.nbytes};
    return status;
}

static void discard_payload(Connection *connection, int status)
{
    connection->status = status;
    connection->offer = NULL;
    connection->stage = DISCARDING;
    connection->places.nbytes =
        connection->request.kind == WRITE_REQUEST ? connection->request.nbytes : 0;
    connection->places.count = 0;
}

/* Whether a window is still mapped: its first bytes lie in our buffer, and copying them to where
 * nothing is would end the process. MS_ASYNC does nothing but look, in a sixth of a microsecond. */
static bool is_mapped(const Offer *offer)
{
    uintptr_t start = offer->base & ~((uintptr_t)getpagesize() - 1);
    return msync((void *)start, offer->base + offer->nbytes - start, MS_ASYNC) == 0;
}

/* The table is complete: judge the request, and begin to serve it. */
static const char *take_table(Server *server, Connection *connection)
{
    const Request *request = &connection->request;
    Offer *offer = *find_offer(server, request->token);
    if (offer && strcmp(offer->to, connection->peer->name))
        offer = NULL;
    int status = place_pieces(server, connection, offer);
    if (status < 0)
        return "malformed: pieces that do not add up";
    if (request->kind == MAP_REQUEST) { /* Python knows whether it can be mapped */
        connection->stage = ASKING;
        return tell(server, connection, MAP_EVENT, false, "") ? NULL : "out of memory";
    }
    if (!offer)
        status = UNKNOWN;
    else if (!(offer->rights & (request->kind == WRITE_REQUEST ? MAY_WRITE : MAY_READ)))
        status = NO_RIGHT;
    else if (status == OK && request->nbytes && !is_mapped(offer))
        status = GONE;
    if (status != OK) {
        server->refused++;
        discard_payload(connection, status);
        return NULL;
    }
    connection->offer = offer;
    if (request->kind == READ_REQUEST) {
        acknowledge(connection, OK, request->nbytes);
        server->bytes_served += request->nbytes;
        connection->stage = REPLYING;
        return NULL;
    }
    bool fresh;
    const char *problem = begin_slice(connection, &fresh);
    if (problem)
        return problem;
    if (!fresh) {
        discard_payload(connection, OK);
        return NULL;
    }
    connection->superseded = false;
    connection->stage = LANDING;
    return NULL;
}

/* All bytes of a slice have landed. */
static const char *finish_landing(Server *server, Connection *connection)
{
    const Request *request = &connection->request;
    server->bytes_served += request->nbytes;
    if (finish_slice(connection) && request->flags & HAS_IMMEDIATE &&
        !tell(server, connection, IMMEDIATE_EVENT, false, ""))
        return "out of memory";
    acknowledge(connection, OK, 0);
    connection->offer = NULL;
    connection->stage = HEADER;
    return NULL;
}

static void discard_ahead(Connection *connection)
{
    Input *input = &connection->input;
    size_t n = input->end - input->start;
    if (n > connection->places.nbytes)
        n = connection->places.nbytes;
    input->start += n;
    connection->places.nbytes -= n;
}

/* Go as far as the bytes that are there allow. `waiting`: more bytes are needed. */
static const char *advance(Server *server, Connection *connection, bool *waiting)
{
    Input *input = &connection->input;
    *waiting = false;
    const char *problem = NULL;
    while (!problem) {
        switch (connection->stage) {
        case HEADER:
            if (connection->acks_end + REPLY_BYTES > ACK_BYTES)
                return NULL; /* answers first */
            if (input->end - input->start < REQUEST_BYTES) {
                *waiting = true;
                return NULL;
            }
            problem = take_header(server, connection);
            break;
        case TABLE:
            land_ahead(input, &connection->places);
            if (connection->places.nbytes) {
                *waiting = true;
                return NULL;
            }
            problem = take_table(server, connection);
            break;
        case LANDING:
            if (connection->superseded || !connection->offer) {
                /* It may not be called in place while another connection still brings it. */
                if (connection->offer && !is_in_place(connection->peer, &connection->request))
                    return "its slice came again over another connection";
                size_t left = connection->places.nbytes;
                discard_payload(connection, connection->offer ? OK : UNKNOWN);
                connection->places.nbytes = left;
                break;
            }
            land_ahead(input, &connection->places);
            if (connection->places.nbytes) {
                *waiting = true;
                return NULL;
            }
            problem = finish_landing(server, connection);
            break;
        case DISCARDING:
            discard_ahead(connection);
            if (connection->places.nbytes) {
                *waiting = true;
                return NULL;
            }
            acknowledge(connection, connection->status, 0);
            connection->stage = HEADER;
            break;
        case REPLYING:
        case ASKING:
            return NULL;
        }
    }
    return problem;
}

/* Serve a connection until it has nothing to do, or its turn's bytes are moved. */
static const char *serve(Server *server, Connection *connection)
{
    bool is_alone = now_ns() - server->small_at > SMALL_MEMORY_NS;
    size_t step = is_alone ? STEP_BYTES : SMALL_STEP_BYTES, budget = step;
    for (;;) {
        bool waiting;
        const char *problem = advance(server, connection, &waiting);
        if (!problem)
            problem = flush(connection, step, &budget);
        if (problem || has_output(connection) || connection->stage == ASKING)
            return problem;
        if (!waiting)
            continue; /* what kept it from going on has been sent */
        if (!budget)
            return NULL;
        bool direct = connection->stage == LANDING || connection->stage == TABLE;
        size_t received;
        int outcome = receive(&connection->input, direct ? &connection->places : NULL, step,
                              &received, NULL);
        if (outcome == ENDED)
            return "closed by the other side";
        if (outcome == FAILED)
            return "receive failed";
        budget -= received < budget ? received : budget;
        if (outcome == DRY)
            budget = 0; /* handle what came, then wait for more */
    }
}

static void update_interest(Server *server, Connection *connection)
{
    set_low_water(&connection->input,
                  connection->stage == LANDING ? connection->places.nbytes : 0);
    uint32_t wanted = has_output(connection) ? EPOLLOUT : EPOLLIN;
    if (connection->stage == ASKING)
        wanted = 0;
    if (wanted == connection->interest)
        return;
    struct epoll_event event = {.events = wanted, .data.u64 = connection->id};
    connection->interest = wanted;
    (void)epoll_ctl(server->epoll, EPOLL_CTL_MOD, connection->input.fd, &event);
}

static Connection *find_connection(Server *server, uint64_t id)
{
    size_t slot = id % SLOTS_MAX;
    Connection *connection = slot < server->num_slots ? server->slots[slot] : NULL;
    return connection && connection->id == id ? connection : NULL;
}

/* Serve a connection that is ready, and see what it waits for next. */
static void serve_ready(Server *server, Connection *connection, uint32_t events)
{
    const char *problem = connection->stage == ASKING && events & ~EPOLLIN
                              ? "closed by the other side"
                              : serve(server, connection);
    if (problem)
        fail_connection(server, connection, problem);
    else
        update_interest(server, connection);
}

static void lock_between_turns(Server *server)
{
    pthread_mutex_lock(&server->gate);
    pthread_mutex_lock(&server->mutex);
    pthread_mutex_unlock(&server->gate);
}

/* One sleep and what it woke up for: everybody whose last request was small, then one of the
 * others, the one that has waited longest. So a small request waits for one turn of bulk at most,
 * however many connections carry it. Returns 0 or an errno. */
static int run_once(Server *server, int timeout_ms, bool *woken)
{
    struct epoll_event events[EVENTS_MAX];
    int n = epoll_wait(server->epoll, events, EVENTS_MAX, timeout_ms);
    if (n < 0)
        return errno;
    const struct epoll_event *bulk = NULL;
    uint64_t waits_since = UINT64_MAX;
    for (int i = 0; i < n; i++) {
        if (events[i].data.u64 == 0) {
            uint64_t count;
            *woken = true;
            (void)!read(server->wakeup, &count, sizeof count);
            continue;
        }
        lock_between_turns(server);
        /* Looked up again each time: another thread may have closed it. */
        Connection *connection = find_connection(server, events[i].data.u64);
        if (connection && connection->request.nbytes <= SMALL_BYTES) {
            server->small_at = now_ns();
            serve_ready(server, connection, events[i].events);
        } else if (connection && connection->turn < waits_since) {
            waits_since = connection->turn;
            bulk = &events[i];
        }
        pthread_mutex_unlock(&server->mutex);
    }
    if (!bulk)
        return 0;
    lock_between_turns(server);
    Connection *connection = find_connection(server, bulk->data.u64);
    if (connection) {
        connection->turn = ++server->num_turns;
        serve_ready(server, connection, bulk->events);
    }
    pthread_mutex_unlock(&server->mutex);
    return 0;
}

/* ---- what Python calls */

static bool take_name(PyObject *object, char *name)
{
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(object, &length);
    if (!text)
        return false;
    if (length >= NAME_BYTES || strlen(text) != (size_t)length) {
        PyErr_Format(PyExc_ValueError, "a name has less than %d bytes and no zeros", NAME_BYTES);
        return false;
    }
    memcpy(name, text, (size_t)length + 1);
    return true;
}

static PyObject *server_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"slice_bytes_max", "slice_pieces_max", "slices_max", NULL};
    unsigned long long slice_bytes;
    unsigned int slice_pieces, slices;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KII:Server", names, &slice_bytes, &slice_pieces,
                                     &slices))
        return NULL;
    if (slice_bytes > (1u << 30) || slice_pieces > (1u << 20)) {
        PyErr_SetString(PyExc_ValueError, "a slice has at most 2^30 bytes and 2^20 pieces");
        return NULL;
    }
    Server *server = (Server *)type->tp_alloc(type, 0);
    if (!server)
        return NULL;
    pthread_mutex_init(&server->mutex, NULL);
    pthread_mutex_init(&server->gate, NULL);
    server->slice_bytes_max = slice_bytes;
    server->slice_pieces_max = slice_pieces;
    server->slices_max = slices;
    server->next_id = 1;
    server->last_event = &server->first_event;
    server->epoll = epoll_create1(EPOLL_CLOEXEC);
    server->wakeup = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
    if (server->epoll < 0 || server->wakeup < 0 ||
        epoll_ctl(server->epoll, EPOLL_CTL_ADD, server->wakeup, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(server);
        return NULL;
    }
    return (PyObject *)server;
}

static void free_peer(Server *server, Peer **at)
{
    Peer *peer = *at;
    *at = peer->next;
    while (peer->connections)
        end_connection(server, peer->connections, false);
    while (peer->writes)
        forget_write(peer, &peer->writes);
    free(peer->finished);
    free(peer);
}

static void clear_server(Server *server)
{
    while (server->peers)
        free_peer(server, &server->peers);
    for (size_t i = 0; i < OFFER_BUCKETS; i++)
        while (server->offers[i])
            remove_offer(server, &server->offers[i]);
}

static Peer **find_peer(Server *server, uint64_t id)
{
    Peer **at = &server->peers;
    while (*at && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

PyDoc_STRVAR(open_peer_doc, "open_peer(name)\n--\n\nMake the place of one life of a peer: its "
                            "connections, and which of its writes are in place.");

static PyObject *server_open_peer(Server *server, PyObject *name)
{
    Peer *peer = calloc(1, sizeof *peer);
    if (!peer || !(peer->finished = calloc(AHEAD_WORDS, 8))) {
        free(peer);
        return PyErr_NoMemory();
    }
    if (!take_name(name, peer->name)) {
        free(peer->finished);
        free(peer);
        return NULL;
    }
    lock_server(server);
    uint64_t id = peer->id = server->next_id++;
    peer->next = server->peers;
    server->peers = peer;
    unlock_server(server);
    return PyLong_FromUnsignedLongLong(id);
}

PyDoc_STRVAR(close_peer_doc, "close_peer(peer_id)\n--\n\nClose all its connections and forget it; "
                             "nothing of it lands any more.");

static PyObject *server_close_peer(Server *server, PyObject *number)
{
    unsigned long long id = PyLong_AsUnsignedLongLong(number);
    if (id == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    lock_server(server);
    Peer **at = find_peer(server, id);
    if (*at)
        free_peer(server, at);
    unlock_server(server);
    Py_RETURN_NONE;
}

/* A slot for a connection, or SLOTS_MAX. */
static size_t free_slot(Server *server)
{
    for (size_t i = 0; i < server->num_slots; i++)
        if (!server->slots[i])
            return i;
    size_t n = server->num_slots ? 2 * server->num_slots : 16;
    if (n > SLOTS_MAX)
        return SLOTS_MAX;
    Connection **slots = realloc(server->slots, n * sizeof *slots);
    if (!slots)
        return SLOTS_MAX;
    size_t slot = server->num_slots;
    memset(slots + slot, 0, (n - slot) * sizeof *slots);
    server->slots = slots;
    server->num_slots = n;
    return slot;
}

/* Returns 0 or an errno. */
static int attach(Server *server, Connection *connection, uint64_t peer_id)
{
    Peer *peer = server->closed ? NULL : *find_peer(server, peer_id);
    if (!peer)
        return ENOTCONN;
    size_t slot = free_slot(server);
    if (slot == SLOTS_MAX)
        return EMFILE;
    connection->id = server->next_id++ * SLOTS_MAX + slot;
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = connection->id};
    if (epoll_ctl(server->epoll, EPOLL_CTL_ADD, connection->input.fd, &event) < 0)
        return errno;
    connection->interest = EPOLLIN;
    connection->peer = peer;
    connection->next = peer->connections;
    peer->connections = connection;
    peer->num_connections++;
    server->slots[slot] = connection;
    return 0;
}

PyDoc_STRVAR(attach_doc, "attach(peer_id, fd)\n--\n\nServe a connection, whose descriptor is the "
                         "server's from here on, even if this fails. Returns its id.");

static PyObject *server_attach(Server *server, PyObject *args)
{
    unsigned long long peer_id;
    int fd;
    if (!PyArg_ParseTuple(args, "Ki:attach", &peer_id, &fd))
        return NULL;
    Connection *connection = calloc(1, sizeof *connection);
    if (!connection) {
        close(fd);
        return PyErr_NoMemory();
    }
    connection->input.fd = fd;
    lock_server(server);
    int error = attach(server, connection, peer_id);
    uint64_t id = connection->id;
    unlock_server(server);
    if (error) {
        free_connection(connection);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromUnsignedLongLong(id);
}

PyDoc_STRVAR(detach_doc, "detach(connection_id)\n--\n\nReset a connection; idempotent.");

static PyObject *server_detach(Server *server, PyObject *number)
{
    unsigned long long id = PyLong_AsUnsignedLongLong(number);
    if (id == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    lock_server(server);
    Connection *connection = find_connection(server, id);
    if (connection)
        end_connection(server, connection, true);
    unlock_server(server);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(connections_doc,
             "connections(peer_id)\n--\n\nReturn the ids of a peer's connections.");

static PyObject *server_connections(Server *server, PyObject *number)
{
    unsigned long long peer_id = PyLong_AsUnsignedLongLong(number);
    if (peer_id == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    uint64_t *ids = NULL;
    size_t n = 0;
    lock_server(server);
    Peer *peer = *find_peer(server, peer_id);
    if (peer && (ids = malloc((peer->num_connections + 1) * sizeof *ids)))
        for (Connection *c = peer->connections; c; c = c->next)
            ids[n++] = c->id;
    bool failed = peer && !ids;
    unlock_server(server);
    PyObject *list = failed ? PyErr_NoMemory() : PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *id = PyLong_FromUnsignedLongLong(ids[i]);
        if (id)
            PyList_SET_ITEM(list, (Py_ssize_t)i, id);
        else
            Py_CLEAR(list);
    }
    free(ids);
    return list;
}

PyDoc_STRVAR(add_offer_doc, "add_offer(token, to, address, nbytes, rights)\n--\n\n"
                            "Let the peers named `to` access memory under a token.");

static PyObject *server_add_offer(Server *server, PyObject *args)
{
    const char *token;
    Py_ssize_t token_bytes;
    PyObject *to;
    unsigned long long address, nbytes;
    int rights;
    if (!PyArg_ParseTuple(args, "y#UKKi:add_offer", &token, &token_bytes, &to, &address, &nbytes,
                          &rights))
        return NULL;
    if (token_bytes != TOKEN_BYTES) {
        PyErr_Format(PyExc_ValueError, "a token has %d bytes", TOKEN_BYTES);
        return NULL;
    }
    Offer *offer = calloc(1, sizeof *offer);
    if (!offer)
        return PyErr_NoMemory();
    if (!take_name(to, offer->to)) {
        free(offer);
        return NULL;
    }
    memcpy(offer->token, token, TOKEN_BYTES);
    offer->base = (uintptr_t)address;
    offer->nbytes = nbytes;
    offer->rights = rights;
    lock_server(server);
    Offer **at = find_offer(server, offer->token);
    bool known = *at != NULL;
    if (!known)
        *at = offer;
    unlock_server(server);
    if (known) {
        free(offer);
        PyErr_SetString(PyExc_ValueError, "the token is in use");
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(withdraw_offer_doc, "withdraw_offer(token)\n--\n\nMake a token void; idempotent. After "
                                 "the return its memory is not touched any more.");

static PyObject *server_withdraw_offer(Server *server, PyObject *object)
{
    char *token;
    Py_ssize_t token_bytes;
    if (PyBytes_AsStringAndSize(object, &token, &token_bytes) < 0)
        return NULL;
    if (token_bytes != TOKEN_BYTES)
        Py_RETURN_NONE;
    lock_server(server);
    Offer **at = find_offer(server, (const uint8_t *)token);
    if (*at)
        remove_offer(server, at);
    unlock_server(server);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(run_doc, "run(timeout_s)\n--\n\nServe, without the interpreter's lock, until there is "
                      "an event for Python, `wake` is called, or time is over. One thread at a "
                      "time.");

static PyObject *server_run(Server *server, PyObject *number)
{
    double timeout_s = PyFloat_AsDouble(number);
    if (timeout_s == -1.0 && PyErr_Occurred())
        return NULL;
    if (server->closed) {
        PyErr_SetString(PyExc_OSError, "the server is closed");
        return NULL;
    }
    timeout_s = timeout_s < 0 ? 0 : timeout_s > 3600 ? 3600 : timeout_s;
    int error = 0;
    Py_BEGIN_ALLOW_THREADS
    int64_t deadline = now_ns() + (int64_t)(timeout_s * 1e9);
    bool told = false, over = false;
    while (!error && !told && !over) {
        int64_t left = deadline - now_ns();
        bool woken = false;
        /* Rounded up: a sleep that ends early would come back at once. */
        error = run_once(server, left > 0 ? (int)((left + 999999) / 1000000) : 0, &woken);
        pthread_mutex_lock(&server->mutex);
        told = server->first_event != NULL;
        pthread_mutex_unlock(&server->mutex);
        over = left <= 0 || woken;
    }
    Py_END_ALLOW_THREADS
    if (error && error != EINTR) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(wake_doc, "wake()\n--\n\nMake `run` return.");

static PyObject *server_wake(Server *server, PyObject *ignored)
{
    (void)ignored;
    if (!server->closed)
        wake_server(server);
    Py_RETURN_NONE;
}

static PyObject *event_tuple(const Event *event)
{
    switch (event->kind) {
    case IMMEDIATE_EVENT:
        return Py_BuildValue("iKKI", event->kind, (unsigned long long)event->peer_id,
                             (unsigned long long)event->connection_id, event->request.immediate);
    case CLOSED_EVENT:
        return Py_BuildValue("iKK(sO)", event->kind, (unsigned long long)event->peer_id,
                             (unsigned long long)event->connection_id, event->evidence,
                             event->malformed ? Py_True : Py_False);
    default:
        return Py_BuildValue("iKK(KIy#)", event->kind, (unsigned long long)event->peer_id,
                             (unsigned long long)event->connection_id,
                             (unsigned long long)event->request.transfer_id,
                             event->request.slice_idx, event->request.token,
                             (Py_ssize_t)TOKEN_BYTES);
    }
}

PyDoc_STRVAR(take_events_doc, "take_events()\n--\n\nReturn what has happened since the last call: "
                              "[(kind, peer_id, connection_id, detail)].");

static PyObject *server_take_events(Server *server, PyObject *ignored)
{
    (void)ignored;
    lock_server(server);
    Event *event = server->first_event;
    server->first_event = NULL;
    server->last_event = &server->first_event;
    unlock_server(server);
    PyObject *list = PyList_New(0);
    while (event) {
        Event *next = event->next;
        PyObject *tuple = list ? event_tuple(event) : NULL;
        if (list && (!tuple || PyList_Append(list, tuple) < 0))
            Py_CLEAR(list);
        Py_XDECREF(tuple);
        free(event);
        event = next;
    }
    return list;
}

PyDoc_STRVAR(take_counters_doc, "take_counters()\n--\n\nReturn bytes served, requests refused and "
                                "connections closed for nonsense, since the last call.");

static PyObject *server_take_counters(Server *server, PyObject *ignored)
{
    (void)ignored;
    lock_server(server);
    unsigned long long served = server->bytes_served, refused = server->refused,
                       malformed = server->malformed;
    server->bytes_served = server->refused = server->malformed = 0;
    unlock_server(server);
    return Py_BuildValue("KKK", served, refused, malformed);
}

/* Send the answer to a map request, a descriptor with its first byte. Returns NULL or a problem. */
static const char *send_answer(Connection *connection, const uint8_t *reply, size_t nbytes,
                               int descriptor)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {(void *)reply, nbytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &descriptor, sizeof(int));
    }
    ssize_t sent;
    do
        sent = sendmsg(connection->input.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    /* All earlier answers are out, and these few bytes fit into any socket's buffer. */
    return sent == (ssize_t)nbytes ? NULL : "send failed";
}

PyDoc_STRVAR(answer_doc, "answer(connection_id, status, payload, descriptor)\n--\n\n"
                         "Answer the map request of a connection. The descriptor (or -1) stays "
                         "the caller's.");

static PyObject *server_answer(Server *server, PyObject *args)
{
    unsigned long long id;
    int status, descriptor;
    const char *payload;
    Py_ssize_t payload_bytes;
    uint8_t reply[REPLY_BYTES + 64];
    if (!PyArg_ParseTuple(args, "Kiy#i:answer", &id, &status, &payload, &payload_bytes,
                          &descriptor))
        return NULL;
    if (payload_bytes > 64) {
        PyErr_SetString(PyExc_ValueError, "a place has at most 64 bytes");
        return NULL;
    }
    lock_server(server);
    Connection *connection = find_connection(server, id);
    if (connection && connection->stage == ASKING) {
        store_reply(reply, status, connection->request.slice_idx, connection->request.transfer_id,
                    (uint64_t)payload_bytes);
        memcpy(reply + REPLY_BYTES, payload, (size_t)payload_bytes);
        const char *problem =
            send_answer(connection, reply, REPLY_BYTES + (size_t)payload_bytes, descriptor);
        connection->stage = HEADER;
        /* Requests that came with it lie in our buffer, where epoll sees nothing. */
        if (!problem)
            problem = serve(server, connection);
        if (problem)
            fail_connection(server, connection, problem);
        else
            update_interest(server, connection);
    }
    bool told = server->first_event != NULL;
    unlock_server(server);
    if (told)
        wake_server(server);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(server_close_doc, "close()\n--\n\nClose all connections and forget all offers; no "
                               "thread may be in `run`. Idempotent.");

static PyObject *server_close(Server *server, PyObject *ignored)
{
    (void)ignored;
    lock_server(server);
    if (!server->closed) {
        server->closed = true;
        clear_server(server);
        close(server->epoll);
        close(server->wakeup);
        server->epoll = server->wakeup = -1;
    }
    unlock_server(server);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(server_abandon_doc, "abandon()\n--\n\nClose the descriptors only, touching no lock: "
                                 "the way out after a fork.");

static PyObject *server_abandon(Server *server, PyObject *ignored)
{
    (void)ignored;
    if (server->closed)
        Py_RETURN_NONE;
    server->closed = true;
    for (size_t i = 0; i < server->num_slots; i++) {
        if (server->slots[i]) {
            close(server->slots[i]->input.fd);
            server->slots[i]->input.fd = -1;
        }
    }
    close(server->epoll);
    close(server->wakeup);
    server->epoll = server->wakeup = -1;
    Py_RETURN_NONE;
}

static void server_dealloc(Server *server)
{
    clear_server(server);
    for (Event *event = server->first_event, *next; event; event = next) {
        next = event->next;
        free(event);
    }
    free(server->slots);
    if (server->epoll >= 0)
        close(server->epoll);
    if (server->wakeup >= 0)
        close(server->wakeup);
    pthread_mutex_destroy(&server->gate);
    pthread_mutex_destroy(&server->mutex);
    Py_TYPE(server)->tp_free((PyObject *)server);
}

#define METHOD(name, flags) {#name, (PyCFunction)server_##name, flags, name##_doc}

static PyMethodDef server_methods[] = {
    METHOD(open_peer, METH_O),
    METHOD(close_peer, METH_O),
    METHOD(attach, METH_VARARGS),
    METHOD(detach, METH_O),
    METHOD(connections, METH_O),
    METHOD(add_offer, METH_VARARGS),
    METHOD(withdraw_offer, METH_O),
    METHOD(run, METH_O),
    METHOD(wake, METH_NOARGS),
    METHOD(take_events, METH_NOARGS),
    METHOD(take_counters, METH_NOARGS),
    METHOD(answer, METH_VARARGS),
    {"close", (PyCFunction)server_close, METH_NOARGS, server_close_doc},
    {"abandon", (PyCFunction)server_abandon, METH_NOARGS, server_abandon_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject server_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.Server",
    .tp_doc = "The owner's end of all data connections of an engine. Thread-safe.",
    .tp_basicsize = sizeof(Server),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = server_new,
    .tp_dealloc = (destructor)server_dealloc,
    .tp_methods = server_methods,
};

/* ---- the module --------------------------------------------------------------------------- */

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

static PyMethodDef methods[] = {
    FAST(copy_one),
    FAST(copy_pieces),
    FAST(process_vm_write),
    FAST(process_vm_read),
    FAST(progress),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "transfer._native",
    .m_doc = "Compiled loops of the transfer engine.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    if (PyModule_AddType(module, &lane_type) < 0 || PyModule_AddType(module, &server_type) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
