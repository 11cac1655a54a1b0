/* Lane: the requester's end of a data connection
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
    bool embedded; /* it lies in its item */
    bool urgent;   /* bulk gives way to it; false once it has ended */
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
    Looks looks; /* for answers */
    bool urgent; /* it carries nothing else; set before its first job */
    Py_ssize_t in_flight;
    char evidence[EVIDENCE_BYTES];
    Input input;
    /* Whose turn it is to receive, guarded by the interpreter's lock: of the thread that leads, 0 if
     * none does, or else of the engine's thread, whose epoll waits for `interest`. */
    unsigned long leader;
    int epoll; /* -1 = it is in none */
    uint32_t interest;
} Lane;

static PyTypeObject lane_type;
static void forget_left_bulk(void);
static void rouse_left_bulk(void);

static bool gives_way(const Lane *lane)
{
    return !lane->urgent && is_beside_urgent();
}

/* Whether something urgent is under way right now that its bulk should not delay. */
static bool waits_for_urgent(const Lane *lane)
{
    int64_t now = now_ns();
    return gives_way(lane) && is_others() && any_urgent(now) && !has_turn(now);
}

/* How much one system call may move. */
static size_t step_of(bool courteous)
{
    if (!courteous)
        return STEP_BYTES;
    return has_turn(now_ns()) ? TURN_STEP_BYTES : SMALL_STEP_BYTES;
}

static void begin_urgent(Lane *lane, Job *job)
{
    job->urgent = lane->urgent;
    if (job->urgent)
        count_urgent();
}

static void end_urgent(Job *job)
{
    if (job->urgent)
        uncount_urgent();
    job->urgent = false;
}

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
        bool courteous = gives_way(lane);
        ssize_t sent = send_places(lane->input.fd, &nothing, &job->out,
                                   step_of(courteous));
        if (sent < 0) {
            break_lane(lane, "send failed", errno);
            return;
        }
        if (!job->out.nbytes)
            lane->sending = job->next;
        else if (!sent)
            return;
        if (courteous) {
            spend_turn((size_t)sent);
            return; /* one step at a time */
        }
    }
}

