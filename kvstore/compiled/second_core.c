/* Large copies on two cores: where a core of this machine is idle, a thread of this process helps.
 *
 *   owner    units 0   2   3     5 ...     the thread that was called: it returns with all done
 *   partner          1       4      ...    takes units too, if it wakes up in time
 *
 * Who takes a unit is settled unit by unit, so that nobody waits for a partner that gets no core.
 *
 * A sum need not be made in one thread: xxh3 adds the stripes of a block up, and only what follows a
 * block depends on what was before it. So each block's sum is taken from nothing, by whoever copies
 * it, and the owner folds them in their order into the sum of all: the same number, bit by bit.
 */

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#define UNIT_BLOCKS 128
#define UNIT ((size_t)UNIT_BLOCKS * BLOCK)
#define AHEAD_UNITS 32             /* that may be taken beyond those that are folded */
#define SHARED_BYTES_MIN (8 << 20) /* below, a partner is hardly awake before the owner is done */
/* Two cores wait less for the lines that they store into than for memory, as long as those stay in
 * the cache: only what is longer by so much goes past it. */
#define STREAM_FACTOR 8
#define PARTNER_STACK (256 << 10)
#define UNITS_BETWEEN_LOOKS 16 /* of the partner, whether it takes a core from somebody */
#define LEAVE_LOOKS 4096 /* for a partner in its last unit, before the owner sleeps */

/* Work in units. `taken` and `folded` are counted up atomically; `folded` by the owner alone. */
typedef struct Work {
    void (*run)(struct Work *work, size_t unit);
    size_t units, taken, folded;
} Work;

static uint64_t pass(unsigned char *target, const unsigned char *data, size_t nbytes,
                     size_t stream_bytes);

typedef enum { ALONE, WHERE_IDLE, ALWAYS } Sharing;

/* The partner of this process. One owner at a time has it: who finds it taken works alone. */
static struct {
    pthread_mutex_t mutex; /* of all but `owned`, `sharing` and `seen` */
    pthread_cond_t come, gone;
    Work *work;
    uint64_t number;      /* of the work */
    bool started, inside; /* `inside` is looked at without the mutex too */
    uint64_t seen;        /* units that the partner has done, ever; atomic */
    int owned;            /* atomic */
    int sharing;          /* a `Sharing`, atomic */
} partner = {.mutex = PTHREAD_MUTEX_INITIALIZER, .come = PTHREAD_COND_INITIALIZER,
             .gone = PTHREAD_COND_INITIALIZER, .sharing = WHERE_IDLE};

static int load_file = -1; /* /proc/loadavg, kept open: the question is asked often; atomic */

/* How many threads run or want to now on this machine: "0.20 0.18 0.12 1/80 11206", of which 1.
 * Below 0: it does not say. */
static int threads_running(int file)
{
    char text[128];
    int running;
    ssize_t nbytes = file < 0 ? -1 : pread(file, text, sizeof text - 1, 0);
    text[nbytes > 0 ? nbytes : 0] = 0;
    return sscanf(text, "%*u.%*u %*u.%*u %*u.%*u %d/", &running) == 1 ? running : -1;
}

/* How many more cores this thread may use than threads want to run on the whole machine. */
static int idle_cores(void)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed))
        return INT_MIN; /* more cores than the set has room for: not worth another way to ask */
    int running, cores = CPU_COUNT(&allowed);
    if (cores < 2)
        return INT_MIN;
    int file = __atomic_load_n(&load_file, __ATOMIC_RELAXED);
    if ((running = threads_running(file)) < 0) { /* somebody has closed what is not his: once more */
        file = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
        __atomic_store_n(&load_file, file, __ATOMIC_RELAXED);
        running = threads_running(file);
    }
    return running < 0 ? INT_MIN : cores - running;
}

