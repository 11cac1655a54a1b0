/* One data connection at the owner's end, and whose turn it is. */

static void free_connection(Connection *connection)
{
    if (connection->input.fd >= 0)
        close(connection->input.fd);
    free(connection->table);
    free(connection->iovecs);
    free(connection->note);
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
        request->flags & ~(HAS_IMMEDIATE | HAS_NOTE))
        return "malformed: a request that makes no sense";
    if (request->flags & HAS_NOTE &&
        (request->kind != WRITE_REQUEST || request->flags & HAS_IMMEDIATE ||
         request->immediate == 0 || request->immediate > NOTE_BYTES_MAX))
        return "malformed: a note that makes no sense";
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

/* Room for the table and places of a request, and for its note. */
static const char *make_room(Connection *connection)
{
    size_t note = note_bytes(&connection->request);
    if (note > connection->note_room) {
        uint8_t *grown = realloc(connection->note, note);
        if (!grown)
            return "out of memory";
        connection->note = grown;
        connection->note_room = note;
    }
    size_t n = connection->request.num_pieces + (note > 0);
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
    size_t note = note_bytes(&connection->request);
    if (note) { /* lands behind the last piece */
        connection->iovecs[n] = (struct iovec){connection->note, note};
        connection->places.count++;
        connection->places.nbytes += note;
    }
    return status;
}

static void discard_payload(Connection *connection, int status)
{
    connection->status = status;
    connection->offer = NULL;
    connection->stage = DISCARDING;
    connection->places.nbytes =
        connection->request.kind == WRITE_REQUEST
            ? connection->request.nbytes + note_bytes(&connection->request)
            : 0;
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
    if (finish_slice(connection)) {
        if (request->flags & HAS_IMMEDIATE && !tell(server, connection, IMMEDIATE_EVENT, false, ""))
            return "out of memory";
        if (request->flags & HAS_NOTE && !keep_note(server, connection))
            return "out of memory";
    }
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
    bool bulk = connection->request.nbytes > SMALL_BYTES;
    size_t step = bulk ? step_beside_small(&server->small) : SMALL_STEP_BYTES, budget = step;
    for (;;) {
        bool waiting;
        const char *problem = advance(server, connection, &waiting);
        size_t before = budget;
        if (!problem)
            problem = flush(connection, step, &budget);
        spend_small_turn(&server->small, before - budget);
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
        spend_small_turn(&server->small, bulk ? received : 0);
        if (outcome == DRY)
            budget = 0; /* handle what came, then wait for more */
    }
}

/* Whether it is worth looking for a connection's next bytes. A payload is not looked for beside
 * small requests: they may be somebody's who needs this core. */
static bool is_looked_for(const Server *server, const Connection *connection)
{
    return connection->request.nbytes <= LOOK_BYTES_MAX ||
           (connection->input.within_host && now_ns() - server->small.served_at > SMALL_MEMORY_NS);
}

/* Before a sleep: what should be there before it ends. */
static void expect_landing(Connection *connection)
{
    size_t remaining = connection->stage == LANDING ? connection->places.nbytes : 0;
    set_low_water(&connection->input,
                  bytes_to_sleep_for(&connection->looks, &connection->input, remaining));
}

static void update_interest(Server *server, Connection *connection)
{
    Input *input = &connection->input;
    bool lands = connection->stage == LANDING;
    /* What is looked for first sleeps later; but never for more than is to come. */
    if (!lands || !is_looked_for(server, connection) ||
        (size_t)input->low_water > connection->places.nbytes)
        expect_landing(connection);
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

/* Look for what comes next. Returns as epoll_wait does. */
static int look_for_next(Server *server, struct epoll_event *events)
{
    bool shares = shares_core(&server->looks, server->looked_fd);
    if (are_small_streaming(&server->small) && leave_shared_core(&server->changes, shares)) {
        server->looks.num_asked = 0;
        shares = false;
    }
    if (shares || !may_look(&server->looks))
        return 0;
    int n;
    int64_t end = now_ns() + LOOK_NS, until = small_expected_until(&server->small);
    if (end < until)
        end = until;
    do
        n = epoll_wait(server->epoll, events, EVENTS_MAX, 0);
    while (!n && now_ns() < end);
    note_look(&server->looks, n > 0, end);
    return n;
}

/* Sleep until a connection is ready. Whoever sent something short does so again as soon as it has
 * the answer, most likely: so it is looked for first, unless that one needs this core for it. */
static int await_ready(Server *server, struct epoll_event *events, int timeout_ms)
{
    int n = 0;
    if (server->looked_for && timeout_ms) {
        n = look_for_next(server, events);
        if (!n) {
            lock_between_turns(server);
            Connection *connection = find_connection(server, server->looked_for);
            if (connection)
                expect_landing(connection);
            pthread_mutex_unlock(&server->mutex);
        }
    }
    server->looked_for = 0;
    server->served_small = false;
    return n ? n : epoll_wait(server->epoll, events, EVENTS_MAX, timeout_ms);
}

/* Of what is not small the far shorter goes first, within bounds: somebody waits for a request of
 * 256 KiB, most likely, and beside one of 4 MiB it has come to its end soon. */
#define SHORT_PART 4
#define PASSED_MAX 64

static bool is_passed_over(const Server *server, const Connection *connection)
{
    return server->num_turns - connection->turn >= PASSED_MAX;
}

/* Which of two connections that carry bulk is served first: else the one that has waited longest. */
static bool precedes(const Server *server, const Connection *one, const Connection *other)
{
    uint64_t nbytes = one->request.nbytes, others = other->request.nbytes;
    if (nbytes <= others / SHORT_PART && !is_passed_over(server, other))
        return true;
    if (others <= nbytes / SHORT_PART && !is_passed_over(server, one))
        return false;
    return one->turn < other->turn;
}

/* One sleep and what it woke up for: everybody whose last request was small, then one of the
 * others. So a small request waits for one turn of bulk at most, however many connections carry
 * it. Returns 0 or an errno. */
static int run_once(Server *server, int timeout_ms, bool *woken)
{
    struct epoll_event events[EVENTS_MAX];
    int n = await_ready(server, events, timeout_ms);
    if (n < 0)
        return errno;
    uint64_t chosen = 0;
    uint32_t chosen_events = 0;
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
            server->served_small = true;
            server->looked_for = connection->id;
            server->looked_fd = connection->input.fd;
            note_small(&server->small);
            serve_ready(server, connection, events[i].events);
        } else if (connection) {
            const Connection *other = chosen ? find_connection(server, chosen) : NULL;
            if (!other || precedes(server, connection, other)) {
                chosen = connection->id;
                chosen_events = events[i].events;
            }
        }
        pthread_mutex_unlock(&server->mutex);
    }
    if (!chosen)
        return 0;
    /* On a machine of both sides, whoever was just answered may wait for this very core. */
    if (server->served_small)
        sched_yield();
    lock_between_turns(server);
    Connection *connection = find_connection(server, chosen);
    if (connection) {
        connection->turn = ++server->num_turns;
        bool streams = now_ns() < small_expected_until(&server->small);
        if (!server->served_small && (streams || is_looked_for(server, connection))) {
            server->looked_for = connection->id;
            if (!streams)
                server->looked_fd = connection->input.fd;
        }
        serve_ready(server, connection, chosen_events);
    }
    pthread_mutex_unlock(&server->mutex);
    return 0;
}
