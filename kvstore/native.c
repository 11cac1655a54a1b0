/* Copies that compute a block's checksum on the way: xxh3_64 with the default secret and seed 0.
 *
 * The algorithm is specified at https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
 * (XXH3, inputs longer than 240 bytes). What is here is written after it:
 *
 *   input     block of 16 stripes | block | ... | last block | ends with the last 64 bytes again
 *   stripe    64 bytes, 8 lanes: acc[i] += lo32(x) * hi32(x), acc[i ^ 1] += data[i],
 *             x = data[i] ^ secret[8 n + 8 i] for stripe n of its block
 *   block     then each lane: acc = (acc ^ acc >> 47 ^ secret) * P32_1
 *
 * A stripe is loaded once, for the sum and for the store: memory is read once and written once, and
 * the sum is that of the bytes that were stored, even if somebody changes the source meanwhile.
 */

#define _GNU_SOURCE /* sched_getaffinity */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "compiled/arguments.c"

#define STRIPE 64
#define SECRET_BYTES 192
#define STRIPES_PER_BLOCK ((SECRET_BYTES - STRIPE) / 8)
#define BLOCK (STRIPE * STRIPES_PER_BLOCK)
#define SHORT_BYTES 240          /* up to here xxh3 is another function, left to the caller */
#define GIL_BYTES (16 << 10)     /* below this, releasing the lock costs more than the copy */

#define P32_1 0x9E3779B1U
#define P32_2 0x85EBCA77U
#define P32_3 0xC2B2AE3DU
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL

