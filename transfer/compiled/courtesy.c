/* Courtesy: how a thread that moves bulk leaves the core to what is urgent.
 *
 * What is urgent lacks not the wire but a core, and where all are busy a thread that was woken
 * waits for its turn: a kernel may let whoever runs finish a time slice of milliseconds first.
 *
 *     urgent, with gaps      u  u  u  u         bulk in the gaps, a short step at a time
 *     urgent, without        uuuuuuuuuuu|uuuu   bulk in turns: each is met by one of hundreds
 *
 * Short steps between all of them would delay one in ten, for as long as a thread takes to leave a
 * core: most of what bulk costs the others is not its bytes but its coming and going. */

/* Urgent requests of this process without an answer; how many there were, when the last one was
 * posted or answered, and who posted it. */
static int urgent_under_way;
static unsigned urgent_count;
static int64_t urgent_at = INT64_MIN / 2;
static uintptr_t urgent_by;
static int64_t stream_began; /* at the end of the last silence of GAP_NS_MAX */
static int64_t mean_gap; /* from an answer to the next one that is posted */
static int64_t mean_span; /* from when one is posted to its answer */
static bool was_late;     /* the last one took much longer: a tick has met it, most likely */
static int64_t urgent_period; /* from one to the next in the stream that bulk has waited for last */

/* So long after the last one another is expected (`rails/bulk.py`): steps are short. */
#define URGENT_MEMORY_NS 20000000
/* Bulk uses the gaps of a stream that has such. Where it has none it waits for longer ones: they
 * are accidents, and the next one comes at once. */
#define GAP_NS 40000
#define GAP_BEGINS_NS 20000
#define ACCIDENT_NS 100000
#define GAP_NS_MAX 1000000
/* In a stream that has no gaps bulk has a turn after so many of them, or so long, of so many bytes,
 * and so long: few of them meet it, and none starves. Who has woken up a little early has it too. */
#define URGENT_PER_TURN 4800
#define URGENT_PER_TURN_MIN 3800
#define TURN_AFTER_NS 48000000
#define TURN_AFTER_NS_MIN 36000000
#define TURN_SOON_NS 1000000
#define STREAM_COUNT 32 /* so many of them tell how often they come */
#define TURN_BYTES (4 << 20)
#define TURN_STEP_BYTES (512 << 10)
#define TURN_NS 1600000
#define STREAM_MEMORY_NS 2000000
/* In a stream that has gaps: before each step whoever else wants the core has it for a moment, where
 * he may not take it. Each moment is a timer that interrupts somebody, most likely what is urgent. */
#define MOMENT_NS 20000
/* It looks again after so long at least: each time somebody may have to leave it his core. */
#define GIVE_WAY_NS_MAX 5500000
#define TICK_NS 4000000
#define TIMER_SLACK_NS 1000
/* A stream whose gaps are short may go on after this part of one: a step should be over then. What
 * takes the interpreter takes longer, begins in the first part, and waits for it no longer than that. */
#define SHORT_GAP_NS 400000
#define GAP_FOR_STEPS(gap) ((gap) * 5 / 8 - 40000)
#define GAP_FOR_BOOKS(gap) ((gap) / 4)
#define AWAIT_GAP_NS 2000000
#define BULK_TIMESLICE_NS 50000000

/* Whether the kernel lets whoever wakes up have bulk's core at once, as far as is known. */
static bool timeslices_work = true;
/* When bulk was last free to move, how many urgent ones there had been; its turn now, or its last. */
static int64_t bulk_at, turn_ends = INT64_MIN / 2;
static unsigned bulk_count;
static int turn_left;

static int64_t since_urgent(int64_t now)
{
    return now - __atomic_load_n(&urgent_at, __ATOMIC_RELAXED);
}

/* Whether one is under way. One that takes long lacks no core: its peer is far away, or hangs. */
static bool any_urgent(int64_t now)
{
    return __atomic_load_n(&urgent_under_way, __ATOMIC_RELAXED) > 0 &&
           since_urgent(now) < URGENT_MEMORY_NS;
}

/* Whether this thread moves bulk of another one. */
static __thread bool stands_in;

/* Whether another thread has posted the last urgent one: its own ones a thread cannot delay. */
static bool is_others(void)
{
    return stands_in || __atomic_load_n(&urgent_by, __ATOMIC_RELAXED) != (uintptr_t)pthread_self();
}

static bool is_beside_urgent(void)
{
    int64_t now = now_ns();
    return any_urgent(now) || (is_others() && since_urgent(now) < URGENT_MEMORY_NS);
}

static bool has_gaps(void)
{
    return __atomic_load_n(&mean_gap, __ATOMIC_RELAXED) >= GAP_NS;
}

