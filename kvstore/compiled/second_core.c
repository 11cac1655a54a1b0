/* Large copies on two cores: where a core of this machine is idle, a thread of this process helps.
 *
 *   owner     0 1 2 3 ...  ->            the thread that was called: it returns with all done
 *   partner               n/2 ...  ->    takes units of the other half, if it wakes up in time
 *
 * Each goes through a run of its own, as caches and prefetchers like it (a third faster here than
 * units in turn), and who is done takes units from the end of the other's. So who takes a unit is
 * settled unit by unit, and nobody waits for a partner that gets no core.
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
#define WINDOW_UNITS 128           /* of one piece, that are shared at a time: sums have room for */
#define SHARED_BYTES_MIN (8 << 20) /* below, a partner is hardly awake before the owner is done */
/* Two cores wait less for the lines that they store into than for memory, as long as those stay in
 * the cache: only what is longer by so much goes past it. */
#define STREAM_FACTOR 8
#define PARTNER_STACK (256 << 10)
#define UNITS_BETWEEN_LOOKS 16 /* of the partner, whether it takes a core from somebody */
#define LEAVE_LOOKS 4096 /* for a partner in its last unit, before the owner sleeps */
/* To wake a core that has gone idle takes a tenth of such a copy: before it sleeps, the partner looks
 * for the next for a moment, and offers its core meanwhile. Whoever looks in vain does so rarely. */
#define NEXT_NS 200000
/* A core that is taken for longer was wanted by somebody busy. A master that answers the owner gives it
 * back sooner, and the next copy comes right after its answer. */
#define TAKEN_NS 150000
#define LEFT_OUT_MAX 255
/* Who sums up only is in no hurry: a disk is at the same bytes, and whoever gives it more to do may
 * want this core. He has it after so many; if he keeps it longer, he was no such, and waits himself. */
#define LET_BYTES_MIN (256 << 10)
#define LET_NS_MAX 300000

/* Work in units: two runs of them, `first << 32 | end`, which are taken from atomically. */
typedef struct Work {
    void (*run)(struct Work *work, size_t unit);
    uint64_t runs[2]; /* the owner's, the partner's */
} Work;

static uint64_t pass(unsigned char *target, const unsigned char *data, size_t nbytes,
                     size_t stream_bytes);

typedef enum { ALONE, WHERE_IDLE, ALWAYS } Sharing;