static const unsigned char secret[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t word(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static void add_stripe(uint64_t acc[8], const unsigned char *data, const unsigned char *key)
{
    for (int i = 0; i < 8; i++) {
        uint64_t value = word(data + 8 * i), mixed = value ^ word(key + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
    }
}

static void scramble(uint64_t acc[8])
{
    const unsigned char *key = secret + SECRET_BYTES - STRIPE;
    for (int i = 0; i < 8; i++)
        acc[i] = (acc[i] ^ acc[i] >> 47 ^ word(key + 8 * i)) * P32_1;
}

/* What becomes of the bytes that are summed. */
typedef enum {
    SUM,     /* nothing */
    STORE,   /* they go to the target through the caches */
    STREAM,  /* past the caches; the target is aligned to a stripe */
    SHIFTED, /* past the caches, though the target is not aligned */
} Way;

/* Sum whole stripes, scramble after every 16th, and store them.
 *
 * `each`, unless it is null: where the sum of each block goes, instead of being scrambled into `acc`,
 * which is zero and is so again after whole blocks. */
typedef void (*Stripes)(uint64_t acc[8], unsigned char *target, const unsigned char *data,
                        size_t count, Way way, uint64_t *each);

/* Go on where sums of whole blocks were kept: as if their stripes came now. */
typedef void (*Fold)(uint64_t acc[8], const uint64_t *each, size_t blocks);

static void fold_plain(uint64_t acc[8], const uint64_t *each, size_t blocks)
{
    for (; blocks; blocks--, each += 8) {
        for (int i = 0; i < 8; i++)
            acc[i] += each[i];
        scramble(acc);
    }
}

static void stripes_plain(uint64_t acc[8], unsigned char *target, const unsigned char *data,
                          size_t count, Way way, uint64_t *each)
{
    for (size_t n = 0; n < count; n++) {
        size_t of_block = n % STRIPES_PER_BLOCK;
        const unsigned char *from = data + n * STRIPE;
        if (way != SUM)
            from = memcpy(target + n * STRIPE, from, STRIPE);
        add_stripe(acc, from, secret + 8 * of_block);
        if (of_block < STRIPES_PER_BLOCK - 1)
            continue;
        if (!each) {
            scramble(acc);
            continue;
        }
        memcpy(each, acc, 8 * sizeof *acc);
        memset(acc, 0, 8 * sizeof *acc);
        each += 8;
    }
}

#if defined(__x86_64__)
/* How far ahead of its use memory is asked for: what comes too late is waited for, what lies behind
 * the end was fetched for nothing. */
#define AHEAD_MAX (16 << 10)
#define AHEAD(stripes) ((stripes) * STRIPE / 4 < AHEAD_MAX ? (stripes) * STRIPE / 4 : AHEAD_MAX)
#define PAUSE() _mm_pause()
#define STORES_DONE() _mm_sfence() /* those past the caches too */
#define INLINE static inline __attribute__((always_inline))
/* What is summed is what is stored: a compiler may load again what is used twice, and somebody may
 * have changed it meanwhile. Behind this a vector is in a register, and comes from nowhere else. */
#define LOADED(vector) __asm__ volatile("" : "+v"(vector))

__attribute__((target("avx2"))) static __m256i scramble_avx2(__m256i acc, const unsigned char *key)
{
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    acc = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
    acc = _mm256_xor_si256(acc, _mm256_loadu_si256((const __m256i *)key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) static void fold_avx2(uint64_t acc[8], const uint64_t *each,
                                                      size_t blocks)
{
    const unsigned char *key = secret + SECRET_BYTES - STRIPE;
    __m256i low = _mm256_loadu_si256((const __m256i *)acc);
    __m256i high = _mm256_loadu_si256((const __m256i *)(acc + 4));
    for (; blocks; blocks--, each += 8) {
        low = _mm256_add_epi64(low, _mm256_loadu_si256((const __m256i *)each));
        high = _mm256_add_epi64(high, _mm256_loadu_si256((const __m256i *)(each + 4)));
        low = scramble_avx2(low, key);
        high = scramble_avx2(high, key + 32);
    }
    _mm256_storeu_si256((__m256i *)acc, low);
    _mm256_storeu_si256((__m256i *)(acc + 4), high);
}

__attribute__((target("avx2"))) static void stripes_avx2(uint64_t acc[8], unsigned char *target,
                                                         const unsigned char *data, size_t count,
                                                         Way way, uint64_t *each)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)acc);
    __m256i high = _mm256_loadu_si256((const __m256i *)(acc + 4));
    const size_t ahead = AHEAD(count);
    for (size_t n = 0; n < count; n++) {
        const unsigned char *from = data + n * STRIPE;
        const unsigned char *key = secret + 8 * (n % STRIPES_PER_BLOCK);
        _mm_prefetch((const char *)from + ahead, _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256((const __m256i *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
        LOADED(a);
        LOADED(b);
        __m256i x = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)key));
        __m256i y = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(key + 32)));
        x = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
        y = _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32));
        low = _mm256_add_epi64(low, _mm256_add_epi64(x, _mm256_shuffle_epi32(a, 0x4E)));
        high = _mm256_add_epi64(high, _mm256_add_epi64(y, _mm256_shuffle_epi32(b, 0x4E)));
        if (way == STREAM) {
            _mm256_stream_si256((__m256i *)(target + n * STRIPE), a);
            _mm256_stream_si256((__m256i *)(target + n * STRIPE + 32), b);
        } else if (way != SUM) {
            _mm256_storeu_si256((__m256i *)(target + n * STRIPE), a);
            _mm256_storeu_si256((__m256i *)(target + n * STRIPE + 32), b);
        }
        if (n % STRIPES_PER_BLOCK < STRIPES_PER_BLOCK - 1)
            continue;
        if (each) {
            _mm256_storeu_si256((__m256i *)each, low);
            _mm256_storeu_si256((__m256i *)(each + 4), high);
            low = high = _mm256_setzero_si256();
            each += 8;
        } else {
            low = scramble_avx2(low, secret + SECRET_BYTES - STRIPE);
            high = scramble_avx2(high, secret + SECRET_BYTES - STRIPE + 32);
        }
    }
    _mm256_storeu_si256((__m256i *)acc, low);
    _mm256_storeu_si256((__m256i *)(acc + 4), high);
}

#define AVX512 __attribute__((target("avx512f")))
#define VBMI __attribute__((target("avx512f,avx512bw,avx512vbmi")))

AVX512 INLINE __m512i summed_avx512(__m512i sum, __m512i a, size_t of_block)
{
    __m512i x = _mm512_xor_si512(a, _mm512_loadu_si512(secret + 8 * of_block));
    x = _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32));
    return _mm512_add_epi64(sum, _mm512_add_epi64(x, _mm512_shuffle_epi32(a, 0x4E)));
}

AVX512 INLINE __m512i scrambled_avx512(__m512i sum)
{
    const __m512i prime = _mm512_set1_epi32((int)P32_1);
    sum = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
    sum = _mm512_xor_si512(sum, _mm512_loadu_si512(secret + SECRET_BYTES - STRIPE));
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(high, 32));
}

