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

/* Longer ones count as this much in the mean. */
#define SMALL_PERIOD_NS_MAX 1000000

typedef struct {
    int64_t served_at; /* the last one */
    int64_t mean_period; /* from one to the next */
    int64_t counted_at;
    unsigned count; /* since then */
    size_t turn_left; /* bytes */
} SmallOnes;

static void note_small(SmallOnes *small)
{
    int64_t now = now_ns(), period = now - small->served_at;
    if (period > SMALL_PERIOD_NS_MAX)
        period = SMALL_PERIOD_NS_MAX;
    small->mean_period += (period - small->mean_period) / 16;
    small->served_at = now;
    small->count++;
}

/* Whether they come without gaps. */
static bool are_small_streaming(const SmallOnes *small)
{
    return small->mean_period < SMALL_PERIOD_NS;
}

/* Until when the next one is looked for at least: as `look_in_stream_ns`. */
static int64_t small_expected_until(const SmallOnes *small)
{
    return small->served_at + (are_small_streaming(small) ? LOOK_IN_STREAM_NS : 0);
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