/* How long to look for an answer. In a stream without gaps what delays one is over after a moment, and
 * who sleeps meanwhile may wake up on the core of the other side (`cores.c`). Where answers take long
 * anyway nothing is won. */
static int64_t look_in_stream_ns(void)
{
    bool soon = __atomic_load_n(&mean_span, __ATOMIC_RELAXED) < LOOK_NS;
    return soon && !has_gaps() ? LOOK_IN_STREAM_NS : LOOK_NS;
}

static void count_urgent(void)
{
    int64_t now = now_ns(), gap = since_urgent(now);
    int64_t mean = __atomic_load_n(&mean_gap, __ATOMIC_RELAXED);
    /* A gap that a turn has made is none of the stream. */
    bool made = __atomic_load_n(&turn_ends, __ATOMIC_RELAXED) >= now - gap;
    if (any_urgent(now)) {
        gap = 0;
    } else if (gap > GAP_NS_MAX) {
        gap = GAP_NS_MAX;
        if (!made)
            __atomic_store_n(&stream_began, now, __ATOMIC_RELAXED);
    }
    if (!made)
        __atomic_store_n(&mean_gap, mean + (gap - mean) / 8, __ATOMIC_RELAXED);
    __atomic_add_fetch(&urgent_under_way, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&urgent_count, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&urgent_at, now, __ATOMIC_RELAXED);
    __atomic_store_n(&urgent_by, (uintptr_t)pthread_self(), __ATOMIC_RELAXED);
}

static void uncount_urgent(void)
{
    int64_t now = now_ns(), span = since_urgent(now);
    int64_t mean = __atomic_load_n(&mean_span, __ATOMIC_RELAXED);
    if (span > GAP_NS_MAX)
        span = GAP_NS_MAX;
    __atomic_store_n(&was_late, span > mean + mean / 2, __ATOMIC_RELAXED);
    __atomic_store_n(&mean_span, mean + (span - mean) / 8, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&urgent_under_way, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&urgent_at, now, __ATOMIC_RELAXED);
}

/* Bulk has moved bytes beside what is urgent. */
static void spend_turn(size_t nbytes)
{
    int left = __atomic_sub_fetch(&turn_left, (int)nbytes, __ATOMIC_RELAXED);
    if (left <= 0 && left + (int)nbytes > 0)
        __atomic_store_n(&turn_ends, now_ns(), __ATOMIC_RELAXED);
}

static bool has_turn(int64_t now)
{
    return __atomic_load_n(&turn_left, __ATOMIC_RELAXED) > 0 &&
           now < __atomic_load_n(&turn_ends, __ATOMIC_RELAXED);
}

/* Whether what begins now may meet the next urgent one. One that is overdue may not come at all. */
static bool is_late(int64_t now, bool books)
{
    int64_t gap = __atomic_load_n(&mean_gap, __ATOMIC_RELAXED), since = since_urgent(now);
    int64_t begins = books ? GAP_FOR_BOOKS(gap) : GAP_FOR_STEPS(gap);
    return gap >= GAP_NS && gap < SHORT_GAP_NS && since >= begins && since < 2 * gap;
}

/* How long it is, most likely, to the beginning of the next gap: whoever looks before may take the
 * core of somebody who is urgent. */
static int64_t next_gap_ns(int64_t now)
{
    int64_t gap = __atomic_load_n(&mean_gap, __ATOMIC_RELAXED), since = since_urgent(now);
    int64_t span = __atomic_load_n(&mean_span, __ATOMIC_RELAXED), wait = GAP_BEGINS_NS - since;
    if (any_urgent(now))
        wait = span + span / 2 - since + GAP_BEGINS_NS;
    else if (wait <= 0)
        wait = gap - since + span + GAP_BEGINS_NS;
    return wait > GAP_BEGINS_NS ? wait : GAP_BEGINS_NS;
}

static bool is_free(int64_t now)
{
    int64_t gap = has_gaps() ? GAP_BEGINS_NS : ACCIDENT_NS;
    /* During a turn the others may not have had a core: that they were silent says nothing. */
    int64_t since_turn = now - __atomic_load_n(&turn_ends, __ATOMIC_RELAXED);
    if (!is_others())
        return true;
    return !any_urgent(now) && since_urgent(now) >= gap && since_turn >= gap &&
           !is_late(now, false);
}

/* How long bulk should leave the core to what is urgent before it looks again; 0 = it may move.
 * Several threads may be told so at once: they share the turn. */
