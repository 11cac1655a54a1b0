/* A line of batches of calls on a file, and the threads that make the calls.
 *
 *   line     [ batch a: 3 of 96 calls taken ] [ batch b: 0 of 8 ] ...
 *   threads  take the next call of the first batch, make it, take the next
 *
 * They wait and work without the interpreter, and come back to it with a batch that has ended, or
 * because they are called to other work. So the disk always has a call of each of them, whatever
 * else the interpreter is busy with. What is short is ended before what comes behind it is begun;
 * what is long lets the others have a turn. */

enum { CALL_COLUMNS = 5 };

typedef struct Batch {
    struct Batch *behind;
    long long id;
    FileCalls calls;
    int64_t next; /* the first call that nobody has taken */
    int running;
    Py_ssize_t turn; /* calls until it goes behind the others */
    CallEnd end;
    Py_buffer views[CALL_COLUMNS];
} CallBatch;

typedef struct {
    bool moves; /* a thread is at it, and writes */
    int64_t first, last; /* its calls of the batch */
    int64_t low, high;
} Flight;

typedef struct Held {
    struct Held *other;
    int64_t low, high;
} Held;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t lock;
    pthread_cond_t work;  /* there is something to take, or somebody is called */
    pthread_cond_t moved; /* a call has ended while a run of blocks was wanted */
    CallBatch *first, *last; /* those of which calls are left */
    int64_t left;            /* calls of all of them */
    Py_ssize_t num_threads;
    Flight *flights; /* of each thread */
    Held *held;      /* runs of blocks that no call may write to */
    int num_waiting, num_called;
    bool closed;
} CallLine;

enum { SHORT_CALLS = 4 }; /* of each thread: what has no more left is ended first */
/* So many that lie behind one another in the file are made as one; of all threads together. */
enum { RUN_CALLS = 4, RUNS_CALLS = 16 };

static void free_batch(CallBatch *batch)
{
    for (int i = 0; i < CALL_COLUMNS; i++)
        PyBuffer_Release(&batch->views[i]);
    PyMem_Free(batch);
}

static void leave_line(CallLine *line, CallBatch *batch)
{
    CallBatch *before = NULL;
    for (CallBatch *other = line->first; other != NULL; before = other, other = other->behind) {
        if (other != batch)
            continue;
        if (before == NULL)
            line->first = batch->behind;
        else
            before->behind = batch->behind;
        if (line->last == batch)
            line->last = before;
        batch->behind = NULL;
        return;
    }
}

static void join_line(CallLine *line, CallBatch *batch)
{
    batch->behind = NULL;
    batch->turn = line->num_threads;
    if (line->last == NULL)
        line->first = batch;
    else
        line->last->behind = batch;
    line->last = batch;
}

static bool is_held(const CallLine *line, const CallBatch *batch, int64_t index)
{
    if (!batch->calls.writes)
        return false;
    int64_t low = batch->calls.lows[index], high = batch->calls.highs[index];
    for (const Held *held = line->held; held != NULL; held = held->other)
        if (held->low < high && low < held->high)
            return true;
    return false;
}

/* How many calls to make as one. The last ones are few at a time, for every thread to have some. */
static int64_t calls_of_run(const CallLine *line)
{
    int64_t share = (line->left + line->num_threads - 1) / line->num_threads;
    int64_t most = RUNS_CALLS / line->num_threads;
    if (most > RUN_CALLS)
        most = RUN_CALLS;
    return most < share ? most : share;
}

/* Take the next calls, several if they are one run of the file: a disk has less to do for it, and so
 * has whoever makes them. The batch that they are of, or NULL if there are none. Under the lock. */
static CallBatch *take_calls(CallLine *line, Flight *flight)
{
    CallBatch *batch = line->first;
    while (batch != NULL && is_held(line, batch, batch->next))
        batch = batch->behind;
    if (batch == NULL)
        return NULL;
    const FileCalls *calls = &batch->calls;
    int64_t first = batch->next, last = first + 1, end = first + calls_of_run(line);
    while (last < calls->num_calls && last < end &&
           calls->lows[last] == calls->highs[last - 1] && !is_held(line, batch, last))
        last++;
    batch->next = last;
    line->left -= last - first;
    batch->running++;
    *flight = (Flight){.moves = calls->writes, .first = first, .last = last,
                       .low = calls->lows[first], .high = calls->highs[last - 1]};
    int64_t left = calls->num_calls - last;
    batch->turn -= last - first;
    if (left == 0) {
        leave_line(line, batch);
    } else if (left > SHORT_CALLS * line->num_threads && batch->turn <= 0) {
        leave_line(line, batch);
        join_line(line, batch);
    }
    return batch;
}

