/* Which slices of a peer's writes are in place: sending one twice is harmless. */

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
