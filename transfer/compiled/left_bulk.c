/* Left bulk: its turns beside a stream without gaps, taken by the thread of the stream.
 *
 *     urgent   uuuuuuuuuuuu BBBB uuuuuuuuuuuuuuuu BBBB uuuuuu
 *     bulk     sleeps ................................. until something of it has ended
 *
 * The bytes of a turn delay whoever comes during it. To wake bulk's thread for them, and before that
 * to look whether its turn has come, delays more: each time somebody loses his core. */

typedef struct {
    Lane *const *lanes;
    int count;
    Finished *finished;
} LeftBulk;

/* What the first thread has left that sleeps; whether it should wake up; when any had a turn. */
static struct {
    pthread_mutex_t mutex;
    const LeftBulk *bulk;
    int ended;
    int64_t turn_at;
    unsigned num_turns;
} left_bulk = {PTHREAD_MUTEX_INITIALIZER, NULL, 0, INT64_MIN / 2, 0};

/* Whoever has turns of others, and had the last one so lately, need not look for his own: he sleeps
 * for so long. That the stream is over he is told (`rouse_left_bulk`). */
#define TURN_MEMORY_NS 60000000
#define LEFT_NS 90000000
/* After so long beyond its time a thread looks whether what it waits for has moved away. */
#define LEFT_TOO_LONG_NS 110000000

/* The child of a fork has none of the threads, whatever they held. */
static void forget_left_bulk(void)
{
    pthread_mutex_init(&left_bulk.mutex, NULL);
    __atomic_store_n(&left_bulk.bulk, NULL, __ATOMIC_RELAXED);
}

/* Sleep beside a stream. Returns whether something has ended meanwhile. */
static bool leave_bulk(const LeftBulk *mine, int64_t span_ns)
{
    pthread_mutex_lock(&left_bulk.mutex);
    bool first = !left_bulk.bulk;
    if (first) {
        __atomic_store_n(&left_bulk.ended, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&left_bulk.bulk, mine, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&left_bulk.mutex);
    if (!first) {
        sleep_until_tick(span_ns, NULL);
        return false;
    }
    sleep_until_tick(span_ns, &left_bulk.ended);
    pthread_mutex_lock(&left_bulk.mutex);
    __atomic_store_n(&left_bulk.bulk, NULL, __ATOMIC_RELAXED);
    bool ended = __atomic_load_n(&left_bulk.ended, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&left_bulk.mutex);
    return ended;
}

/* Leave the core to what is urgent, as long as it is not bulk's turn. Returns whether something has
 * ended meanwhile, or may have. */
static bool give_way(Lane *const *lanes, int count, Finished *finished, int64_t deadline)
{
    const LeftBulk mine = {lanes, count, finished};
    int64_t now = now_ns(), pause_ns;
    pause_for_others(now);
    /* This thread has had a core until now, and the interpreter, most likely: that the others were
     * silent meanwhile says nothing. */
    if (!has_gaps() && !has_turn(now))
        __atomic_store_n(&turn_ends, now, __ATOMIC_RELAXED);
    while ((pause_ns = give_way_ns(now = now_ns())) > 0) {
        if (now > deadline + LEFT_TOO_LONG_NS)
            return true;
        if (pause_ns < TICK_NS) {
            sleep_ns(pause_ns);
            continue;
        }
        /* A stream that has gone on for long does so a little longer, most likely. */
        int64_t most = now - __atomic_load_n(&stream_began, __ATOMIC_RELAXED);
        if (most < GIVE_WAY_NS_MAX)
            most = GIVE_WAY_NS_MAX;
        if (now - __atomic_load_n(&left_bulk.turn_at, __ATOMIC_RELAXED) < TURN_MEMORY_NS)
            pause_ns = LEFT_NS;
        if (leave_bulk(&mine, pause_ns < most ? pause_ns : most))
            return true;
    }
    return false;
}

static void wake_left_bulk(void)
{
    (void)syscall(SYS_futex, &left_bulk.ended, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* The engine's thread, which is awake anyway: the stream may be over. */
static void rouse_left_bulk(void)
{
    int64_t now = now_ns();
    if (__atomic_load_n(&left_bulk.bulk, __ATOMIC_RELAXED) && !any_urgent(now) &&
        since_urgent(now) >= GAP_NS_MAX)
        wake_left_bulk();
}

static bool is_over(Lane *lane)
{
    pthread_mutex_lock(&lane->mutex);
    bool over = lane->closed || lane->evidence[0];
    pthread_mutex_unlock(&lane->mutex);
    return over;
}

/* Move a turn's bytes. Returns whether whoever left them should see to them. */
static bool move_left(const LeftBulk *bulk)
{
    int all = __atomic_load_n(&turn_left, __ATOMIC_RELAXED), before;
    bool over = false;
    do {
        before = __atomic_load_n(&turn_left, __ATOMIC_RELAXED);
        for (int i = 0; i < bulk->count && has_turn(now_ns()); i++) {
            move_lane(bulk->lanes[i], POLLIN | POLLOUT, bulk->finished);
            over |= is_over(bulk->lanes[i]);
        }
    } while (__atomic_load_n(&turn_left, __ATOMIC_RELAXED) < before);
    /* There were answers only: what is posted next has its turn as soon as it is there. */
    if (bulk->finished->first && all - before < SMALL_STEP_BYTES)
        hasten_turn();
    /* Who wakes up now has none of its own. */
    spend_turn((size_t)before);
    __atomic_store_n(&left_bulk.turn_at, now_ns(), __ATOMIC_RELAXED);
    __atomic_add_fetch(&left_bulk.num_turns, 1, __ATOMIC_RELAXED);
    return over || bulk->finished->first;
}

/* Something urgent has ended: bulk's turn may have come. */
static void take_turn_for_bulk(void)
{
    if (!__atomic_load_n(&left_bulk.bulk, __ATOMIC_RELAXED) || has_gaps() || !is_turn_due() ||
        pthread_mutex_trylock(&left_bulk.mutex))
        return;
    const LeftBulk *bulk = left_bulk.bulk;
    stands_in = true;
    if (bulk && give_way_ns(now_ns()) == 0 && move_left(bulk)) {
        __atomic_store_n(&left_bulk.ended, 1, __ATOMIC_RELAXED);
        wake_left_bulk();
    }
    stands_in = false;
    pthread_mutex_unlock(&left_bulk.mutex);
}

PyDoc_STRVAR(num_turns_taken_doc,
             "num_turns_taken()\n--\n\nReturn how many turns of bulk the threads of urgent streams "
             "have taken for others of this process.");

static PyObject *num_turns_taken(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    return PyLong_FromUnsignedLong(__atomic_load_n(&left_bulk.num_turns, __ATOMIC_RELAXED));
}