static void finish_first(Lane *lane, Finished *finished)
{
    Job *job = lane->first;
    end_urgent(job);
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

/* Receive until the socket is empty, or a turn's bytes have come. Returns whether any have. */
static bool receive_replies(Lane *lane, Finished *finished)
{
    bool courteous = gives_way(lane), any = false;
    size_t step = step_of(courteous), budget = (courteous ? 1 : 4) * step;
    int outcome = MORE;
    while (outcome == MORE && budget && !lane->evidence[0]) {
        size_t received;
        outcome = receive(&lane->input, lane->landing ? &lane->first->in : NULL, step, &received,
                          lane->local ? &lane->descriptor : NULL);
        if (outcome == ENDED)
            break_lane(lane, "closed by the other side", 0);
        else if (outcome == FAILED)
            break_lane(lane, "receive failed", errno);
        budget -= received < budget ? received : budget;
        any |= received > 0;
        if (courteous)
            spend_turn(received);
        parse_replies(lane, finished);
    }
    return any;
}

/* Whoever waits next, here or in an epoll: for no more than is still to come. */
static void expect_rest(Lane *lane)
{
    size_t remaining = lane->landing ? lane->first->in.nbytes : 0;
    set_low_water(&lane->input, bytes_to_sleep_for(&lane->looks, &lane->input, remaining));
}

/* Move what can be moved both ways, without waiting. */
static void move_lane(Lane *lane, int events, Finished *finished)
{
    pthread_mutex_lock(&lane->mutex);
    if (!lane->closed) {
        if (events & POLLOUT)
            send_jobs(lane);
        if (events & ~POLLOUT) {
            (void)receive_replies(lane, finished);
            expect_rest(lane);
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
    PyObject *item = job->item;
    if (job->descriptor >= 0)
        close(job->descriptor);
    end_urgent(job);
    if (!job->embedded)
        free(job);
    Py_DECREF(item);
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
    lane->descriptor = lane->epoll = -1;
    int domain = AF_UNSPEC;
    socklen_t size = sizeof domain;
    (void)getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
    lane->local = domain == AF_UNIX;
    lane->input.within_host = is_within_host(fd);
    return (PyObject *)lane;
}

/* Begin a request of n pieces, its table, its places and its note still to be filled in. The block is
 * the job, the places (one more for the header, one for a note or an answer's place), then the
 * header and the table. */
static void fill_job(Job *job, const Request *request, const char *token, size_t n)
{
    bool writes = request->kind == WRITE_REQUEST;
    size_t head_bytes = REQUEST_BYTES + 16 * n;
    uint8_t *head = (uint8_t *)&job->iovecs[n + 2];
    store_request(head, request, token);
    job->iovecs[0] = (struct iovec){head, head_bytes};
    size_t note = note_bytes(request);
    job->next = NULL;
    job->transfer_id = request->transfer_id;
    job->slice_idx = request->slice_idx;
    job->kind = request->kind;
    job->embedded = job->urgent = false;
    job->descriptor = -1;
    job->out = (Places){job->iovecs, writes ? n + 1 + (note > 0) : 1,
                        head_bytes + (writes ? request->nbytes + note : 0)};
    job->in = (Places){job->iovecs + 1, writes ? 0 : n, writes ? 0 : request->nbytes};
    if (job->kind == MAP_REQUEST) {
        job->iovecs[1] = (struct iovec){job->place, PLACE_BYTES};
        job->in = (Places){job->iovecs + 1, 1, PLACE_BYTES};
    }
    job->expected = job->in.nbytes;
}

/* What follows the last piece: the bytes live as long as the job. */
static void set_note(Job *job, size_t n, const char *note, size_t nbytes)
{
    if (nbytes)
        job->iovecs[n + 1] = (struct iovec){(void *)note, nbytes};
}

/* NULL with an exception set. */
static Job *new_job(const uint8_t *header, bool writes, size_t n, uint64_t nbytes,
                    const char *note, size_t given)
{
    Request request;
    load_request(&request, header);
    if (request.num_pieces != n || request.nbytes != nbytes || note_bytes(&request) != given ||
        writes != (request.kind == WRITE_REQUEST)) {
        PyErr_SetString(PyExc_ValueError, "the pieces or the note are not those of the header");
        return NULL;
    }
    size_t head_bytes = REQUEST_BYTES + 16 * n;
    Job *job = malloc(sizeof *job + (n + 2) * sizeof(struct iovec) + head_bytes + given);
    if (!job) {
        PyErr_NoMemory();
        return NULL;
    }
    fill_job(job, &request, (const char *)request.token, n);
    char *copy = (char *)&job->iovecs[n + 2] + head_bytes;
    memcpy(copy, note, given);
    set_note(job, n, copy, given);
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

/* Queue a job, under the mutex, and send it if it is small and its turn has come. False if the lane
 * is broken or closed. */
static bool queue_job(Lane *lane, Job *job, PyObject *item)
{
    if (lane->closed || lane->evidence[0])
        return false;
    job->item = Py_NewRef(item);
    if (lane->last)
        lane->last->next = job;
    else
        lane->first = job;
    lane->last = job;
    lane->in_flight++;
    begin_urgent(lane, job);
    if (!lane->sending) {
        lane->sending = job;
        /* A large one is for a thread that has no locks to hold meanwhile. */
        if (job->out.nbytes <= GIL_BYTES + 16 * IOVECS_MAX)
            send_jobs(lane);
    }
    return true;
}

PyDoc_STRVAR(lane_post_doc,
             "post(item, header, writes, base, ours, theirs, lengths, note=b'')\n--\n\n"
             "Send one request. Returns False if the lane is broken or closed.");

static PyObject *lane_post(Lane *lane, PyObject *const *args, Py_ssize_t count)
{
    uintptr_t base;
    Pieces pieces;
    char *header, *note = "";
    Py_ssize_t header_bytes, note_size = 0;
    if (check_count(count < 8 ? count : count - 1, 7, "post") ||
        PyBytes_AsStringAndSize(args[1], &header, &header_bytes) < 0 ||
        (count == 8 && PyBytes_AsStringAndSize(args[7], &note, &note_size) < 0))
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
    Job *job = new_job((const uint8_t *)header, writes, n, (uint64_t)pieces.nbytes, note,
                       (size_t)note_size);
    for (size_t i = 0; job && i < n; i++)
        set_piece(job, n, i, base + (uintptr_t)pieces.source[i], pieces.target[i],
                  pieces.lengths[i]);
    drop_pieces(&pieces);
    if (!job)
        return NULL;
    /* The interpreter's lock is kept: a small request is sent before another thread could have
     * used it. */
    lock_without_gil(&lane->mutex);
    bool taken = queue_job(lane, job, args[0]);
    pthread_mutex_unlock(&lane->mutex);
    if (!taken)
        free(job);
    return PyBool_FromLong(taken);
}

/* Send what the kernel takes now, without the interpreter's lock. Returns whether more is left. */
static bool push_jobs(Lane *lane)
{
    pthread_mutex_lock(&lane->mutex);
    if (!lane->closed)
        send_jobs(lane);
    bool unsent = lane->sending != NULL;
    pthread_mutex_unlock(&lane->mutex);
    return unsent;
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

/* Settle what a job carried, if that can be done here: 1. 0 if not, -1 with an exception. */
static int settle_job(Job *job);

/* Settle jobs that are in no queue any more, or make a list of them, and free them. */
static PyObject *hand_over(Job *job)
{
    PyObject *list = PyList_New(0);
    PyObject *kind = NULL, *value = NULL, *trace = NULL;
    while (job) {
        Job *next = job->next;
        int settled = list ? settle_job(job) : 0;
        if (settled < 0 && !kind) /* told at the end: the others have ended too */
            PyErr_Fetch(&kind, &value, &trace);
        else if (settled < 0)
            PyErr_Clear();
        PyObject *outcome = list && !settled ? outcome_of(job) : NULL;
        if (list && !settled && (!outcome || PyList_Append(list, outcome) < 0))
            Py_CLEAR(list);
        Py_XDECREF(outcome);
        free_job(job);
        job = next;
    }
    if (!kind)
        return list;
    Py_XDECREF(list);
    PyErr_Restore(kind, value, trace);
    return NULL;
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
    /* The child has none of them. */
    __atomic_store_n(&urgent_under_way, 0, __ATOMIC_RELAXED);
    forget_left_bulk();
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

JUST_A_LOOK static Py_ssize_t look_in_flight(const Lane *lane)
{
    return lane->in_flight;
}

JUST_A_LOOK static bool look_unsent(const Lane *lane)
{
    return lane->sending != NULL;
}

JUST_A_LOOK static bool look_evidence(const Lane *lane)
{
    return lane->evidence[0] != 0;
}

/* ---- whose turn it is to receive */

static void watch(Lane *lane, uint32_t interest)
{
    if (lane->epoll < 0 || lane->interest == interest)
        return;
    struct epoll_event event = {.events = interest, .data.fd = lane->input.fd};
    lane->interest = interest;
    (void)epoll_ctl(lane->epoll, EPOLL_CTL_MOD, lane->input.fd, &event);
}

/* Let the engine's thread move what is under way. */
static void watch_all(Lane *lane)
{
    watch(lane, EPOLLIN | (look_unsent(lane) ? EPOLLOUT : 0));
}

/* Begin to lead, unless somebody else does or there is nothing to receive. */
static bool claim(Lane *lane)
{
    unsigned long me = PyThread_get_thread_ident();
    if ((lane->leader && lane->leader != me) || !look_in_flight(lane))
        return false;
    lane->leader = me;
    watch(lane, 0);
    return true;
}

/* End a lead. Returns whether what is under way is left alone for now: bulk, which most likely the
 * next one to wait will move, while the engine's thread would need the interpreter for it. */
static bool release_lead(Lane *lane)
{
    bool left = !lane->urgent && lane->leader && look_in_flight(lane);
    lane->leader = 0;
    if (!left && look_in_flight(lane))
        watch_all(lane);
    return left;
}

/* So many small ones may wait for a thread to wait for them. */
#define UNATTENDED_MAX 4

/* Something was posted. Returns whether the engine's thread should see to it soon. */
static bool attend_to_posted(Lane *lane)
{
    if (lane->leader) {
        /* It sleeps, and looks after all that is to be received, but not for room to send. */
        if (look_unsent(lane) && lane->leader != PyThread_get_thread_ident())
            watch(lane, EPOLLOUT);
        return false;
    }
    /* Most likely somebody is about to wait for it, and to lead: the engine's thread would only be
     * woken in vain. */
    if (look_in_flight(lane) == 1)
        watch(lane, 0);
    return look_in_flight(lane) > UNATTENDED_MAX;
}

PyDoc_STRVAR(lane_bind_doc,
             "bind(epoll, change)\n--\n\nIts descriptor is in an epoll now, and waited for in it to "
             "be readable. (`change` is for lanes in Python.)");

static PyObject *lane_bind(Lane *lane, PyObject *const *args, Py_ssize_t count)
{
    if (check_count(count, 2, "bind") < 0)
        return NULL;
    long epoll = PyLong_AsLong(args[0]);
    if (epoll == -1 && PyErr_Occurred())
        return NULL;
    lane->epoll = (int)epoll;
    lane->interest = EPOLLIN;
    Py_RETURN_NONE;
}

static PyObject *lane_unbind(Lane *lane, PyObject *ignored)
{
    (void)ignored;
    lane->epoll = -1;
    Py_RETURN_NONE;
}

static PyObject *lane_claim(Lane *lane, PyObject *ignored)
{
    (void)ignored;
    return PyBool_FromLong(claim(lane));
}

static PyObject *lane_leave(Lane *lane, PyObject *ident)
{
    unsigned long leader = PyLong_AsUnsignedLong(ident);
    if (leader == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(lane->leader == leader && release_lead(lane));
}

static PyObject *lane_attend(Lane *lane, PyObject *ignored)
{
    (void)ignored;
    rouse_left_bulk();
    if (!lane->leader)
        watch_all(lane);
    Py_RETURN_NONE;
}

static PyObject *lane_gives_way(Lane *lane, PyObject *ignored)
{
    (void)ignored;
    bool waits = !lane->leader && gives_way(lane) && give_way_ns(now_ns()) > 0;
    if (waits)
        watch(lane, 0);
    return PyBool_FromLong(waits);
}

static PyObject *lane_watch_all(Lane *lane, PyObject *ignored)
{
    (void)ignored;
    watch_all(lane);
    Py_RETURN_NONE;
}

static PyObject *lane_attend_to_posted(Lane *lane, PyObject *ignored)
{
    (void)ignored;
    return PyBool_FromLong(attend_to_posted(lane));
}

static PyObject *lane_leader(Lane *lane, void *ignored)
{
    (void)ignored;
    return PyLong_FromUnsignedLong(lane->leader);
}

static PyMethodDef lane_methods[] = {
    {"post", (PyCFunction)(void (*)(void))lane_post, METH_FASTCALL, lane_post_doc},
    {"close", (PyCFunction)lane_close, METH_NOARGS, lane_close_doc},
    {"abandon", (PyCFunction)lane_abandon, METH_NOARGS, lane_abandon_doc},
    {"bind", (PyCFunction)(void (*)(void))lane_bind, METH_FASTCALL, lane_bind_doc},
    {"unbind", (PyCFunction)lane_unbind, METH_NOARGS, "unbind()\n--\n\nIt is in none any more."},
    {"claim", (PyCFunction)lane_claim, METH_NOARGS,
     "claim()\n--\n\nBegin to lead; False if another thread does, or nothing is under way."},
    {"leave", (PyCFunction)lane_leave, METH_O,
     "leave(leader)\n--\n\nEnd this lead: the engine's thread sees to what is under way. True if "
     "it should do so soon (bulk), False if it does so now."},
    {"attend", (PyCFunction)lane_attend, METH_NOARGS,
     "attend()\n--\n\nHave the engine's thread see to it, if nobody leads."},
    {"gives_way", (PyCFunction)lane_gives_way, METH_NOARGS,
     "gives_way()\n--\n\nWhether it carries bulk that should leave the core to what is urgent. "
     "Then nobody sees to it until `attend`."},
    {"watch_all", (PyCFunction)lane_watch_all, METH_NOARGS,
     "watch_all()\n--\n\nHave the engine's thread see to it."},
    {"attend_to_posted", (PyCFunction)lane_attend_to_posted, METH_NOARGS,
     "attend_to_posted()\n--\n\nSomething was posted; returns whether the engine's thread should "
     "see to it soon."},
    {"fileno", (PyCFunction)lane_fileno, METH_NOARGS, "fileno()\n--\n\nThe socket, -1 if closed."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef lane_properties[] = {
    {"evidence", (getter)lane_evidence, NULL, "Why it can be used no more, None if it can.", NULL},
    {"in_flight", (getter)lane_in_flight, NULL, "Requests without an answer.", NULL},
    {"leader", (getter)lane_leader, NULL, "The thread that leads it, 0 = none.", NULL},
    {"unsent", (getter)lane_unsent, NULL, "Whether something waits for the kernel.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef lane_members[] = {
    {"urgent", T_BOOL, offsetof(Lane, urgent), 0,
     "Whether bulk gives way to its requests. Set before the first."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject lane_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transfer._native.Lane",
    .tp_doc = "The requester's end of a data connection. Owns the descriptor. Thread-safe.",
    .tp_basicsize = sizeof(Lane),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = lane_new,
    .tp_dealloc = (destructor)lane_dealloc,
    .tp_methods = lane_methods,
    .tp_members = lane_members,
    .tp_getset = lane_properties,
};