/* The partner of this process. One owner at a time has it: who finds it taken works alone. */
static struct {
    pthread_mutex_t mutex; /* of all but `owned`, `sharing` and `seen` */
    pthread_cond_t come, gone;
    Work *work;
    uint64_t number;      /* of the work; looked at without the mutex too, as the next two are */
    bool started, inside;
    bool looking;         /* for work, on a core that nobody else wants */
    int left_out, to_leave_out; /* looks; the partner's own */
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

static uint64_t run_of(size_t first, size_t end)
{
    return (uint64_t)first << 32 | end;
}

static size_t units_left(const Work *work, int whose)
{
    uint64_t run = __atomic_load_n(&work->runs[whose], __ATOMIC_RELAXED);
    size_t first = run >> 32, end = (uint32_t)run;
    return first < end ? end - first : 0;
}

/* Take a unit of a run, from its front or its end; false if there is none. */
static bool take_of(uint64_t *run, bool front, size_t *unit)
{
    uint64_t found = __atomic_load_n(run, __ATOMIC_RELAXED), left;
    do {
        if (found >> 32 >= (uint32_t)found)
            return false;
        *unit = front ? found >> 32 : (uint32_t)found - 1;
        left = front ? found + ((uint64_t)1 << 32) : found - 1;
    } while (!__atomic_compare_exchange_n(run, &found, left, true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return true;
}

/* Take a unit of one's own run, or else of the other's. Of one that nobody is at from its front. */
static bool take_unit(Work *work, int who, size_t *unit)
{
    bool alone = !who && !__atomic_load_n(&partner.inside, __ATOMIC_RELAXED);
    return take_of(&work->runs[who], true, unit) || take_of(&work->runs[!who], alone, unit);
}

/* Whether the partner goes on after so many units: not where somebody else wants its core by now. */
static bool may_go_on(size_t units)
{
    return units % UNITS_BETWEEN_LOOKS || idle_cores() >= 0 ||
           __atomic_load_n(&partner.sharing, __ATOMIC_RELAXED) == ALWAYS;
}

static int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Look for work after this for a moment, unless somebody else wants the core or it seldom comes. */
static void look_for_work(uint64_t last)
{
    if (partner.left_out++ < partner.to_leave_out)
        return;
    bool found = false, wanted = false;
    __atomic_store_n(&partner.looking, true, __ATOMIC_RELAXED);
    for (int64_t begin = clock_ns(), now = begin; !found && !wanted && now < begin + NEXT_NS;) {
        sched_yield();
        int64_t later = clock_ns();
        wanted = later - now > TAKEN_NS;
        now = later;
        found = __atomic_load_n(&partner.number, __ATOMIC_RELAXED) != last;
    }
    __atomic_store_n(&partner.looking, false, __ATOMIC_RELAXED);
    int more = 2 * partner.to_leave_out + 1;
    partner.left_out = 0;
    if (!wanted)
        partner.to_leave_out = found ? 0 : more < LEFT_OUT_MAX ? more : LEFT_OUT_MAX;
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
        bool stays = true;
        while (stays && take_unit(work, 1, &unit)) {
            work->run(work, unit);
            __atomic_add_fetch(&partner.seen, 1, __ATOMIC_RELAXED);
            stays = may_go_on(++units);
        }
        pthread_mutex_lock(&partner.mutex);
        __atomic_store_n(&partner.inside, false, __ATOMIC_RELEASE);
        pthread_cond_signal(&partner.gone);
        if (stays) {
            pthread_mutex_unlock(&partner.mutex);
            look_for_work(last);
            pthread_mutex_lock(&partner.mutex);
        }
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

/* Whether one's partner would get a core now: it looks for work on one, or one is idle. That is asked
 * before unit 0, 8, 40 ...: who has just answered the owner looks for its next message for a moment,
 * and then the core is idle after all. */
static bool may_share(size_t unit, size_t *ask_at)
{
    if (unit < *ask_at)
        return false;
    *ask_at = 4 * unit + 8;
    int sharing = __atomic_load_n(&partner.sharing, __ATOMIC_RELAXED);
    return sharing == ALWAYS ||
           (sharing == WHERE_IDLE &&
            (__atomic_load_n(&partner.looking, __ATOMIC_RELAXED) || idle_cores() > 0));
}

/* Tell one's partner of work, and give it the half of what is left. Where no thread can be started
 * the owner does it all. */
static void begin_sharing(Work *work)
{
    size_t left = units_left(work, 0), end = (uint32_t)work->runs[0], middle = end - left / 2;
    pthread_mutex_lock(&partner.mutex);
    if (start_partner()) {
        work->runs[1] = run_of(middle, end);
        work->runs[0] = run_of(end - left, middle);
        partner.work = work;
        __atomic_add_fetch(&partner.number, 1, __ATOMIC_RELAXED);
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
    partner.started = partner.inside = partner.looking = false;
    partner.owned = 0;
}

/* ---- one long piece ------------------------------------------------------------------------ */

/* The window of a piece that is shared; its memory belongs to who owns the partner. */
static struct {
    Work work;
    unsigned char *target;
    const unsigned char *data;
    size_t blocks, folded; /* units of which all before are in the sum: the owner's own */
    Way way;
    uint64_t sums[WINDOW_UNITS][UNIT_BLOCKS][8]; /* of blocks, each from nothing */
    bool ready[WINDOW_UNITS];                    /* they lie there; atomic */
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
    copy_unit(none, unit, piece.sums[unit][0]);
    STORES_DONE(); /* before anybody says so */
    __atomic_store_n(&piece.ready[unit], true, __ATOMIC_RELEASE);
}

/* Fold what is ready and next. */
static void fold_units(uint64_t acc[8])
{
    for (size_t unit; (unit = piece.folded) * UNIT_BLOCKS < piece.blocks; piece.folded++) {
        if (!__atomic_load_n(&piece.ready[unit], __ATOMIC_ACQUIRE))
            return;
        size_t left = piece.blocks - unit * UNIT_BLOCKS;
        fold(acc, piece.sums[unit][0], left < UNIT_BLOCKS ? left : UNIT_BLOCKS);
    }
}

/* Copy and sum the window that `piece` says; past the caches so, if it is shared. */
static void share_window(uint64_t acc[8], Way shared_way)
{
    size_t units = (piece.blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS, unit, ask_at = 0;
    bool shared = false;
    piece.work = (Work){.run = run_piece, .runs = {run_of(0, units)}};
    piece.folded = 0;
    memset(piece.ready, 0, sizeof piece.ready);
    for (;;) {
        if (!shared && may_share(units - units_left(&piece.work, 0), &ask_at)) {
            shared = true;
            piece.way = shared_way;
            begin_sharing(&piece.work);
        }
        if (!take_unit(&piece.work, 0, &unit))
            break;
        if (unit == piece.folded) {
            copy_unit(acc, unit, NULL); /* all before it is in the sum already */
            piece.folded++;
        } else {
            run_piece(&piece.work, unit);
        }
        fold_units(acc);
    }
    if (shared)
        withdraw_work();
    fold_units(acc);
}

/* Do as `stripes` does with whole blocks, together; return their bytes, 0 if that can't be. */
static size_t share_piece(uint64_t acc[8], unsigned char *target, const unsigned char *data,
                          size_t blocks, Way way, size_t stream_bytes)
{
    const size_t most = (size_t)WINDOW_UNITS * UNIT_BLOCKS;
    Way shared_way = way_of(target, blocks * BLOCK / STREAM_FACTOR >= stream_bytes);
    if (!own_partner((blocks + 1) * BLOCK)) /* the last one is left to the caller */
        return 0;
    for (size_t done = 0; done < blocks; done += piece.blocks) {
        piece.target = target ? target + done * BLOCK : NULL;
        piece.data = data + done * BLOCK;
        piece.blocks = blocks - done < most ? blocks - done : most;
        piece.way = way;
        share_window(acc, shared_way);
    }
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
    bool crowded; /* others keep the core when it is left to them */
} Pieces;

/* Leave the core to whoever wants it; for how many nanoseconds it was somebody else's. */
static int64_t let_others_run(void)
{
    int64_t before = clock_ns();
    sched_yield();
    return clock_ns() - before;
}

static void run_pieces(Work *work, size_t unit)
{
    Pieces *all = (Pieces *)work;
    size_t first = unit * all->per_unit, left = all->count - first;
    size_t end = first + (left < all->per_unit ? left : all->per_unit);
    for (size_t i = first; i < end; i++) {
        all->sums[i] = pass(all->to ? (unsigned char *)(all->target + (uintptr_t)all->to[i]) : NULL,
                            (const unsigned char *)(all->source + (uintptr_t)all->from[i]),
                            (size_t)all->lengths[i], all->stream_bytes);
        if (!all->to && !all->crowded && all->lengths[i] >= LET_BYTES_MIN)
            all->crowded = let_others_run() > LET_NS_MAX;
    }
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
    size_t units = (all->count + all->per_unit - 1) / all->per_unit;
    all->work.runs[0] = run_of(0, units);
    for (;;) {
        if (!shared && may_share(units - units_left(&all->work, 0), &ask_at)) {
            shared = true;
            all->stream_bytes = nbytes / STREAM_FACTOR >= stream_bytes ? 0 : SIZE_MAX;
            begin_sharing(&all->work);
        }
        if (!take_unit(&all->work, 0, &unit))
            break;
        run_pieces(&all->work, unit);
    }
    if (shared)
        withdraw_work();
    release_partner();
}