/* Let nobody take any more of a batch. Under the lock. */
static void drop_calls(CallLine *line, CallBatch *batch)
{
    if (batch->next < batch->calls.num_calls)
        leave_line(line, batch);
    line->left -= batch->calls.num_calls - batch->next;
    batch->next = batch->calls.num_calls;
}

/* Note how a call went; whether the batch has ended with it. Under the lock. */
static bool end_call(CallLine *line, CallBatch *batch, CallEnd end)
{
    batch->running--;
    if (end.outcome != CALLS_OK && batch->end.outcome == CALLS_OK) {
        batch->end = end;
        drop_calls(line, batch);
    }
    return batch->running == 0 && batch->next == batch->calls.num_calls;
}

/* Make calls until a batch has ended with one, which is returned, or this thread is called. */
static CallBatch *work_in_line(CallLine *line, Py_ssize_t lane)
{
    Flight *flight = &line->flights[lane];
    CallBatch *ended = NULL;
    pthread_mutex_lock(&line->lock);
    while (ended == NULL) {
        if (line->num_called > 0) {
            line->num_called--;
            break;
        }
        CallBatch *batch = take_calls(line, flight);
        if (batch == NULL) {
            if (line->closed)
                break;
            line->num_waiting++;
            pthread_cond_wait(&line->work, &line->lock);
            line->num_waiting--;
            continue;
        }
        pthread_mutex_unlock(&line->lock);
        CallEnd end = make_calls(&batch->calls, flight->first, flight->last);
        pthread_mutex_lock(&line->lock);
        flight->moves = false;
        if (line->held != NULL)
            pthread_cond_broadcast(&line->moved);
        if (end_call(line, batch, end))
            ended = batch;
    }
    pthread_mutex_unlock(&line->lock);
    return ended;
}

static int check_batch(const Py_buffer *views, CallBatch *batch)
{
    enum { OFFSETS, LENGTHS, BOUNDS, LOWS, HIGHS };
    FileCalls *calls = &batch->calls;
    Py_ssize_t pieces = views[LENGTHS].shape[0];
    calls->offsets = views[OFFSETS].buf;
    calls->lengths = views[LENGTHS].buf;
    calls->bounds = views[BOUNDS].buf;
    calls->lows = views[LOWS].buf;
    calls->highs = views[HIGHS].buf;
    calls->num_calls = views[LOWS].shape[0];
    bool right = views[OFFSETS].shape[0] == pieces && calls->num_calls > 0 &&
                 views[HIGHS].shape[0] == calls->num_calls &&
                 views[BOUNDS].shape[0] == calls->num_calls + 1 && calls->block > 0;
    for (Py_ssize_t i = 0; right && i < calls->num_calls; i++)
        right = calls->bounds[i] >= 0 && calls->bounds[i] <= calls->bounds[i + 1] &&
                calls->bounds[i + 1] <= pieces;
    for (Py_ssize_t i = 0; right && i < pieces; i++)
        right = calls->lengths[i] > 0;
    if (!right)
        PyErr_SetString(PyExc_ValueError, "columns of a batch of calls do not fit one another");
    return right ? 0 : -1;
}

PyDoc_STRVAR(call_line_put_doc,
             "put(id, fd, writes, block, file_bytes, deadline_ns, memory,\n"
             "    offsets, lengths, bounds, lows, highs)\n--\n\n"
             "Have a batch of calls made. Memory and file must stay until it has ended.");

