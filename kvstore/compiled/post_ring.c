/* Puts that a client has finished, in memory that it shares with its master: what is posted here is
 * a block, as the master takes all that is posted before it looks at anything it is asked.
 *
 *   client's line    0 state: closed (1 bit) | generation (39) | posts so far (24) | 128 its claim
 *   master's line   64 posts taken | 72 the first generation whose places are the client's | 80 its number
 *   posts         4096 POSTS_MAX of them, a ring
 *   grants        8192 GRANTS of them: turn (odd while it is being written) | first number | bytes |
 *                      64 bytes later what the master says of the places that an order wished for
 *   sums         16384 SUMS_MAX checksums of the one batch that was ended by a post not taken yet
 *
 * To post is to count one more in the state, and that fails if the state has changed since the put
 * began. So a master that needs to decide something itself raises the generation first: what was
 * posted before counts, whatever is under way asks it. Places of before `floor` may be another's now.
 *
 * Part of `kvstore/rows.c` and `kvstore/native.c`. */

#define RING_BYTES 49152
#define RING_STATE 0
#define RING_TAKEN 64
#define RING_FLOOR 72
#define RING_NUMBER 80
#define RING_CLAIM_AT 128 /* where its word is in the memory of taken keys */
#define RING_CLAIM_WORD 136
#define RING_POSTS 4096
#define RING_GRANTS 8192
#define RING_SUMS 16384
#define SUMS_MAX ((RING_BYTES - RING_SUMS) / 8)
#define GRANTS 8 /* orders of values of different sizes have different ones, if they can */
#define GRANT_BYTES ((RING_SUMS - RING_GRANTS) / GRANTS)
#define GRANT_HEAD_BYTES 64
#define GRANT_BYTES_MAX (GRANT_BYTES - GRANT_HEAD_BYTES)
#define POSTS_MAX 64
#define RING_CLOSED ((uint64_t)1 << 63)
#define RING_COUNT_MASK ((uint64_t)0xFFFFFF)

enum { POST_STORE = 1, POST_ORDER = 2, POST_FINISH = 3 };

typedef struct {
    uint64_t kind;
    unsigned char key[KEY_BYTES]; /* of what is stored */
    uint64_t batch;               /* the number of its place; the first of those that are ordered;
                                     that of the batch whose blocks are all written */
    uint64_t length, checksum;    /* of what is stored; length of what is to come */
    uint64_t count;               /* of places that are ordered, of blocks that are written */
    uint64_t unused;
} Post; /* [64] bytes */

static uint64_t generation_of(uint64_t state)
{
    return (state & ~RING_CLOSED) >> 24;
}

/* How many posts the master has not taken, once there are as many as a state says. */
static uint64_t posts_waiting(const unsigned char *ring, uint64_t state)
{
    return (state - shared_load(ring + RING_TAKEN)) & RING_COUNT_MASK;
}

/* Where it is said what became of an order for places for values of so many bytes. */
static unsigned char *grant_of(unsigned char *ring, uint64_t length)
{
    uint64_t mixed = (length + 63) / 64 * 0x9E3779B97F4A7C15u;
    return ring + RING_GRANTS + (mixed >> 61) * GRANT_BYTES;
}

static Post *post_at(unsigned char *ring, uint64_t count)
{
    return (Post *)(ring + RING_POSTS) + count % POSTS_MAX;
}
