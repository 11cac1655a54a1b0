/* Courtesy: how a thread that moves bulk leaves the core to what is urgent.
 *
 * What is urgent lacks not the wire but a core, and where all are busy a thread that was woken
 * waits for its turn: a kernel may let whoever runs finish a time slice of milliseconds first. */

/* Urgent requests of this process without an answer, and when and by whom the last was posted. */
static int urgent_under_way;
static int64_t urgent_at = INT64_MIN / 2;
static uintptr_t urgent_by;

/* So long after the last one another is expected (`rails/bulk.py`): steps are short. */
#define URGENT_MEMORY_NS 20000000
/* So long it is one of a stream: after each step whoever else wants the core has it for a moment. */
#define STREAM_MEMORY_NS 2000000
#define PAUSE_NS 20000
/* While something urgent is under way bulk waits, for so long at most: none starves. */
#define GIVE_WAY_NS 100000
#define GIVE_WAY_TIMES 10
#define TIMER_SLACK_NS 1000
#define BULK_TIMESLICE_NS 50000000

static bool any_urgent(void)
{
    return __atomic_load_n(&urgent_under_way, __ATOMIC_RELAXED) > 0;
}

/* Whether another thread has posted something urgent lately: its own ones a thread cannot delay. */
static bool was_urgent(int64_t memory_ns)
{
    return now_ns() - __atomic_load_n(&urgent_at, __ATOMIC_RELAXED) < memory_ns &&
           __atomic_load_n(&urgent_by, __ATOMIC_RELAXED) != (uintptr_t)pthread_self();
}

static bool is_beside_urgent(void)
{
    return any_urgent() || was_urgent(URGENT_MEMORY_NS);
}

static void count_urgent(void)
{
    __atomic_add_fetch(&urgent_under_way, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&urgent_at, now_ns(), __ATOMIC_RELAXED);
    __atomic_store_n(&urgent_by, (uintptr_t)pthread_self(), __ATOMIC_RELAXED);
}

static void uncount_urgent(void)
{
    __atomic_sub_fetch(&urgent_under_way, 1, __ATOMIC_RELAXED);
}

/* Leave the core for a moment, and as long as something urgent is under way. */
static void give_way(void)
{
    static const struct timespec moment = {0, PAUSE_NS}, pause = {0, GIVE_WAY_NS};
    if (was_urgent(STREAM_MEMORY_NS))
        (void)nanosleep(&moment, NULL);
    for (int i = 0; i < GIVE_WAY_TIMES && any_urgent(); i++)
        (void)nanosleep(&pause, NULL);
}

/* As the kernel has it; the C library knows it only of late. */
typedef struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
} SchedulingAttributes;

/* What a thread goes back to when it has moved bulk. */
typedef struct {
    bool lengthened;
    int timer_slack;
    SchedulingAttributes before;
} Courtesy;

static bool timeslices_work = true;

/* Ask for a long time slice: whoever wakes up with a shorter one does not wait for its end then,
 * and the share of the core stays what it was. Kernels before 6.12 ignore the wish, sandboxes may
 * refuse it: then nothing is changed. */
static bool lengthen_timeslice(SchedulingAttributes *before)
{
    if (!__atomic_load_n(&timeslices_work, __ATOMIC_RELAXED))
        return false;
    bool known = syscall(SYS_sched_getattr, 0, before, sizeof *before, 0) == 0;
    if (known && before->policy != SCHED_OTHER && before->policy != SCHED_BATCH)
        return false; /* this thread's own affair */
    SchedulingAttributes wanted = *before;
    wanted.runtime = BULK_TIMESLICE_NS;
    bool works = known && before->runtime && syscall(SYS_sched_setattr, 0, &wanted, 0) == 0;
    if (!works)
        __atomic_store_n(&timeslices_work, false, __ATOMIC_RELAXED);
    return works;
}

/* Begin to move bytes, without the interpreter's lock. Only bulk beside what is urgent pays. */
static void begin_courtesy(Courtesy *courtesy, bool bulk)
{
    *courtesy = (Courtesy){0};
    if (!bulk || !is_beside_urgent())
        return;
    courtesy->lengthened = lengthen_timeslice(&courtesy->before);
    courtesy->timer_slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    if (courtesy->timer_slack > TIMER_SLACK_NS)
        (void)prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0);
}

static void end_courtesy(const Courtesy *courtesy)
{
    if (courtesy->timer_slack > TIMER_SLACK_NS)
        (void)prctl(PR_SET_TIMERSLACK, courtesy->timer_slack, 0, 0, 0);
    if (courtesy->lengthened)
        (void)syscall(SYS_sched_setattr, 0, &courtesy->before, 0);
}
