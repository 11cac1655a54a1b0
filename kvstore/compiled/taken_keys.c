/* Which keys are taken, in memory that a master shares with the clients of its host.
 *
 *   head     64 whether claims may be made | 128 until when the master leads, 192 when it looks at
 *            posts by itself, in ns of the clock that is named at 256
 *   bucket   how many keys have no word here | 7 words           (a cache line; from 4096 on)
 *   word     print of a key (40 bits) | whose (16) | turn (8)     0: free
 *
 * The master has a word for every block, every key that is being written, and every key it has just
 * been asked to decide about; a client has one for the key that it is putting, and only if it found no
 * other. Both put theirs there first and look afterwards, so of two that want one key at least one
 * sees the other. Two keys of one print are taken for the same: then the master is asked.
 *
 * Part of `kvstore/rows.c` and `kvstore/native.c`. */

#include <sys/mman.h>
#include <sys/stat.h>

#define KEYS_HEAD_BYTES 4096
#define KEYS_OPEN 64
#define KEYS_LEADS_UNTIL 128
#define KEYS_LOOKS_AT 192
#define KEYS_CLOCK 256
#define CLOCK_BYTES 64
#define KEYS_BUCKET_WORDS 8
#define KEYS_BUCKET_BYTES (8 * KEYS_BUCKET_WORDS)
#define OWNER_MASTER 0

typedef struct {
    unsigned char *memory; /* null: none */
    size_t nbytes;
    uint64_t num_buckets; /* a power of two */
} TakenKeys;

static uint64_t shared_load(const void *at)
{
    return __atomic_load_n((const uint64_t *)at, __ATOMIC_SEQ_CST);
}

static void shared_store(void *at, uint64_t value)
{
    __atomic_store_n((uint64_t *)at, value, __ATOMIC_SEQ_CST);
}

static bool shared_swap(void *at, uint64_t expected, uint64_t fresh)
{
    return __atomic_compare_exchange_n((uint64_t *)at, &expected, fresh, false, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

/* Map memory of another process; -1 with an exception. */
static int map_shared(int descriptor, unsigned char **memory, size_t *nbytes)
{
    struct stat found;
    if (fstat(descriptor, &found)) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    void *mapped = MAP_FAILED;
    if (found.st_size > 0)
        mapped = mmap(NULL, (size_t)found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        PyErr_SetString(PyExc_OSError, "memory that cannot be mapped");
        return -1;
    }
    *memory = mapped;
    *nbytes = (size_t)found.st_size;
    return 0;
}

static int map_taken_keys(int descriptor, TakenKeys *keys)
{
    if (map_shared(descriptor, &keys->memory, &keys->nbytes))
        return -1;
    keys->num_buckets =
        keys->nbytes > KEYS_HEAD_BYTES ? (keys->nbytes - KEYS_HEAD_BYTES) / KEYS_BUCKET_BYTES : 0;
    if (keys->num_buckets && !(keys->num_buckets & (keys->num_buckets - 1)))
        return 0;
    munmap(keys->memory, keys->nbytes);
    keys->memory = NULL;
    PyErr_SetString(PyExc_ValueError, "memory of another size than that of taken keys");
    return -1;
}

static void unmap_taken_keys(TakenKeys *keys)
{
    if (keys->memory)
        munmap(keys->memory, keys->nbytes);
    keys->memory = NULL;
}

/* Where a key's word may be, and what it is but for its owner and turn. */
static uint64_t *bucket_of(const TakenKeys *keys, const unsigned char *key, uint64_t *print)
{
    uint64_t low, high;
    memcpy(&low, key, 8);
    memcpy(&high, key + 8, 8);
    uint64_t mixed = low * 0x9E3779B97F4A7C15u ^ (high << 31 | high >> 33) * 0xD6E8FEB86659FD93u;
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93u; /* as splitmix does: keys may be numbers */
    mixed = (mixed ^ mixed >> 29) * 0x9E3779B97F4A7C15u;
    mixed ^= mixed >> 32;
    *print = mixed >> 24 ? mixed & ~(uint64_t)0xFFFFFF : (uint64_t)1 << 24;
    uint64_t bucket = mixed & (keys->num_buckets - 1) & 0xFFFFFF;
    return (uint64_t *)(keys->memory + KEYS_HEAD_BYTES) + bucket * KEYS_BUCKET_WORDS;
}

static bool has_print(uint64_t word, uint64_t print)
{
    return (word & ~(uint64_t)0xFFFFFF) == print;
}
