/* What Python calls of the server. */

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
    server->last_note = &server->first_note;
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
    connection->input.within_host = is_within_host(fd);
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
        /* What came is somebody's of this process, who needs a core for it. */
        if (told)
            server->looked_for = 0;
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
    case NOTES_EVENT:
        return Py_BuildValue("iKKO", event->kind, (unsigned long long)event->peer_id,
                             (unsigned long long)event->connection_id, Py_None);
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

PyDoc_STRVAR(take_notes_doc, "take_notes()\n--\n\nReturn what peers have left with writes since the "
                             "last call, in the order of arrival: [(name, when, payload)].");

static PyObject *server_take_notes(Server *server, PyObject *ignored)
{
    (void)ignored;
    lock_server(server);
    Note *note = server->first_note;
    server->first_note = NULL;
    server->last_note = &server->first_note;
    server->untold_notes = server->untold_bytes = 0;
    unlock_server(server);
    PyObject *list = PyList_New(0);
    while (note) {
        Note *next = note->next;
        PyObject *tuple =
            list ? Py_BuildValue("s#Ly#", note->text, (Py_ssize_t)note->name_bytes,
                                 (long long)note->stamp, note->text + note->name_bytes + 1,
                                 (Py_ssize_t)note->nbytes)
                 : NULL;
        if (list && (!tuple || PyList_Append(list, tuple) < 0))
            Py_CLEAR(list);
        Py_XDECREF(tuple);
        free(note);
        note = next;
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
    for (Note *note = server->first_note, *next; note; note = next) {
        next = note->next;
        free(note);
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
    METHOD(take_notes, METH_NOARGS),
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
