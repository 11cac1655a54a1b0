/* Sleeping until a lane is ready, and moving the bytes of several. */

#define LANES_MAX 64

/* Whether a lane waits for nothing but an answer that looking for may save a sleep, and has lately.
 * `yields`: the other side may need this core for it. */
static bool may_look_for_answer(Lane *lane, bool *yields)
{
    pthread_mutex_lock(&lane->mutex);
    bool may = !lane->closed && lane->first && !lane->sending;
    bool small = may && lane->first->expected <= LOOK_BYTES_MAX;
    if (may && !small)
        may = lane->input.within_host && !gives_way(lane) &&
              !shares_core(&lane->looks, lane->input.fd);
    may = may && may_look(&lane->looks);
    *yields = may && small && shares_core(&lane->looks, lane->input.fd);
    pthread_mutex_unlock(&lane->mutex);
    return may;
}

/* Take what is there. Returns whether anything was. */
static bool take_answer(Lane *lane, Finished *finished)
{
    pthread_mutex_lock(&lane->mutex);
    bool any = !lane->closed && receive_replies(lane, finished);
    pthread_mutex_unlock(&lane->mutex);
    return any;
}

/* Look for an answer, until nothing of it comes. Returns whether all of it came, or the lane broke. */
static bool look_for_answer(Lane *lane, bool yields, Finished *finished)
{
    int64_t look = lane->urgent ? look_in_stream_ns() : LOOK_NS, end = now_ns() + look;
    bool over;
    do {
        if (take_answer(lane, finished))
            end = now_ns() + look;
        over = finished->first || lane->evidence[0];
        if (!over && yields)
            sched_yield();
    } while (!over && now_ns() < end);
    pthread_mutex_lock(&lane->mutex);
    note_look(&lane->looks, over, end);
    if (!lane->closed)
        expect_rest(lane);
    pthread_mutex_unlock(&lane->mutex);
    return over;
}

/* Whether all of them carry bulk, while something urgent is about. */
static bool all_give_way(Lane *const *lanes, int count)
{
    for (int i = 0; i < count; i++)
        if (!gives_way(lanes[i]))
            return false;
    return true;
}

/* Sleep until a lane is ready, move bytes, until something has finished or time is over. */
static int progress_lanes(Lane **lanes, int count, int64_t timeout_ns, Finished *finished)
{
    struct pollfd polled[LANES_MAX];
    int64_t deadline = timeout_ns ? now_ns() + timeout_ns : 0;
    bool yields;
    if (timeout_ns && count == 1 && may_look_for_answer(lanes[0], &yields) &&
        look_for_answer(lanes[0], yields, finished))
        return 0;
    for (;;) {
        int64_t left = timeout_ns ? deadline - now_ns() : 0;
        if (left < 0)
            left = 0;
        /* The engine's thread (it does not wait) has others to look after. */
        if (timeout_ns && all_give_way(lanes, count) && give_way(lanes, count, finished, deadline))
            return 0;
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
        bool broken = usable < count, moved = false;
        for (int i = 0; i < count; i++) {
            if (polled[i].fd < 0)
                continue;
            leave_poll(lanes[i]);
            if (ready > 0 && polled[i].revents && !(moved && waits_for_urgent(lanes[i]))) {
                moved = true;
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
    Courtesy courtesy;
    bool bulk = false;
    for (Py_ssize_t i = 0; i < n; i++)
        bulk |= !lanes[i]->urgent;
    int error;
    Py_BEGIN_ALLOW_THREADS
    begin_courtesy(&courtesy, bulk);
    error = progress_lanes(lanes, (int)n, (int64_t)(timeout_s * 1e9), &finished);
    if (finished.first && timeout_s > 0 && all_give_way(lanes, (int)n))
        await_gap();
    end_courtesy(&courtesy);
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

PyDoc_STRVAR(num_urgent_doc, "num_urgent()\n--\n\nReturn how many urgent requests of this process have "
                             "no answer.");

static PyObject *num_urgent(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    return PyLong_FromLong(__atomic_load_n(&urgent_under_way, __ATOMIC_RELAXED));
}