static PyObject *call_line_put(CallLine *line, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 12, "put"))
        return NULL;
    CallBatch *batch = PyMem_Calloc(1, sizeof *batch);
    if (batch == NULL)
        return PyErr_NoMemory();
    batch->id = PyLong_AsLongLong(args[0]);
    batch->calls = (FileCalls){.fd = (int)PyLong_AsLong(args[1]),
                               .writes = PyObject_IsTrue(args[2]) == 1,
                               .block = PyLong_AsLongLong(args[3]),
                               .file_bytes = PyLong_AsLongLong(args[4]),
                               .deadline_ns = PyLong_AsLongLong(args[5])};
    bool right = !PyErr_Occurred() && take_address(args[6], &batch->calls.memory) == 0;
    for (int i = 0; right && i < CALL_COLUMNS; i++)
        right = take_int64(args[7 + i], &batch->views[i], "a column of calls") >= 0;
    if (!right || check_batch(batch->views, batch) < 0) {
        free_batch(batch);
        return NULL;
    }
    lock_without_gil(&line->lock);
    join_line(line, batch);
    line->left += batch->calls.num_calls;
    if (line->num_waiting > 0 && batch->calls.num_calls > 1)
        pthread_cond_broadcast(&line->work);
    else
        pthread_cond_signal(&line->work);
    pthread_mutex_unlock(&line->lock);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(call_line_take_doc,
             "take(lane)\n--\n\n"
             "Make calls, in thread `lane`, until a batch has ended with one or this thread is\n"
             "called. Return (id, outcome, offset in the file, errno or size) or None.");

static PyObject *call_line_take(CallLine *line, PyObject *number)
{
    Py_ssize_t lane = PyLong_AsSsize_t(number);
    if (lane < 0 || lane >= line->num_threads) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no such thread");
        return NULL;
    }
    CallBatch *ended;
    Py_BEGIN_ALLOW_THREADS
    ended = work_in_line(line, lane);
    Py_END_ALLOW_THREADS
    if (ended == NULL)
        Py_RETURN_NONE;
    PyObject *found = Py_BuildValue("(LiLL)", ended->id, ended->end.outcome,
                                    (long long)ended->end.at, (long long)ended->end.detail);
    free_batch(ended);
    return found;
}

PyDoc_STRVAR(call_line_stop_doc,
             "stop(id)\n--\n\n"
             "Let no more calls of a batch be made. Whether it has ended by that; else the thread\n"
             "that makes its last call says so, or has.");

static PyObject *call_line_stop(CallLine *line, PyObject *number)
{
    long long id = PyLong_AsLongLong(number);
    if (id == -1 && PyErr_Occurred())
        return NULL;
    lock_without_gil(&line->lock);
    CallBatch *batch = line->first;
    while (batch != NULL && batch->id != id)
        batch = batch->behind;
    bool ended = false;
    if (batch != NULL) {
        drop_calls(line, batch);
        batch->end = call_end(CALLS_STOPPED, 0, 0);
        ended = batch->running == 0;
    }
    pthread_mutex_unlock(&line->lock);
    if (ended)
        free_batch(batch);
    return PyBool_FromLong(ended);
}

PyDoc_STRVAR(call_line_call_doc, "call()\n--\n\nHave one thread come back from `take`.");

