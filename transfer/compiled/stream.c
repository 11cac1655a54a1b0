/* Bytes on data connections, whose layout `wire.py` describes: sent from and received into lists
 * of places. */

#define MAGIC 0x4D54
#define REQUEST_BYTES 60
#define REPLY_BYTES 24
#define TOKEN_BYTES 16
#define PLACE_BYTES 16
#define HAS_IMMEDIATE 1
/* A note of `immediate` bytes follows the payload. */
#define HAS_NOTE 2
#define NOTE_BYTES_MAX (64 << 10)
enum { WRITE_REQUEST = 1, READ_REQUEST = 2, MAP_REQUEST = 3 };
enum { OK = 0, UNKNOWN = 1, NO_RIGHT = 2, OUT_OF_BOUNDS = 3, GONE = 4 };
enum { MAY_READ = 1, MAY_WRITE = 2 };

/* Bytes taken ahead of what is being parsed: a small request or reply costs one system call, and
 * of a long one no more than this is copied twice. */
#define AHEAD_BYTES (8 << 10)
/* One system call moves at most so much, so that a lock around it is never held for long. Each
 * call less keeps both sides busy longer: four instead of one cost a read of 1 MiB a tenth of its
 * time. But the server's one thread serves all peers, and what is urgent and comes after a while
 * finds it in a step of bulk: where such ones are sent at all, its steps are shorter. */
#define STEP_BYTES (1 << 20)
#define SERVER_STEP_BYTES (256 << 10)
#define SMALL_GONE_NS 1000000000
/* What would be left to a call, and to a packet, of its own goes with the step before. */
#define STEP_REST_BYTES (4 << 10)
/* What is no larger is taken for something that somebody waits for (`priority.py`). While such
 * ones are about, the server's steps are shorter: they would wait for the one that goes on. */
#define SMALL_BYTES (64 << 10)
#define SMALL_STEP_BYTES (64 << 10)
#define SMALL_MEMORY_NS 20000000
#define LOW_WATER_BYTES_MIN (96 << 10)
#define LOW_WATER_BYTES_MAX (512 << 10)
#define EVIDENCE_BYTES 128

typedef struct {
    uint8_t kind, flags;
    uint32_t slice_idx, num_slices, num_pieces, immediate;
    uint64_t nbytes, transfer_id, oldest;
    uint8_t token[TOKEN_BYTES];
} Request;

static size_t note_bytes(const Request *request)
{
    return request->flags & HAS_NOTE ? request->immediate : 0;
}

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
    if (places && places->nbytes <= step + STEP_REST_BYTES)
        step = places->nbytes;
    if (head->iov_len)
        batch[n++] = *head;
    for (size_t i = 0; places && i < places->count && n < IOVECS_MAX && nbytes < step; i++) {
        batch[n] = places->at[i];
        if (batch[n].iov_len > step - nbytes)
            batch[n].iov_len = step - nbytes;
        nbytes += batch[n++].iov_len;
    }
    struct msghdr message = {.msg_iov = batch, .msg_iovlen = n};
    /* More of it follows: no step ends in a small packet of its own. */
    int more = places && nbytes < places->nbytes ? MSG_MORE : 0;
    ssize_t sent;
    do
        sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL | more);
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
    bool within_host;  /* the other side is on this host */
    int low_water;     /* so many bytes make it readable; 0 = any */
    size_t start, end; /* of `ahead` */
    uint8_t ahead[AHEAD_BYTES];
} Input;

/* Whether both ends of a connection are on this host: `tune` in `lane.py`, with addresses. */
static bool is_within_host(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_storage room;
    } here = {0}, there = {0};
    socklen_t here_bytes = sizeof here, there_bytes = sizeof there;
    if (getsockname(fd, &here.any, &here_bytes) || getpeername(fd, &there.any, &there_bytes))
        return false;
    if (here.any.sa_family == AF_INET)
        return here.v4.sin_addr.s_addr == there.v4.sin_addr.s_addr ||
               ntohl(there.v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    return here.any.sa_family == AF_INET6 &&
           !memcmp(&here.v6.sin6_addr, &there.v6.sin6_addr, sizeof here.v6.sin6_addr);
}

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

/* Before a sleep: of a long payload many bytes shall come before the thread is woken. It would
 * overtake the sender else, and be woken for each packet, which costs the sender most. Its end, or
 * a failure, wakes at once. (A sender on the same core is not overtaken: what it has just sent lies
 * in that core's cache, and many bytes would not.) */
static void set_low_water(Input *input, size_t remaining)
{
    size_t wanted = remaining < LOW_WATER_BYTES_MAX ? remaining : LOW_WATER_BYTES_MAX;
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
