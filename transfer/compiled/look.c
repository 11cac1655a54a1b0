/* Looking for what is about to come, for a moment, before going to sleep for it.
 *
 * To wake a core that has gone idle takes longer than most answers take, and costs the waker too.
 * Where it does not pay, because what is waited for takes longer or somebody else wants this core,
 * it is tried less and less: an idle process, and one whose peers are far away, spend nothing on it.
 */

#define LOOK_NS 50000
/* The same in a stream without gaps, most of whose looks end at once. */
#define LOOK_IN_STREAM_NS 1000000
/* Requests and answers of no more bytes are looked for wherever they come from. Within a host those
 * with a payload are too, and its parts as it comes: each sleep in it would cost both sides a wake-up,
 * and while it comes there is hardly anything to look for in vain. */
#define LOOK_BYTES_MAX (64 << 10)
#define LOOKS_LEFT_OUT_MAX 1023
#define WANTED_NS 3000 /* a core that is offered for longer was wanted */
#define WANTED_LEFT_OUT_MAX 15

/* How often looking has been left out, and shall be; whether the other side shares this core, as was
 * seen some calls ago. Guarded by whoever owns it. */
typedef struct {
    int left_out, to_leave_out;
    unsigned num_asked;
    bool shares;
} Looks;

/* The kernel moves threads once in thousands of requests. */
#define ASKED_EVERY 16

/* Whether the other side may need this very core to answer: it sent from here when it last did. Then
 * it should have the core in between; else to offer it would only lose it to somebody else. (What
 * came over a network was taken in here, which does no harm.) */
static bool shares_core(Looks *looks, int fd)
{
    if (looks->num_asked++ % ASKED_EVERY == 0) {
        int core = -1;
        socklen_t size = sizeof core;
        (void)getsockopt(fd, SOL_SOCKET, SO_INCOMING_CPU, &core, &size);
        looks->shares = core < 0 || core == sched_getcpu();
    }
    return looks->shares;
}

/* Offer this core to others; whether somebody took it. Who would rather look than sleep keeps them
 * waiting then, and waits for them: a sleeper would have the core back sooner. */
static bool is_core_wanted(void)
{
    int64_t begin = now_ns();
    sched_yield();
    return now_ns() - begin > WANTED_NS;
}

/* How many bytes of a payload should be there before its receiver wakes up. */
static size_t bytes_to_sleep_for(Looks *looks, const Input *input, size_t remaining)
{
    return remaining && input->within_host && shares_core(looks, input->fd) ? 0 : remaining;
}

/* Whether it is worth a try. */
static bool may_look(Looks *looks)
{
    return looks->left_out++ >= looks->to_leave_out;
}

/* One look has ended because somebody wanted the core: that may be over soon. */
static void note_core_wanted(Looks *looks)
{
    int more = 2 * looks->to_leave_out + 1;
    looks->left_out = 0;
    if (looks->to_leave_out < WANTED_LEFT_OUT_MAX)
        looks->to_leave_out = more;
}

/* One look has ended; `paid`: what was waited for came. Later than in time does not count: then
 * somebody else has had the core, and a sleeper would have it back sooner. */
static void note_look(Looks *looks, bool paid, int64_t end)
{
    int more = 2 * looks->to_leave_out + 1;
    looks->left_out = 0;
    if (paid && now_ns() < end + LOOK_NS)
        looks->to_leave_out = 0;
    else
        looks->to_leave_out = more < LOOKS_LEFT_OUT_MAX ? more : LOOKS_LEFT_OUT_MAX;
}
