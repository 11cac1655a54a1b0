/* What Python gives: arrays of int64, addresses, numbers of arguments. */

/* Below this many bytes a copy is over before another thread could have used the lock. */
#define GIL_BYTES (64 << 10)
/* Elements of one vectored system call (the kernel's UIO_MAXIOV is 1024). */
#define IOVECS_MAX 512

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

/* Take the lock; whoever waits for it meanwhile lets the interpreter run. */
static void lock_without_gil(pthread_mutex_t *mutex)
{
    if (pthread_mutex_trylock(mutex) == 0)
        return;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(mutex);
    Py_END_ALLOW_THREADS
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