static int64_t give_way_ns(int64_t now)
{
    if (has_turn(now))
        return 0;
    bool free = is_free(now);
    unsigned count = __atomic_load_n(&urgent_count, __ATOMIC_RELAXED);
    unsigned passed = count - __atomic_load_n(&bulk_count, __ATOMIC_RELAXED);
    int64_t waited = now - __atomic_load_n(&bulk_at, __ATOMIC_RELAXED);
    if (passed >= STREAM_COUNT && !has_gaps())
        __atomic_store_n(&urgent_period, waited / passed, __ATOMIC_RELAXED);
    if (free || passed >= URGENT_PER_TURN_MIN || waited >= TURN_AFTER_NS_MIN) {
        __atomic_store_n(&bulk_at, now, __ATOMIC_RELAXED);
        __atomic_store_n(&bulk_count, count, __ATOMIC_RELAXED);
        if (!free)
            __atomic_store_n(&turn_ends, now + TURN_NS, __ATOMIC_RELAXED);
        __atomic_store_n(&turn_left, free ? 0 : TURN_BYTES, __ATOMIC_RELAXED);
        return 0;
    }
    if (has_gaps())
        return next_gap_ns(now);
    /* Each look may delay one of them: until the turn has come, or the stream may have ended. */
    int64_t left = __atomic_load_n(&urgent_period, __ATOMIC_RELAXED) * (URGENT_PER_TURN - passed);
    if (left > TURN_AFTER_NS - waited)
        left = TURN_AFTER_NS - waited;
    return left > TICK_NS ? left : TICK_NS;
}

/* Whether a turn has come, for a thread that has just had an answer. If it can be one that was late
 * anyway, it is. */
static bool is_turn_due(void)
{
    unsigned count = __atomic_load_n(&urgent_count, __ATOMIC_RELAXED);
    unsigned passed = count - __atomic_load_n(&bulk_count, __ATOMIC_RELAXED);
    int64_t now = __atomic_load_n(&urgent_at, __ATOMIC_RELAXED);
    int64_t waited = now - __atomic_load_n(&bulk_at, __ATOMIC_RELAXED);
    if (passed < URGENT_PER_TURN_MIN && waited < TURN_AFTER_NS_MIN)
        return false;
    return __atomic_load_n(&was_late, __ATOMIC_RELAXED) || passed >= URGENT_PER_TURN ||
           waited >= TURN_AFTER_NS_MIN + TICK_NS;
}

/* Have the next turn come soon. */
static void hasten_turn(void)
{
    __atomic_store_n(&bulk_at, now_ns() - TURN_AFTER_NS_MIN + TURN_SOON_NS, __ATOMIC_RELAXED);
}

static void sleep_ns(int64_t span_ns)
{
    struct timespec span = {0, span_ns};
    (void)nanosleep(&span, NULL);
}

/* Sleep until a tick of the system, since whoever it interrupts is late anyway, or until `*ended` is
 * not 0 any more and somebody says so; NULL = nobody does. */
static void sleep_until_tick(int64_t span_ns, int *ended)
{
    struct timespec span = {0, span_ns - TICK_NS / 2};
    int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    (void)prctl(PR_SET_TIMERSLACK, TICK_NS, 0, 0, 0);
    if (ended)
        (void)syscall(SYS_futex, ended, FUTEX_WAIT_PRIVATE, 0, &span, NULL, 0);
    else
        (void)nanosleep(&span, NULL);
    if (slack > 0)
        (void)prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0);
}

/* Where whoever wants the core may not take it, he has it for a moment. */
static void pause_for_others(int64_t now)
{
    if (!__atomic_load_n(&timeslices_work, __ATOMIC_RELAXED) && has_gaps() && is_others() &&
        !has_turn(now) && since_urgent(now) < STREAM_MEMORY_NS)
        sleep_ns(MOMENT_NS);
}

/* Something of bulk has ended, and its books need the interpreter for a moment, which whoever posts
 * or takes something urgent needs too: they are kept at the beginning of a gap. */
static void await_gap(void)
{
    int64_t now = now_ns(), end = now + AWAIT_GAP_NS;
    while (now < end && has_gaps() && is_others() && since_urgent(now) < STREAM_MEMORY_NS &&
           (any_urgent(now) || is_late(now, true))) {
        sleep_ns(next_gap_ns(now));
        now = now_ns();
    }
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

#define HURRY_NS 100000 /* the shortest time slice that the kernel has */

PyDoc_STRVAR(hurry_doc,
             "hurry()\n--\n\n"
             "Have this thread run as soon as it wakes up, whoever has the core then: for one that\n"
             "wakes up often and does little each time. Whether the kernel does so (from 6.12 on).");

/* The other way round as `lengthen_timeslice`: its share of the core stays what it is, too. */
static PyObject *hurry(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    SchedulingAttributes own;
    bool known = syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) == 0;
    if (!known || own.policy != SCHED_OTHER || !own.runtime)
        Py_RETURN_FALSE;
    own.runtime = HURRY_NS;
    return PyBool_FromLong(syscall(SYS_sched_setattr, 0, &own, 0) == 0);
}