/* Take a unit; false if there is none, or none yet. */
static bool take_unit(Work *work, size_t *unit)
{
    size_t taken = __atomic_load_n(&work->taken, __ATOMIC_RELAXED);
    do {
        size_t folded = __atomic_load_n(&work->folded, __ATOMIC_ACQUIRE);
        if (taken >= work->units || taken >= folded + AHEAD_UNITS)
            return false;
    } while (!__atomic_compare_exchange_n(&work->taken, &taken, taken + 1, true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    *unit = taken;
    return true;
}

/* Whether the partner goes on after so many units: not where somebody else wants its core by now. */
static bool may_go_on(size_t units)
{
    return units % UNITS_BETWEEN_LOOKS || idle_cores() >= 0 ||
           __atomic_load_n(&partner.sharing, __ATOMIC_RELAXED) == ALWAYS;
}

static void *partner_main(void *nothing)
{
    uint64_t last = 0;
    (void)nothing;
    pthread_mutex_lock(&partner.mutex);
    for (;;) {
        while (!partner.work || partner.number == last)
            pthread_cond_wait(&partner.come, &partner.mutex);
        Work *work = partner.work;
        last = partner.number;
        __atomic_store_n(&partner.inside, true, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&partner.mutex);
        size_t unit, units = 0;
        while (take_unit(work, &unit)) {
            work->run(work, unit);
            __atomic_add_fetch(&partner.seen, 1, __ATOMIC_RELAXED);
            if (!may_go_on(++units))
                break;
        }
        pthread_mutex_lock(&partner.mutex);
        __atomic_store_n(&partner.inside, false, __ATOMIC_RELEASE);
        pthread_cond_signal(&partner.gone);
    }
    return NULL;
}

/* Start the partner if it does not run yet; false if it can't. The mutex is held. */
static bool start_partner(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (partner.started)
        return true;
    if (pthread_attr_init(&attributes))
        return false;
    (void)pthread_attr_setstacksize(&attributes, PARTNER_STACK);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* signals are for the interpreter's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    partner.started = !pthread_create(&thread, &attributes, partner_main, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return partner.started;
}

/* Make the partner this thread's own, if there may be one and the work is worth it. */
static bool own_partner(size_t nbytes)
{
    return nbytes >= SHARED_BYTES_MIN &&
           __atomic_load_n(&partner.sharing, __ATOMIC_RELAXED) != ALONE &&
           !__atomic_exchange_n(&partner.owned, 1, __ATOMIC_ACQUIRE);
}

/* Whether one's partner would get a core now. That is asked before unit 0, 8, 40 ...: who has just
 * answered the owner looks for its next message for a moment, and then the core is idle after all. */
static bool may_share(size_t unit, size_t *ask_at)
{
    if (unit < *ask_at)
        return false;
    *ask_at = 4 * unit + 8;
    int sharing = __atomic_load_n(&partner.sharing, __ATOMIC_RELAXED);
    return sharing == ALWAYS || (sharing == WHERE_IDLE && idle_cores() > 0);
}

/* Tell one's partner of work. Where no thread can be started the owner does it all. */
static void begin_sharing(Work *work)
{
    pthread_mutex_lock(&partner.mutex);
    if (start_partner()) {
        partner.work = work;
        partner.number++;
        pthread_cond_signal(&partner.come);
    } else {
        __atomic_store_n(&partner.sharing, ALONE, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&partner.mutex);
}

/* Take the work back: afterwards the partner knows nothing of it, and what it took is done. */
static void withdraw_work(void)
{
    pthread_mutex_lock(&partner.mutex);
    partner.work = NULL;
    pthread_mutex_unlock(&partner.mutex);
    for (int i = 0; i < LEAVE_LOOKS && __atomic_load_n(&partner.inside, __ATOMIC_ACQUIRE); i++)
        PAUSE();
    pthread_mutex_lock(&partner.mutex);
    while (partner.inside)
        pthread_cond_wait(&partner.gone, &partner.mutex);
    pthread_mutex_unlock(&partner.mutex);
}

static void release_partner(void)
{
    __atomic_store_n(&partner.owned, 0, __ATOMIC_RELEASE);
}

/* Of a child: there is no partner over here, and nobody works for an owner. */
static void forget_partner(void)
{
    pthread_mutex_init(&partner.mutex, NULL);
    pthread_cond_init(&partner.come, NULL);
    pthread_cond_init(&partner.gone, NULL);
    partner.work = NULL;
    partner.started = partner.inside = false;
    partner.owned = 0;
}

/* ---- one long piece ------------------------------------------------------------------------ */

/* The piece that is shared; its memory belongs to who owns the partner. */
static struct {
    Work work;
    unsigned char *target;
    const unsigned char *data;
    size_t blocks;
    Way way;
    uint64_t sums[AHEAD_UNITS][UNIT_BLOCKS][8]; /* of blocks, each from nothing */
    size_t ready[AHEAD_UNITS];                  /* the unit that lies there, plus one; atomic */
} piece;

static void copy_unit(uint64_t acc[8], size_t unit, uint64_t *each)
{
    size_t first = unit * UNIT_BLOCKS, left = piece.blocks - first;
    size_t count = left < UNIT_BLOCKS ? left : UNIT_BLOCKS;
    stripes(acc, piece.target ? piece.target + first * BLOCK : NULL, piece.data + first * BLOCK,
            count * STRIPES_PER_BLOCK, piece.way, each);
}

static void run_piece(Work *work, size_t unit)
{
    (void)work;
    uint64_t none[8] = {0};
    copy_unit(none, unit, piece.sums[unit % AHEAD_UNITS][0]);
    STORES_DONE(); /* before anybody says so */
    __atomic_store_n(&piece.ready[unit % AHEAD_UNITS], unit + 1, __ATOMIC_RELEASE);
}

static void fold_units(uint64_t acc[8])
{
    for (size_t unit = piece.work.folded; unit < piece.work.units; unit++) {
        if (__atomic_load_n(&piece.ready[unit % AHEAD_UNITS], __ATOMIC_ACQUIRE) != unit + 1)
            return;
        size_t left = piece.blocks - unit * UNIT_BLOCKS;
        fold(acc, piece.sums[unit % AHEAD_UNITS][0], left < UNIT_BLOCKS ? left : UNIT_BLOCKS);
        __atomic_store_n(&piece.work.folded, unit + 1, __ATOMIC_RELEASE);
    }
}

/* Do as `stripes` does with whole blocks, together; return their bytes, 0 if that can't be. */
static size_t share_piece(uint64_t acc[8], unsigned char *target, const unsigned char *data,
                          size_t blocks, Way way, size_t stream_bytes)
{
    const struct timespec moment = {.tv_nsec = 20000};
    size_t unit, ask_at = 0;
    bool shared = false;
    if (!own_partner((blocks + 1) * BLOCK)) /* the last one is left to the caller */
        return 0;
    piece.work = (Work){.run = run_piece, .units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS};
    piece.target = target;
    piece.data = data;
    piece.blocks = blocks;
    piece.way = way;
    memset(piece.ready, 0, sizeof piece.ready);
    while (__atomic_load_n(&piece.work.taken, __ATOMIC_RELAXED) < piece.work.units) {
        if (!shared && may_share(piece.work.taken, &ask_at)) {
            shared = true;
            piece.way = way_of(target, blocks * BLOCK / STREAM_FACTOR >= stream_bytes);
            begin_sharing(&piece.work);
        }
        if (!take_unit(&piece.work, &unit)) {
            nanosleep(&moment, NULL); /* far ahead of a partner that has lost its core */
        } else if (unit == piece.work.folded) {
            copy_unit(acc, unit, NULL); /* all before it is in the sum already */
            __atomic_store_n(&piece.work.folded, unit + 1, __ATOMIC_RELEASE);
        } else {
            run_piece(&piece.work, unit);
        }
        fold_units(acc);
    }
    if (shared)
        withdraw_work();
    fold_units(acc);
    release_partner();
    return blocks * BLOCK;
}

/* ---- many pieces --------------------------------------------------------------------------- */

/* Pieces whose sums are their own; `to` is null if they are summed only. */
typedef struct {
    Work work;
    uintptr_t target, source;
    const int64_t *to, *from, *lengths;
    size_t count, per_unit, stream_bytes;
    uint64_t *sums;
} Pieces;

static void run_pieces(Work *work, size_t unit)
{
    Pieces *all = (Pieces *)work;
    size_t first = unit * all->per_unit, left = all->count - first;
    size_t end = first + (left < all->per_unit ? left : all->per_unit);
    for (size_t i = first; i < end; i++)
        all->sums[i] = pass(all->to ? (unsigned char *)(all->target + (uintptr_t)all->to[i]) : NULL,
                            (const unsigned char *)(all->source + (uintptr_t)all->from[i]),
                            (size_t)all->lengths[i], all->stream_bytes);
}

/* Copy and sum them, of `nbytes` in all: together, each or all, where there is enough of them. */
static void sum_pieces(Pieces *all, size_t nbytes, size_t stream_bytes)
{
    size_t mean = nbytes / (all->count ? all->count : 1) + 1, unit, ask_at = 0;
    bool shared = false;
    all->stream_bytes = stream_bytes;
    if (all->count > 1)
        all->stream_bytes = nbytes >= stream_bytes ? 0 : SIZE_MAX;
    if (mean > SHARED_BYTES_MIN || !own_partner(nbytes)) {
        all->per_unit = all->count;
        run_pieces(&all->work, 0);
        return;
    }
    all->per_unit = UNIT / mean + 1;
    all->work.run = run_pieces;
    all->work.units = all->work.folded = (all->count + all->per_unit - 1) / all->per_unit;
    for (;;) {
        if (!shared && may_share(all->work.taken, &ask_at)) {
            shared = true;
            all->stream_bytes = nbytes / STREAM_FACTOR >= stream_bytes ? 0 : SIZE_MAX;
            begin_sharing(&all->work);
        }
        if (!take_unit(&all->work, &unit))
            break;
        run_pieces(&all->work, unit);
    }
    if (shared)
        withdraw_work();
    release_partner();
}
