/* The compiled part of the package: rows gathered by address, and weighted sums of rows.
 *
 * Optional. `dispatch/native.py` imports it as `dispatch._native`; without it the same bits come
 * from torch. Callers have checked all addresses; what is checked here are the sizes of arrays.
 *
 * The sums are elementwise chains of one multiplication and one addition per row, each rounded on
 * its own: this file is compiled with -ffp-contract=off, and wider vectors change nothing.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define VECTORS __attribute__((target("avx512f,avx512bw,avx512vl")))
#define HAVE_VECTORS                                                                         \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&              \
     __builtin_cpu_supports("avx512vl"))
#endif

#define LINE 64 /* bytes */

/* Copies of more bytes than this go past the caches: they would not stay there until they are read. */
#define STREAM_FROM (4 << 20)

/* Elements of a row that are summed at a time: the accumulators stay in the first-level cache. */
#define STRIP 1024

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

enum { BF16 = 1, F32 = 3 }; /* as on the wire: `dispatch.layout.DTYPES` */

/* ---- strips of a row ---------------------------------------------------------------------- */

WIDE static void add_bf16(float *restrict sum, const uint16_t *restrict row, float weight, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)row[i] << 16;
        float value;
        memcpy(&value, &bits, 4);
        float product = weight * value;
        sum[i] = sum[i] + product;
    }
}

WIDE static void add_f32(float *restrict sum, const float *restrict row, float weight, int n)
{
    for (int i = 0; i < n; i++) {
        float product = weight * row[i];
        sum[i] = sum[i] + product;
    }
}

/* To the nearest, ties to even; every NaN becomes the quiet one. */
WIDE static void round_bf16(uint16_t *restrict out, const float *restrict sum, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &sum[i], 4);
        uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        out[i] = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}

typedef struct {
    uintptr_t out;
    const int64_t *rows; /* [count * width] addresses; 0 is a hole */
    const float *weights;
    Py_ssize_t count, width, hidden;
    int in, to;
} Sum;

static void sum_strip(const Sum *s, Py_ssize_t token, Py_ssize_t begin, int n)
{
    float sum[STRIP];
    memset(sum, 0, sizeof(float) * (size_t)n);
    for (Py_ssize_t k = token * s->width; k < (token + 1) * s->width; k++) {
        uintptr_t row = (uintptr_t)s->rows[k];
        if (!row)
            continue;
        if (s->in == BF16)
            add_bf16(sum, (const uint16_t *)row + begin, s->weights[k], n);
        else
            add_f32(sum, (const float *)row + begin, s->weights[k], n);
    }
    Py_ssize_t at = token * s->hidden + begin;
    if (s->to == BF16)
        round_bf16((uint16_t *)s->out + at, sum, n);
    else
        memcpy((float *)s->out + at, sum, sizeof(float) * (size_t)n);
}

#ifdef VECTORS
/* Elements of a row that are summed at a time here: eight vectors. */
#define BLOCK 128

VECTORS static inline __m512 wide(const uint16_t *at)
{
    __m256i half = _mm256_loadu_si256((const __m256i *)at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

VECTORS static inline void put_bf16(uint16_t *out, __m512 sum)
{
    __m512i bits = _mm512_castps_si512(sum);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
    bits = _mm512_mask_set1_epi32(_mm512_srli_epi32(bits, 16), nan, 0x7FC0);
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(bits));
}

/* Blocks of bf16 rows to bf16. The sums stay in registers, so each row is read once, and all rows of
 * a token are read side by side; those of the next token are fetched meanwhile. */
VECTORS static void sum_blocks(const Sum *s, Py_ssize_t token, Py_ssize_t num_blocks)
{
    const int64_t *rows = s->rows + token * s->width;
    const int64_t *later = token + 1 < s->count ? rows + s->width : rows;
    const float *weights = s->weights + token * s->width;
    uint16_t *out = (uint16_t *)s->out + token * s->hidden;
    for (Py_ssize_t begin = 0; begin < num_blocks * BLOCK; begin += BLOCK) {
        __m512 sums[8];
        for (int i = 0; i < 8; i++)
            sums[i] = _mm512_setzero_ps();
        for (Py_ssize_t k = 0; k < s->width; k++) {
            const char *next = (const char *)((const uint16_t *)(uintptr_t)later[k] + begin);
            for (int i = 0; later[k] && i < BLOCK * 2; i += LINE)
                _mm_prefetch(next + i, _MM_HINT_T0);
            if (!rows[k])
                continue;
            const uint16_t *row = (const uint16_t *)(uintptr_t)rows[k] + begin;
            __m512 weight = _mm512_set1_ps(weights[k]);
            for (int i = 0; i < 8; i++) {
                __m512 product = _mm512_mul_ps(weight, wide(row + i * 16));
                sums[i] = _mm512_add_ps(sums[i], product);
            }
        }
        for (int i = 0; i < 8; i++)
            put_bf16(out + begin + i * 16, sums[i]);
    }
}
#endif

static void sum_rows(const Sum *s)
{
    Py_ssize_t done = 0; /* elements of each row that are summed in blocks */
#ifdef VECTORS
    if (s->in == BF16 && s->to == BF16 && HAVE_VECTORS) {
        done = s->hidden / BLOCK * BLOCK;
        for (Py_ssize_t token = 0; token < s->count; token++)
            sum_blocks(s, token, s->hidden / BLOCK);
    }
#endif
    for (Py_ssize_t token = 0; token < s->count; token++)
        for (Py_ssize_t begin = done; begin < s->hidden; begin += STRIP) {
            Py_ssize_t rest = s->hidden - begin;
            sum_strip(s, token, begin, rest < STRIP ? (int)rest : STRIP);
        }
}

/* ---- rows ----------------------------------------------------------------------------------- */

typedef struct {
    char *target;
    const int64_t *index;
    uintptr_t base; /* row i is at base + index[i] * scale */
    Py_ssize_t scale, count, row_bytes;
} Copy;

static inline const char *row_at(const Copy *c, Py_ssize_t i)
{
    return (const char *)(c->base + (uintptr_t)(c->index[i] * c->scale));
}

#ifdef VECTORS
/* Whole lines; fetches the next row meanwhile. */
VECTORS static void copy_lines(const Copy *c, int stream)
{
    for (Py_ssize_t i = 0; i < c->count; i++) {
        const char *row = row_at(c, i), *next = row_at(c, i + 1 < c->count ? i + 1 : i);
        char *target = c->target + i * c->row_bytes;
        for (Py_ssize_t at = 0; at < c->row_bytes; at += LINE) {
            __m512i line = _mm512_loadu_si512(row + at);
            _mm_prefetch(next + at, _MM_HINT_T0);
            if (stream)
                _mm512_stream_si512((void *)(target + at), line);
            else
                _mm512_storeu_si512(target + at, line);
        }
    }
    _mm_sfence(); /* lines on their way past the caches come before whatever is written later */
}
#endif

static void copy_rows(const Copy *c)
{
#ifdef VECTORS
    int stream = c->count * c->row_bytes >= STREAM_FROM && (uintptr_t)c->target % LINE == 0;
    if (c->row_bytes % LINE == 0 && HAVE_VECTORS) {
        copy_lines(c, stream);
        return;
    }
#endif
    for (Py_ssize_t i = 0; i < c->count; i++)
        memcpy(c->target + i * c->row_bytes, row_at(c, i), (size_t)c->row_bytes);
}

/* ---- arguments ---------------------------------------------------------------------------- */

/* Borrow a contiguous buffer of `itemsize` bytes an element. Returns its elements, or -1. */
static Py_ssize_t take(PyObject *object, Py_buffer *view, Py_ssize_t itemsize, const char *name)
{
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (view->itemsize != itemsize) {
        PyErr_Format(PyExc_ValueError, "%s must have elements of %zd bytes", name, itemsize);
        PyBuffer_Release(view);
        return -1;
    }
    return view->len / itemsize;
}

static int check_count(Py_ssize_t given, Py_ssize_t wanted, const char *name)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, given);
    return -1;
}