AVX512 INLINE __m512i block_avx512(__m512i sum, unsigned char *target, const unsigned char *data,
                                   size_t count, size_t ahead, Way way)
{
    for (size_t n = 0; n < count; n++) {
        _mm_prefetch((const char *)data + n * STRIPE + ahead, _MM_HINT_T0);
        __m512i a = _mm512_loadu_si512(data + n * STRIPE);
        LOADED(a);
        sum = summed_avx512(sum, a, n);
        if (way == STREAM)
            _mm512_stream_si512((__m512i *)(target + n * STRIPE), a);
        else if (way == STORE)
            _mm512_storeu_si512(target + n * STRIPE, a);
    }
    return sum;
}

/* What becomes of the sum at the end of a block. */
AVX512 INLINE __m512i ended_avx512(__m512i sum, uint64_t **each)
{
    if (!*each)
        return scrambled_avx512(sum);
    _mm512_storeu_si512(*each, sum);
    *each += 8;
    return _mm512_setzero_si512();
}

AVX512 static void fold_avx512(uint64_t acc[8], const uint64_t *each, size_t blocks)
{
    __m512i sum = _mm512_loadu_si512(acc);
    for (; blocks; blocks--, each += 8)
        sum = scrambled_avx512(_mm512_add_epi64(sum, _mm512_loadu_si512(each)));
    _mm512_storeu_si512(acc, sum);
}

AVX512 INLINE void run_avx512(uint64_t acc[8], unsigned char *target, const unsigned char *data,
                              size_t count, Way way, uint64_t *each)
{
    const size_t ahead = AHEAD(count);
    __m512i sum = _mm512_loadu_si512(acc);
    for (; count >= STRIPES_PER_BLOCK; count -= STRIPES_PER_BLOCK, data += BLOCK) {
        sum = ended_avx512(block_avx512(sum, target, data, STRIPES_PER_BLOCK, ahead, way), &each);
        if (way != SUM)
            target += BLOCK;
    }
    _mm512_storeu_si512(acc, block_avx512(sum, target, data, count, ahead, way));
}

AVX512 static void stripes_avx512(uint64_t acc[8], unsigned char *target,
                                  const unsigned char *data, size_t count, Way way, uint64_t *each)
{
    if (way == SUM)
        run_avx512(acc, target, data, count, SUM, each);
    else if (way == STREAM)
        run_avx512(acc, target, data, count, STREAM, each);
    else
        run_avx512(acc, target, data, count, STORE, each);
}

/* Line up what was loaded with the stripes of the target, in registers: loaded once all the same.
 *
 *   data      [     stripe 0     |     stripe 1     | ...
 *   target    [ head |  aligned, streamed  |  aligned ... | tail ]                              */
VBMI static void stripes_vbmi(uint64_t acc[8], unsigned char *target, const unsigned char *data,
                              size_t count, Way way, uint64_t *each)
{
    if (way != SHIFTED || !count) {
        stripes_avx512(acc, target, data, count, way == SHIFTED ? STORE : way, each);
        return;
    }
    const size_t head = -(uintptr_t)target & (STRIPE - 1), ahead = AHEAD(count);
    unsigned char order[STRIPE];
    for (size_t i = 0; i < STRIPE; i++)
        order[i] = (unsigned char)(head + i);
    const __m512i places = _mm512_loadu_si512(order);
    __m512i sum = _mm512_loadu_si512(acc), last = _mm512_loadu_si512(data);
    LOADED(last);
    sum = summed_avx512(sum, last, 0);
    _mm512_mask_storeu_epi8(target, ~0ULL >> (STRIPE - head), last);
    target += head;
    for (size_t n = 1; n < count; n++) {
        size_t of_block = n % STRIPES_PER_BLOCK;
        _mm_prefetch((const char *)data + n * STRIPE + ahead, _MM_HINT_T0);
        __m512i a = _mm512_loadu_si512(data + n * STRIPE);
        LOADED(a);
        sum = summed_avx512(sum, a, of_block);
        _mm512_stream_si512((__m512i *)target, _mm512_permutex2var_epi8(last, places, a));
        target += STRIPE;
        last = a;
        if (of_block == STRIPES_PER_BLOCK - 1)
            sum = ended_avx512(sum, &each);
    }
    _mm512_mask_storeu_epi8(target, ~0ULL >> head, _mm512_permutex2var_epi8(last, places, last));
    _mm512_storeu_si512(acc, sum);
}
#endif

#ifndef PAUSE
#define PAUSE()
#define STORES_DONE()
#endif