static PyObject *call_line_call(CallLine *line, PyObject *nothing)
{
    (void)nothing;
    lock_without_gil(&line->lock);
    line->num_called++;
    pthread_cond_signal(&line->work);
    pthread_mutex_unlock(&line->lock);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(call_line_close_doc,
             "close()\n--\n\nHave all threads come back from `take` that find nothing to do.");

static PyObject *call_line_close(CallLine *line, PyObject *nothing)
{
    (void)nothing;
    lock_without_gil(&line->lock);
    line->closed = true;
    pthread_cond_broadcast(&line->work);
    pthread_mutex_unlock(&line->lock);
    Py_RETURN_NONE;
}

static bool flies_over(const CallLine *line, int64_t low, int64_t high)
{
    for (Py_ssize_t i = 0; i < line->num_threads; i++) {
        const Flight *flight = &line->flights[i];
        if (flight->moves && flight->low < high && low < flight->high)
            return true;
    }
    return false;
}

static void let_go(CallLine *line, int64_t low, int64_t high)
{
    for (Held **at = &line->held; *at != NULL; at = &(*at)->other) {
        Held *held = *at;
        if (held->low == low && held->high == high) {
            *at = held->other;
            PyMem_RawFree(held);
            break;
        }
    }
    pthread_cond_broadcast(&line->work);
}

PyDoc_STRVAR(call_line_hold_doc,
             "hold(low, high, deadline_ns)\n--\n\n"
             "Have no call write to these bytes of the file until `let_go`; wait for those that\n"
             "are being made. False if they did not end in time: then nothing is held.");

static PyObject *call_line_hold(CallLine *line, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 3, "hold"))
        return NULL;
    int64_t low = PyLong_AsLongLong(args[0]), high = PyLong_AsLongLong(args[1]);
    int64_t deadline_ns = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    Held *held = PyMem_RawMalloc(sizeof *held);
    if (held == NULL)
        return PyErr_NoMemory();
    struct timespec until = {.tv_sec = deadline_ns / 1000000000,
                             .tv_nsec = deadline_ns % 1000000000};
    bool free_now;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&line->lock);
    *held = (Held){.other = line->held, .low = low, .high = high};
    line->held = held;
    int waited = 0;
    while (!(free_now = !flies_over(line, low, high)) && waited == 0)
        waited = pthread_cond_timedwait(&line->moved, &line->lock, &until);
    if (!free_now)
        let_go(line, low, high);
    pthread_mutex_unlock(&line->lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(free_now);
}

PyDoc_STRVAR(call_line_let_go_doc, "let_go(low, high)\n--\n\nUndo `hold`.");

static PyObject *call_line_let_go(CallLine *line, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 2, "let_go"))
        return NULL;
    int64_t low = PyLong_AsLongLong(args[0]), high = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    lock_without_gil(&line->lock);
    let_go(line, low, high);
    pthread_mutex_unlock(&line->lock);
    Py_RETURN_NONE;
}

static PyObject *call_line_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"num_threads", NULL};
    Py_ssize_t num_threads;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n", names, &num_threads))
        return NULL;
    if (num_threads < 1 || num_threads > 1 << 10) {
        PyErr_SetString(PyExc_ValueError, "one thread at least, 1024 at most");
        return NULL;
    }
    CallLine *line = (CallLine *)type->tp_alloc(type, 0);
    if (line == NULL)
        return NULL;
    line->num_threads = num_threads;
    line->flights = PyMem_Calloc((size_t)num_threads, sizeof *line->flights);
    if (line->flights == NULL) {
        Py_DECREF(line);
        return PyErr_NoMemory();
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&line->lock, NULL);
    pthread_cond_init(&line->work, NULL);
    pthread_cond_init(&line->moved, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return (PyObject *)line;
}

/* No thread is in there any more: each has a reference. In a forked child the lock may be taken for
 * ever, by a thread that is not there. */
static void call_line_dealloc(CallLine *line)
{
    while (line->first != NULL) {
        CallBatch *batch = line->first;
        leave_line(line, batch);
        free_batch(batch);
    }
    PyMem_Free(line->flights);
    Py_TYPE(line)->tp_free((PyObject *)line);
}

static PyMethodDef call_line_methods[] = {
    {"put", (PyCFunction)(void (*)(void))call_line_put, METH_FASTCALL, call_line_put_doc},
    {"take", (PyCFunction)call_line_take, METH_O, call_line_take_doc},
    {"stop", (PyCFunction)call_line_stop, METH_O, call_line_stop_doc},
    {"call", (PyCFunction)call_line_call, METH_NOARGS, call_line_call_doc},
    {"close", (PyCFunction)call_line_close, METH_NOARGS, call_line_close_doc},
    {"hold", (PyCFunction)(void (*)(void))call_line_hold, METH_FASTCALL, call_line_hold_doc},
    {"let_go", (PyCFunction)(void (*)(void))call_line_let_go, METH_FASTCALL, call_line_let_go_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject call_line_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.CallLine",
    .tp_basicsize = sizeof(CallLine),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = PyDoc_STR("Batches of calls on files, and the threads that make them."),
    .tp_new = call_line_new,
    .tp_dealloc = (destructor)call_line_dealloc,
    .tp_methods = call_line_methods,
};