PyDoc_STRVAR(weighted_sums_doc,
             "weighted_sums(out, rows, weights, width, hidden, in_code, out_code)\n--\n\n"
             "Write the sums of `width` weighted rows each to the address `out`.");

static PyObject *weighted_sums(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (check_count(count, 7, "weighted_sums"))
        return NULL;
    Sum s = {
        .out = (uintptr_t)PyLong_AsUnsignedLongLong(args[0]),
        .width = PyLong_AsSsize_t(args[3]),
        .hidden = PyLong_AsSsize_t(args[4]),
        .in = (int)PyLong_AsLong(args[5]),
        .to = (int)PyLong_AsLong(args[6]),
    };
    if (PyErr_Occurred())
        return NULL;
    Py_buffer rows, weights;
    Py_ssize_t num_rows = take(args[1], &rows, 8, "rows");
    if (num_rows < 0)
        return NULL;
    Py_ssize_t num_weights = take(args[2], &weights, 4, "weights");
    if (num_weights < 0) {
        PyBuffer_Release(&rows);
        return NULL;
    }
    int valid = num_rows == num_weights && s.width > 0 && s.hidden > 0 &&
                num_rows % s.width == 0 && (s.in == BF16 || s.in == F32) &&
                (s.to == BF16 || s.to == F32);
    if (valid) {
        s.rows = rows.buf;
        s.weights = weights.buf;
        s.count = num_rows / s.width;
        Py_BEGIN_ALLOW_THREADS
        sum_rows(&s);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "sizes or types of the sums do not fit together");
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&weights);
    if (!valid)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *copied(Copy *copy, PyObject *index)
{
    if (PyErr_Occurred())
        return NULL;
    if (copy->row_bytes < 0) {
        PyErr_Format(PyExc_ValueError, "rows of %zd bytes", copy->row_bytes);
        return NULL;
    }
    Py_buffer view;
    copy->count = take(index, &view, 8, "index");
    if (copy->count < 0)
        return NULL;
    copy->index = view.buf;
    Py_BEGIN_ALLOW_THREADS
    copy_rows(copy);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(gather_rows_doc, "gather_rows(target, rows, row_bytes)\n--\n\n"
                              "Copy rows from their addresses to `target`, one after the other.");

static PyObject *gather_rows(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (check_count(count, 3, "gather_rows"))
        return NULL;
    Copy copy = {
        .target = (char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]),
        .scale = 1,
        .row_bytes = PyLong_AsSsize_t(args[2]),
    };
    return copied(&copy, args[1]);
}

PyDoc_STRVAR(take_rows_doc, "take_rows(target, source, index, row_bytes)\n--\n\n"
                            "Copy the rows `index` of `source` to `target`, one after the other.");

static PyObject *take_rows(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (check_count(count, 4, "take_rows"))
        return NULL;
    Copy copy = {
        .target = (char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]),
        .base = (uintptr_t)PyLong_AsUnsignedLongLong(args[1]),
        .row_bytes = PyLong_AsSsize_t(args[3]),
    };
    copy.scale = copy.row_bytes;
    return copied(&copy, args[2]);
}

/* ---- the module --------------------------------------------------------------------------- */

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

static PyMethodDef methods[] = {
    FAST(weighted_sums),
    FAST(gather_rows),
    FAST(take_rows),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dispatch._native",
    .m_doc = "Compiled loops of token dispatch.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&definition);
}