static Way way_of(const unsigned char *target, bool past_caches)
{
    bool aligned = ((uintptr_t)target & (STRIPE - 1)) == 0;
    return !target ? SUM : !past_caches ? STORE : aligned ? STREAM : SHIFTED;
}

static Stripes stripes = stripes_plain;
static Fold fold = fold_plain;

#include "compiled/second_core.c"

static uint64_t folded_product(uint64_t a, uint64_t b)
{
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Sum `nbytes` > SHORT_BYTES bytes and copy them, unless `target` is null.
 *
 * From `stream_bytes` on they go past the caches, where that can be done. */
static uint64_t pass(unsigned char *target, const unsigned char *data, size_t nbytes,
                     size_t stream_bytes)
{
    uint64_t acc[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    /* The last stripe is another one, and after it nothing is scrambled. */
    size_t count = (nbytes - 1) / STRIPE, done = count * STRIPE;
    Way way = way_of(target, nbytes >= stream_bytes);
    size_t shared = share_piece(acc, target, data, count / STRIPES_PER_BLOCK, way, stream_bytes);
    stripes(acc, target ? target + shared : NULL, data + shared, count - shared / STRIPE, way, NULL);
    /* Not read back from the target: what went past the caches would have to come from memory. */
    unsigned char last[STRIPE];
    memcpy(last, data + nbytes - STRIPE, STRIPE);
    __asm__ volatile("" : "+m"(last)); /* what is summed is what is stored */
    if (target)
        memcpy(target + done, last + STRIPE - (nbytes - done), nbytes - done);
    add_stripe(acc, last, secret + SECRET_BYTES - STRIPE - 7);
    if (way == STREAM || way == SHIFTED)
        STORES_DONE();
    uint64_t sum = nbytes * P64_1;
    for (int i = 0; i < 4; i++)
        sum += folded_product(acc[2 * i] ^ word(secret + 11 + 16 * i),
                              acc[2 * i + 1] ^ word(secret + 11 + 16 * i + 8));
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9ULL;
    return sum ^ sum >> 32;
}

/* ---- Python ------------------------------------------------------------------------------- */

typedef struct {
    Py_buffer buffer;
    const int64_t *values;
    Py_ssize_t count;
} Ints;

static int take_ints(PyObject *object, Ints *ints)
{
    if (PyObject_GetBuffer(object, &ints->buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT))
        return -1;
    const char *format = ints->buffer.format ? ints->buffer.format : "B";
    if (ints->buffer.itemsize != 8 || ints->buffer.ndim != 1 || !strchr("lq", format[0])) {
        PyErr_SetString(PyExc_ValueError, "offsets and lengths must be 1-d arrays of int64");
        PyBuffer_Release(&ints->buffer);
        return -1;
    }
    ints->values = ints->buffer.buf;
    ints->count = ints->buffer.len / 8;
    return 0;
}

static int take_address(PyObject *object, uintptr_t *address)
{
    void *pointer = PyLong_AsVoidPtr(object);
    if (!pointer && PyErr_Occurred())
        return -1;
    *address = (uintptr_t)pointer;
    return 0;
}

static PyObject *sums_of(uintptr_t target, uintptr_t source, const Ints *to, const Ints *from,
                         const Ints *lengths, int64_t stream_bytes)
{
    int64_t nbytes = 0;
    for (Py_ssize_t i = 0; i < lengths->count; i++) {
        if (lengths->values[i] <= SHORT_BYTES) {
            PyErr_Format(PyExc_ValueError, "a piece of %lld bytes, not more than %d",
                         (long long)lengths->values[i], SHORT_BYTES);
            return NULL;
        }
        nbytes += lengths->values[i];
    }
    PyObject *result = PyBytes_FromStringAndSize(NULL, lengths->count * 8);
    if (!result)
        return NULL;
    uint64_t *sums = (uint64_t *)PyBytes_AS_STRING(result);
    PyThreadState *state = nbytes >= GIL_BYTES ? PyEval_SaveThread() : NULL;
    sum_pieces(&(Pieces){.target = target, .source = source, .to = to ? to->values : NULL,
                         .from = from->values, .lengths = lengths->values,
                         .count = (size_t)lengths->count, .sums = sums},
               (size_t)nbytes, (size_t)stream_bytes);
    if (state)
        PyEval_RestoreThread(state);
    return result;
}

PyDoc_STRVAR(copy_summed_doc,
             "copy_summed(target_base, source_base, target_offsets, source_offsets, lengths,"
             " stream_bytes)\n--\n\n"
             "Copy pieces that do not overlap; return the xxh3_64 of each, as native uint64.\n\n"
             "From `stream_bytes` in all on, at least 0, they go past the caches; on two cores later.");

static PyObject *copy_summed(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    uintptr_t target, source;
    Ints to, from, lengths;
    PyObject *result = NULL;
    if (expect(count, 6, "copy_summed"))
        return NULL;
    long long stream_bytes = PyLong_AsLongLong(args[5]);
    if (stream_bytes == -1 && PyErr_Occurred())
        return NULL;
    if (stream_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "stream_bytes is below 0");
        return NULL;
    }
    if (take_address(args[0], &target) || take_address(args[1], &source) ||
        take_ints(args[2], &to))
        return NULL;
    if (!take_ints(args[3], &from)) {
        if (!take_ints(args[4], &lengths)) {
            if (to.count != from.count || to.count != lengths.count)
                PyErr_SetString(PyExc_ValueError, "offsets and lengths differ in number");
            else
                result = sums_of(target, source, &to, &from, &lengths, stream_bytes);
            PyBuffer_Release(&lengths.buffer);
        }
        PyBuffer_Release(&from.buffer);
    }
    PyBuffer_Release(&to.buffer);
    return result;
}

PyDoc_STRVAR(copy_one_summed_doc,
             "copy_one_summed(target, target_offset, source, source_offset, nbytes, stream_bytes)"
             "\n--\n\nCopy one piece between buffers and return its xxh3_64.\n\n"
             "From `stream_bytes` on, at least 0, it goes past the caches. Raises ValueError if it "
             "does not lie in both, or is too short.");

static PyObject *copy_one_summed(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_buffer target, source;
    PyObject *result = NULL;
    if (expect(count, 6, "copy_one_summed"))
        return NULL;
    Py_ssize_t to = PyLong_AsSsize_t(args[1]), from = PyLong_AsSsize_t(args[3]);
    Py_ssize_t nbytes = PyLong_AsSsize_t(args[4]), stream_bytes = PyLong_AsSsize_t(args[5]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &target, PyBUF_WRITABLE))
        return NULL;
    if (!PyObject_GetBuffer(args[2], &source, PyBUF_SIMPLE)) {
        if (nbytes <= SHORT_BYTES || to < 0 || from < 0 || nbytes > target.len - to ||
            nbytes > source.len - from || stream_bytes < 0) {
            PyErr_SetString(PyExc_ValueError, "a piece that is too short, or not in both buffers");
        } else {
            PyThreadState *state = nbytes >= GIL_BYTES ? PyEval_SaveThread() : NULL;
            uint64_t sum = pass((unsigned char *)target.buf + to,
                                (const unsigned char *)source.buf + from, (size_t)nbytes,
                                (size_t)stream_bytes);
            if (state)
                PyEval_RestoreThread(state);
            result = PyLong_FromUnsignedLongLong(sum);
        }
        PyBuffer_Release(&source);
    }
    PyBuffer_Release(&target);
    return result;
}

