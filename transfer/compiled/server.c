/* Server: the owner's end of all data connections
 *
 * One thread calls `run`; all others add, withdraw, attach and close. One mutex guards everything:
 * `run` holds it while it serves one connection for a turn (a step's bytes, so microseconds), and
 * never while it sleeps. So after `withdraw` or `close_peer` have returned nothing lands any more.
 * `gate` keeps `run` from taking the mutex again before those who waited had it.
 */

#define OFFER_BUCKETS 1024
#define EVENTS_MAX 16
#define SLOTS_MAX (1u << 16)
#define ACK_BYTES (64 * REPLY_BYTES)
#define OPEN_WRITES_MAX 4096
#define BITMAP_BYTES_MAX (64u << 20)
#define NAME_BYTES 256
/* How far a peer's transfers may run ahead of its oldest unfinished one (`wire.py`). */
#define TRANSFERS_AHEAD_MAX (1u << 20)
#define AHEAD_WORDS (TRANSFERS_AHEAD_MAX / 64)

typedef struct Offer {
    struct Offer *next;
    uint8_t token[TOKEN_BYTES];
    char to[NAME_BYTES];
    uintptr_t base;
    uint64_t nbytes;
    int rights;
} Offer;

/* A write of several slices of which some are in place. */
typedef struct OpenWrite {
    struct OpenWrite *next;
    uint64_t transfer_id;
    uint32_t num_slices, arrived;
    size_t words;
    uint64_t *bitmap; /* slice is in place; grows with the highest that came */
} OpenWrite;

typedef struct Peer {
    struct Peer *next;
    uint64_t id;
    char name[NAME_BYTES];
    uint64_t oldest;
    uint64_t *finished; /* ring of bits, one per transfer from `oldest` on */
    OpenWrite *writes;
    size_t num_writes, bitmap_bytes;
    struct Connection *connections;
    size_t num_connections;
} Peer;

typedef enum { HEADER, TABLE, LANDING, DISCARDING, REPLYING, ASKING } Stage;

typedef struct Connection {
    struct Connection *next; /* of the peer */
    uint64_t id;             /* its slot, and a number that makes it unique */
    Peer *peer;
    Stage stage;
    Request request;
    int status;             /* of the request whose payload is discarded */
    const Offer *offer;     /* what lands or is sent now; NULL once it was withdrawn */
    uint64_t turn;          /* when it was served last, if it carries bulk */
    bool superseded;        /* the slice that lands here has come again over another connection */
    uint32_t interest;
    uint8_t *table;
    struct iovec *iovecs;
    size_t room;            /* pieces that `table` and `iovecs` have room for */
    uint8_t *note;          /* follows the payload that lands */
    size_t note_room;
    Places places;
    uint8_t acks[ACK_BYTES];
    size_t acks_start, acks_end;
    Input input;
    Looks looks; /* not for looking: for whether the other side shares a core */
} Connection;

enum { IMMEDIATE_EVENT, CLOSED_EVENT, MAP_EVENT, NOTES_EVENT };

typedef struct Event {
    struct Event *next;
    int kind;
    uint64_t peer_id, connection_id;
    Request request;
    bool malformed;
    char evidence[EVIDENCE_BYTES];
} Event;

/* What a peer has left with a write: its name, a zero, what it says. */
typedef struct Note {
    struct Note *next;
    int64_t stamp; /* of this clock: when all bytes were in place */
    size_t name_bytes, nbytes;
    char text[];
} Note;

/* Python hears of notes when so many have been left since it last heard, or so many bytes. */
#define NOTES_TOLD 1024
#define NOTES_TOLD_BYTES (1 << 20)

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex, gate;
    int epoll, wakeup;
    bool closed;
    uint64_t slice_bytes_max, next_id;
    uint32_t slice_pieces_max, slices_max;
    uint64_t num_turns; /* of connections that carry bulk */
    SmallOnes small;
    /* `run`'s own: whether a small request was served in the last turn, which connection's next bytes
     * are looked for (0 = none's), and its descriptor. */
    bool served_small;
    uint64_t looked_for;
    int looked_fd;
    Looks looks;
    CoreChanges changes;
    Offer *offers[OFFER_BUCKETS];
    Peer *peers;
    Connection **slots;
    size_t num_slots;
    Event *first_event, **last_event;
    Note *first_note, **last_note;
    size_t untold_notes, untold_bytes;
    uint64_t bytes_served, refused, malformed;
} Server;

static PyTypeObject server_type;

static void lock_server(Server *server)
{
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&server->gate);
    pthread_mutex_lock(&server->mutex);
    pthread_mutex_unlock(&server->gate);
    Py_END_ALLOW_THREADS
}

static void unlock_server(Server *server)
{
    pthread_mutex_unlock(&server->mutex);
}

static void wake_server(Server *server)
{
    uint64_t one = 1;
    /* It can only fail because the counter is full, and then the thread wakes anyway. */
    while (write(server->wakeup, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Say something to Python. Without memory the connection's end must do: false. */
static bool tell(Server *server, Connection *connection, int kind, bool malformed,
                 const char *evidence)
{
    Event *event = calloc(1, sizeof *event);
    if (!event)
        return false;
    event->kind = kind;
    event->peer_id = connection->peer->id;
    event->connection_id = connection->id;
    event->request = connection->request;
    event->malformed = malformed;
    snprintf(event->evidence, EVIDENCE_BYTES, "%s", evidence);
    *server->last_event = event;
    server->last_event = &event->next;
    return true;
}

/* Keep a note that has landed. Nobody is woken for it, until there are many. */
static bool keep_note(Server *server, Connection *connection)
{
    size_t nbytes = note_bytes(&connection->request), name_bytes = strlen(connection->peer->name);
    Note *note = malloc(sizeof *note + name_bytes + 1 + nbytes);
    if (!note)
        return false;
    note->next = NULL;
    note->stamp = now_ns();
    note->name_bytes = name_bytes;
    note->nbytes = nbytes;
    memcpy(note->text, connection->peer->name, name_bytes + 1);
    memcpy(note->text + name_bytes + 1, connection->note, nbytes);
    *server->last_note = note;
    server->last_note = &note->next;
    server->untold_bytes += nbytes;
    if (++server->untold_notes < NOTES_TOLD && server->untold_bytes < NOTES_TOLD_BYTES)
        return true;
    server->untold_notes = server->untold_bytes = 0;
    return tell(server, connection, NOTES_EVENT, false, "");
}

/* ---- offers */

static Offer **find_offer(Server *server, const uint8_t *token)
{
    /* Tokens are random: any of their bytes spread well. */
    Offer **at = &server->offers[load16(token) % OFFER_BUCKETS];
    while (*at && memcmp((*at)->token, token, TOKEN_BYTES))
        at = &(*at)->next;
    return at;
}

static void remove_offer(Server *server, Offer **at)
{
    Offer *offer = *at;
    *at = offer->next;
    for (size_t i = 0; i < server->num_slots; i++)
        if (server->slots[i] && server->slots[i]->offer == offer)
            server->slots[i]->offer = NULL;
    free(offer);
}
