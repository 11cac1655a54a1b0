/* Cores: two that take turns on one while another is idle.
 *
 *     core 0   requester owner requester owner          core 0   requester requester requester
 *     core 1   idle                             =>      core 1   owner     owner     owner
 *
 * If a sleeper's core is taken for a moment when he is sent something, a kernel wakes him where the
 * sender runs; and where all cores have been busy it does not look for an idle one for tenths of a
 * second. Each request takes twice as long meanwhile: so it is bulk that woke up for a moment, not what
 * it moved, that most of the late activations beside it met. So the owner of a stream without gaps
 * changes its core. If it is sent back, because the other one is wanted too, it does so more rarely. */

#define SHARED_MAX 48 /* requests, one after another */
#define CHANGE_PAUSE_NS_MIN 2000000
#define CHANGE_PAUSE_NS_MAX 1000000000
#define CHANGE_LASTS 16 /* pauses: whoever has stayed so long has not been sent back */
#define FEW_CORES 8     /* of more one is idle, and the kernel finds it */

static unsigned num_cores_changed;

typedef struct {
    unsigned num_shared;
    int64_t changed_at, pause_ns;
} CoreChanges;

/* Go to another core, of those that this thread may use. What somebody else has said meanwhile about
 * where it may run stays: it is looked at once more before it is given back what it had. */
static bool change_core(void)
{
    cpu_set_t allowed, others, found;
    int core = sched_getcpu();
    if (core < 0 || core >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed))
        return false;
    others = allowed;
    CPU_CLR(core, &others);
    if (!CPU_COUNT(&others) || CPU_COUNT(&allowed) > FEW_CORES ||
        sched_setaffinity(0, sizeof others, &others))
        return false;
    if (!sched_getaffinity(0, sizeof found, &found) && CPU_EQUAL(&found, &others))
        (void)sched_setaffinity(0, sizeof allowed, &allowed);
    __atomic_add_fetch(&num_cores_changed, 1, __ATOMIC_RELAXED);
    return true;
}

/* A request of a stream without gaps is expected, over this core or another. Returns whether the core
 * was changed. */
static bool leave_shared_core(CoreChanges *changes, bool shares)
{
    changes->num_shared = shares ? changes->num_shared + 1 : 0;
    if (changes->num_shared < SHARED_MAX)
        return false;
    int64_t now = now_ns(), since = now - changes->changed_at;
    if (since < changes->pause_ns)
        return false;
    if (since > CHANGE_LASTS * changes->pause_ns)
        changes->pause_ns = CHANGE_PAUSE_NS_MIN;
    else if (changes->pause_ns < CHANGE_PAUSE_NS_MAX)
        changes->pause_ns *= 2;
    changes->changed_at = now;
    changes->num_shared = 0;
    return change_core();
}

PyDoc_STRVAR(num_cores_changed_doc,
             "num_cores_changed()\n--\n\nReturn how often an owner of this process has gone to another "
             "core, because whoever sent it a stream of requests without gaps shared its own.");

static PyObject *get_num_cores_changed(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    return PyLong_FromUnsignedLong(__atomic_load_n(&num_cores_changed, __ATOMIC_RELAXED));
}
