/* Memory that a caller of the local control channel shares with its server: short requests and their
 * replies, where both ends run at once. Then neither asks the kernel for anything.
 *
 *   caller's line   0 number of the request | its bytes        4096 - 256 bytes of content at 256
 *   server's line  64 number of the reply | its bytes | taken  as many at 4096
 *                 128 the server sleeps
 *                 192 the caller sleeps
 *
 * A number is told after what it stands for is there. Who goes to sleep says so first and then looks
 * once more; who tells a number then looks whether the other sleeps: one of the two sees what the other
 * did. A sleeper is woken by BOARD_WAKE on the socket, by whoever takes its word back.
 *
 * The memory is the caller's, sealed against becoming shorter. The server copies what is there before
 * it looks at it. What does not fit goes by the socket, a reply with the length BOARD_BY_SOCKET. */

#define BOARD_BYTES 8192
#define BOARD_ASKED 0
#define BOARD_ASKED_BYTES 4
#define BOARD_ANSWERED 64
#define BOARD_ANSWERED_BYTES 68
#define BOARD_TAKEN 72
#define BOARD_SERVER_SLEEPS 128
#define BOARD_CALLER_SLEEPS 192
#define BOARD_REQUEST 256
#define BOARD_REPLY 4096
#define BOARD_REQUEST_BYTES (BOARD_REPLY - BOARD_REQUEST)
#define BOARD_REPLY_BYTES (BOARD_BYTES - BOARD_REPLY)
#define BOARD_BY_SOCKET UINT32_MAX
#define BOARD_WAKE UINT32_MAX /* as the length of a frame it is none */
#define BOARD_LOOKS 24        /* at a number, before anything else is thought of */

typedef unsigned char Board; /* [BOARD_BYTES]; null: there is none */

#if defined(__x86_64__)
#define BOARD_PAUSE() __builtin_ia32_pause()
#else
#define BOARD_PAUSE() ((void)0)
#endif

static uint32_t board_load(const Board *board, size_t at)
{
    return __atomic_load_n((const uint32_t *)(board + at), __ATOMIC_SEQ_CST);
}

static void board_store(Board *board, size_t at, uint32_t value)
{
    __atomic_store_n((uint32_t *)(board + at), value, __ATOMIC_SEQ_CST);
}

/* Take back the word of somebody who sleeps; whether it was there, and the sleeper is to be woken. */
static bool board_take_word(Board *board, size_t at)
{
    return board_load(board, at) && __atomic_exchange_n((uint32_t *)(board + at), 0, __ATOMIC_SEQ_CST);
}

/* Wake whoever sleeps at the other end of a socket. False if it does not take it. */
static bool board_wake(int descriptor)
{
    uint32_t wake = BOARD_WAKE;
    ssize_t sent;
    do
        sent = send(descriptor, &wake, sizeof wake, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == sizeof wake;
}

/* Map what a descriptor stands for. Returns null with an exception set. */
static Board *board_map(int descriptor)
{
    void *mapped = mmap(NULL, BOARD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return NULL;
    }
    return mapped;
}

static void board_unmap(Board *board)
{
    if (board)
        munmap(board, BOARD_BYTES);
}