PyDoc_STRVAR(bytes_summed_doc,
             "bytes_summed(source, offset, nbytes, stream_bytes)\n--\n\n"
             "Copy one piece into a new bytes object; return that and its xxh3_64.\n\n"
             "From `stream_bytes` on, at least 0, it goes past the caches. Raises ValueError if the "
             "piece does not lie in the source, or is too short.");

static PyObject *bytes_summed(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_buffer source;
    PyObject *result = NULL;
    uint64_t sum = 0;
    if (expect(count, 4, "bytes_summed"))
        return NULL;
    Py_ssize_t from = PyLong_AsSsize_t(args[1]), nbytes = PyLong_AsSsize_t(args[2]);
    Py_ssize_t stream_bytes = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &source, PyBUF_SIMPLE))
        return NULL;
    if (nbytes <= SHORT_BYTES || from < 0 || nbytes > source.len - from || stream_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "a piece that is too short, or not in the source");
    } else if ((result = PyBytes_FromStringAndSize(NULL, nbytes))) {
        /* Nobody else knows the new object yet. */
        PyThreadState *state = nbytes >= GIL_BYTES ? PyEval_SaveThread() : NULL;
        sum = pass((unsigned char *)PyBytes_AS_STRING(result),
                   (const unsigned char *)source.buf + from, (size_t)nbytes, (size_t)stream_bytes);
        if (state)
            PyEval_RestoreThread(state);
    }
    PyBuffer_Release(&source);
    return result ? Py_BuildValue("NK", result, (unsigned long long)sum) : NULL;
}

