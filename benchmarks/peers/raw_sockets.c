// The least that a one-sided put or get over sockets can cost, and memcpy: the ceiling of a host.
//
//   request   kind | pieces | then per piece: offset, length | put: the bytes
//   answer    put: one byte, once all bytes lie in memory      get: the bytes
//
// One request per connection and operation: an operation's pieces are dealt out to the connections
// in runs, a single piece is cut into equal parts. Bytes are sent from and received into their
// place. The owner has a blocking thread per connection; the requester one thread for all.
// No registration, no rights, no names, no failures: a product does more.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PUT = 0, GET = 1, CONNECTIONS_MAX = 16, PIECES_MAX = 1 << 16, VECTOR_MAX = 1024 };

struct request { uint64_t kind, pieces; };
struct place { uint64_t offset, length; };

// A list of buffers of which a part has been moved.
struct cursor { struct iovec *at; size_t left; };

static void advance(struct cursor *c, size_t moved) {
    while (c->left && moved >= c->at->iov_len) {
        moved -= c->at->iov_len;
        c->at++;
        c->left--;
    }
    if (c->left) {
        c->at->iov_base = (char *)c->at->iov_base + moved;
        c->at->iov_len -= moved;
    }
}

// Moves what the socket takes now: 1 if all is moved, 0 if it would block, -1 if it failed.
static int move(int fd, struct cursor *c, int sending) {
    while (c->left) {
        struct msghdr m = {.msg_iov = c->at, .msg_iovlen = c->left < VECTOR_MAX ? c->left : VECTOR_MAX};
        ssize_t moved = sending ? sendmsg(fd, &m, MSG_NOSIGNAL) : recvmsg(fd, &m, 0);
        if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return -1;
        advance(c, (size_t)moved);
    }
    return 1;
}

static int move_buffer(int fd, void *buffer, size_t nbytes, int sending) {
    struct iovec v = {buffer, nbytes};
    struct cursor c = {&v, nbytes ? 1 : 0};
    return move(fd, &c, sending) == 1 ? 0 : -1;
}

// ---- the owner of the memory ---------------------------------------------------------------

struct owner { int fd; char *memory; size_t nbytes; };

static int serve_one(struct owner *o, struct place *places, struct iovec *v) {
    struct request r;
    if (move_buffer(o->fd, &r, sizeof r, 0) || r.pieces > PIECES_MAX || r.kind > GET) return -1;
    if (move_buffer(o->fd, places, r.pieces * sizeof *places, 0)) return -1;
    for (size_t i = 0; i < r.pieces; i++) {
        if (places[i].length > o->nbytes || places[i].offset > o->nbytes - places[i].length) return -1;
        v[i] = (struct iovec){o->memory + places[i].offset, places[i].length};
    }
    struct cursor c = {v, r.pieces};
    if (move(o->fd, &c, r.kind == GET) != 1) return -1;
    char landed = 1;
    return r.kind == PUT ? move_buffer(o->fd, &landed, 1, 1) : 0;
}

static void *serve(void *argument) {
    struct owner *o = argument;
    struct place *places = malloc(PIECES_MAX * sizeof *places);
    struct iovec *v = malloc(PIECES_MAX * sizeof *v);
    while (places && v && !serve_one(o, places, v)) {}
    free(places);
    free(v);
    close(o->fd);
    free(o);
    return NULL;
}

static void no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// Serves every connection that comes, until `listener` fails.
int raw_serve(int listener, void *memory, size_t nbytes) {
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) return -errno;
        no_delay(fd);
        struct owner *o = malloc(sizeof *o);
        *o = (struct owner){fd, memory, nbytes};
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, o)) return -1;
        pthread_detach(thread);
    }
}

// ---- the requester -------------------------------------------------------------------------

int raw_connect(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) return -1;
    no_delay(fd);
    return fd;
}

// One connection's share of an operation.
struct share {
    struct request request;
    struct iovec *v;         // request, places, then the pieces
    struct place *places;
    struct cursor sending, receiving;
    char landed;
    struct iovec answer;
};

static struct share shares[CONNECTIONS_MAX];

static int prepare(struct share *s, int kind, char *base, const int64_t *local,
                   const int64_t *remote, size_t length, size_t pieces) {
    if (!s->v) {
        s->v = malloc((PIECES_MAX + 2) * sizeof *s->v);
        s->places = malloc(PIECES_MAX * sizeof *s->places);
        if (!s->v || !s->places) return -1;
    }
    s->request = (struct request){(uint64_t)kind, pieces};
    s->v[0] = (struct iovec){&s->request, sizeof s->request};
    s->v[1] = (struct iovec){s->places, pieces * sizeof *s->places};
    for (size_t i = 0; i < pieces; i++) {
        s->places[i] = (struct place){(uint64_t)remote[i], length};
        s->v[i + 2] = (struct iovec){base + local[i], length};
    }
    s->answer = (struct iovec){&s->landed, 1};
    s->sending = (struct cursor){s->v, kind == PUT ? pieces + 2 : 2};
    s->receiving = kind == PUT ? (struct cursor){&s->answer, 1} : (struct cursor){s->v + 2, pieces};
    return 0;
}

// Moves all shares to their end. One connection blocks in its calls, several are polled.
static int run_shares(int *fds, int n) {
    if (n == 1) return move(fds[0], &shares[0].sending, 1) == 1 && move(fds[0], &shares[0].receiving, 0) == 1 ? 0 : -1;
    struct pollfd polled[CONNECTIONS_MAX];
    for (;;) {
        int open = 0;
        for (int i = 0; i < n; i++) {
            struct share *s = &shares[i];
            if (move(fds[i], &s->sending, 1) < 0) return -1;
            if (!s->sending.left && move(fds[i], &s->receiving, 0) < 0) return -1;
            if (s->sending.left || s->receiving.left)
                polled[open++] = (struct pollfd){fds[i], s->sending.left ? POLLOUT : POLLIN, 0};
        }
        if (!open) return 0;
        if (poll(polled, (nfds_t)open, 30000) == 0) return -1;
    }
}

// Puts or gets `pieces` pieces of `length` bytes; 0 once all bytes are in place.
// With several connections their sockets must be non-blocking.
int raw_move(int *fds, int n, int kind, char *base, const int64_t *local, const int64_t *remote,
             size_t length, size_t pieces) {
    if (n > CONNECTIONS_MAX || pieces > PIECES_MAX) return -1;
    int used = 0;
    if (pieces == 1) {
        for (size_t first = 0; used < n && first < length; used++) {
            size_t part = used == n - 1 ? length - first : (length + (size_t)n - 1) / (size_t)n;
            if (part > length - first) part = length - first;
            int64_t here = *local + (int64_t)first, there = *remote + (int64_t)first;
            if (prepare(&shares[used], kind, base, &here, &there, part, 1)) return -1;
            first += part;
        }
    } else {
        for (size_t first = 0; used < n && first < pieces; used++) {
            size_t last = pieces * (size_t)(used + 1) / (size_t)n;
            if (prepare(&shares[used], kind, base, local + first, remote + first, length, last - first)) return -1;
            first = last;
        }
    }
    return run_shares(fds, used);
}

// ---- memcpy --------------------------------------------------------------------------------

void raw_copy(char *target, const char *source, const int64_t *to, const int64_t *from, size_t length,
              size_t pieces) {
    for (size_t i = 0; i < pieces; i++) memcpy(target + to[i], source + from[i], length);
}
