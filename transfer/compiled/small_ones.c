/* Small requests at the owner's end, and how much bulk is moved at once beside them.
 *
 * What is small may be urgent, and waits for the step of bulk that goes on. The fewer bytes a step
 * has the shorter is the wait, and the more of them meet one:
 *
 *     small, with gaps      s     s     s     s        a short step hits whoever comes during it
 *     small, without        sssssssssssssB----Bsssss   each step hits one, so few long ones
 *
 * A requester lets few bytes of bulk pass beside a stream without gaps, a turn at a time
 * (`courtesy.c`). In short steps each of them would meet a request, of one turn sixteen. */

/* A turn of bulk is moved at once after so many small ones, if one comes so soon after the other on
 * average, and what has come with it. */
#define SMALL_PER_TURN 400
#define SMALL_PERIOD_NS 60000
#define SMALL_TURN_BYTES (TURN_BYTES + TURN_BYTES / 4)

typedef struct {
    int64_t served_at; /* the last one */
    int64_t counted_at;
    unsigned count; /* since then */
    size_t turn_left; /* bytes */
} SmallOnes;

static void note_small(SmallOnes *small)
{
    small->served_at = now_ns();
    small->count++;
}

/* How many bytes of bulk one system call may move. */
static size_t step_beside_small(SmallOnes *small)
{
    int64_t now = now_ns();
    if (now - small->served_at > SMALL_GONE_NS)
        return STEP_BYTES;
    if (now - small->served_at > SMALL_MEMORY_NS)
        return SERVER_STEP_BYTES;
    if (small->count >= SMALL_PER_TURN) {
        bool streams = (now - small->counted_at) / small->count < SMALL_PERIOD_NS;
        small->turn_left = streams ? SMALL_TURN_BYTES : 0;
        small->counted_at = now;
        small->count = 0;
    }
    return small->turn_left ? STEP_BYTES : SMALL_STEP_BYTES;
}

static void spend_small_turn(SmallOnes *small, size_t nbytes)
{
    small->turn_left -= nbytes < small->turn_left ? nbytes : small->turn_left;
}