PyDoc_STRVAR(sum_one_doc,
             "sum_one(source, offset, nbytes)\n--\n\nReturn the xxh3_64 of one piece of a buffer.\n\n"
             "Raises ValueError if it does not lie in it, or is too short.");

static PyObject *sum_one(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_buffer source;
    PyObject *result = NULL;
    if (expect(count, 3, "sum_one"))
        return NULL;
    Py_ssize_t from = PyLong_AsSsize_t(args[1]), nbytes = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &source, PyBUF_SIMPLE))
        return NULL;
    if (nbytes <= SHORT_BYTES || from < 0 || nbytes > source.len - from) {
        PyErr_SetString(PyExc_ValueError, "a piece that is too short, or not in the source");
    } else {
        PyThreadState *state = nbytes >= GIL_BYTES ? PyEval_SaveThread() : NULL;
        uint64_t sum = pass(NULL, (const unsigned char *)source.buf + from, (size_t)nbytes, SIZE_MAX);
        if (state)
            PyEval_RestoreThread(state);
        result = PyLong_FromUnsignedLongLong(sum);
    }
    PyBuffer_Release(&source);
    return result;
}

PyDoc_STRVAR(sums_doc, "sums(base, offsets, lengths)\n--\n\n"
                       "Return the xxh3_64 of each piece, as native uint64.");

static PyObject *sums(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    uintptr_t base;
    Ints offsets, lengths;
    PyObject *result = NULL;
    if (expect(count, 3, "sums"))
        return NULL;
    if (take_address(args[0], &base) || take_ints(args[1], &offsets))
        return NULL;
    if (!take_ints(args[2], &lengths)) {
        if (offsets.count != lengths.count)
            PyErr_SetString(PyExc_ValueError, "offsets and lengths differ in number");
        else
            result = sums_of(0, base, NULL, &offsets, &lengths, INT64_MAX);
        PyBuffer_Release(&lengths.buffer);
    }
    PyBuffer_Release(&offsets.buffer);
    return result;
}

PyDoc_STRVAR(share_copies_doc,
             "share_copies(sharing)\n--\n\nSet when large copies are shared with a second core: 0 "
             "never, 1 where one is idle, 2 always.\n\nReturns how many parts of copies a second "
             "core has done so far. Raises ValueError.");

static PyObject *share_copies(PyObject *module, PyObject *value)
{
    (void)module;
    long sharing = PyLong_AsLong(value);
    if (sharing == -1 && PyErr_Occurred())
        return NULL;
    if (sharing < ALONE || sharing > ALWAYS) {
        PyErr_SetString(PyExc_ValueError, "copies are shared never (0), if idle (1), always (2)");
        return NULL;
    }
    __atomic_store_n(&partner.sharing, (int)sharing, __ATOMIC_RELAXED);
    return PyLong_FromUnsignedLongLong(__atomic_load_n(&partner.seen, __ATOMIC_RELAXED));
}

#include "compiled/mailbox.c"
#include "compiled/taken_keys.c"
#include "compiled/post_ring.c"
#include "compiled/post_box.c"
#include "compiled/put_block.c"

static PyMethodDef methods[] = {
    FAST(copy_summed),
    FAST(copy_one_summed),
    FAST(bytes_summed),
    FAST(put_block),
    FAST(sum_one),
    FAST(sums),
    {"share_copies", share_copies, METH_O, share_copies_doc},
    FAST(mailbox_leave),
    FAST(mailbox_take),
    FAST(mailbox_close),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvstore._native", "Checksums of blocks, and copies with them.", -1,
    methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        stripes = stripes_avx2, fold = fold_avx2;
    if (__builtin_cpu_supports("avx512f"))
        stripes = stripes_avx512, fold = fold_avx512;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vbmi"))
        stripes = stripes_vbmi;
#endif
    if (pthread_atfork(NULL, NULL, forget_partner))
        return PyErr_NoMemory();
    (void)idle_cores(); /* opens what it asks */
    PyObject *module = PyType_Ready(&post_box_type) ? NULL : PyModule_Create(&definition);
    if (module && (PyModule_AddIntConstant(module, "SHORT_BYTES", SHORT_BYTES) ||
                   PyModule_AddObjectRef(module, "PostBox", (PyObject *)&post_box_type))) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
