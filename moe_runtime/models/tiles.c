/* Matrix products in bfloat16 on the tile unit of a processor (x86-64 AMX).
 *
 * Optional. `moe_runtime/models/tiles.py` imports it as `moe_runtime.models._tiles`; where it was not
 * built, or the processor has no such unit, the library's products are used instead.
 *
 * Bits: an element of a product is one chain over K, 32 at a time and ascending, in one row of an
 * accumulator tile. No other row has a part in it, so a row's bits don't depend on the batch.
 *
 *   panel     32 columns of a weight, as two tiles for each 32 of K    | l0 | r0 | l1 | r1 | ...
 *             plain: l and r are neighbours; gated: l of the gate, r of the up matrix
 *   tile      of a weight: 16 pairs of K x 16 columns x 2              1 KiB
 *             of rows:     16 rows x 32 of K                           1 KiB
 *
 * Whatever is not a multiple of 32 is filled up with zeros in weights, and along K in rows. Rows of a
 * tile that belong to nobody hold what was there before: nobody reads what becomes of them.
 *
 * Callers have checked all addresses and sizes.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define TILES (__GNUC__ >= 11)
#else
#define TILES 0
#endif

#define TILE 1024       /* bytes */
#define CHUNK_TILES 16  /* rows / 16 that are computed before the weights are read again */

#if TILES
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define UNIT __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl")))

typedef uint16_t bf16;

static inline Py_ssize_t blocks(Py_ssize_t count, Py_ssize_t size)
{
    return (count + size - 1) / size;
}

/* ---- the unit ------------------------------------------------------------------------------ */

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* arch_prctl: state that is off at first */

static int has_unit(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1))
        return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl"))
        return 0;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* Eight tiles of 16 rows of 64 bytes. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} all_tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

UNIT static void take_unit(void)
{
    _tile_loadconfig(&all_tiles);
}

UNIT static void leave_unit(void)
{
    _tile_release();
}

/* ---- products of tiles --------------------------------------------------------------------- */

/* Accumulators of 16 rows: left 16 columns, then right. */
#define PAIR (2 * 16 * 16)

UNIT static void multiply_16(float *sums, const char *rows, const char *panel, Py_ssize_t depth)
{
    _tile_zero(0);
    _tile_zero(1);
    for (Py_ssize_t k = 0; k < depth; k++) {
        _tile_loadd(4, rows + k * TILE, 64);
        _tile_loadd(6, panel + k * 2 * TILE, 64);
        _tile_loadd(7, panel + k * 2 * TILE + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
}

/* As above for 32 rows; fetches `lines` lines of each 32 that follow at `next`, for the next panel. */
UNIT static void multiply_32(float *sums, const char *rows, const char *panel, Py_ssize_t depth,
                             const char *next, int lines)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (Py_ssize_t k = 0; k < depth; k++) {
        for (int i = 0; i < lines; i++)
            _mm_prefetch(next + k * 2 * TILE + i * 64, _MM_HINT_T1);
        _tile_loadd(4, rows + k * TILE, 64);
        _tile_loadd(6, panel + k * 2 * TILE, 64);
        _tile_loadd(5, rows + (depth + k) * TILE, 64);
        _tile_loadd(7, panel + k * 2 * TILE + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + PAIR, 64);
    _tile_stored(3, sums + PAIR + 256, 64);
}

/* All rows of a chunk with one panel: `num_tiles` times PAIR sums. */
static void multiply_panel(float *sums, const char *rows, const char *panel, Py_ssize_t depth,
                           Py_ssize_t num_tiles)
{
    int pairs = (int)(num_tiles / 2), lines = pairs > 1 ? (32 + pairs - 1) / pairs : 0;
    for (int pair = 0; pair < pairs; pair++)
        multiply_32(sums + pair * 2 * PAIR, rows + pair * 2 * depth * TILE, panel, depth,
                    panel + depth * 2 * TILE + pair * lines * 64, lines);
    if (num_tiles % 2)
        multiply_16(sums + pairs * 2 * PAIR, rows + pairs * 2 * depth * TILE, panel, depth);
}

/* ---- elements ------------------------------------------------------------------------------ */

/* To bfloat16 and back: to the nearest, ties to even; every NaN becomes the quiet one. */
UNIT static inline __m512 rounded(__m512 value)
{
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    bits = _mm512_and_si512(bits, _mm512_set1_epi32((int)0xFFFF0000));
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_castsi512_ps(_mm512_mask_set1_epi32(bits, nan, 0x7FC00000));
}

UNIT static inline __m256i narrow(__m512 value)
{
    __m512i bits = _mm512_castps_si512(rounded(value));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

/* exp(x) within 1 ulp or so: 2^n * exp(r), |r| <= ln 2 / 2, by its series. NaN stays NaN. */
UNIT static inline __m512 exponential(__m512 x)
{
    x = _mm512_min_ps(_mm512_set1_ps(89.5f), x); /* infinite from 88.8 on */
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x); /* ln 2 in two parts */
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    static const float series[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    __m512 sum = _mm512_set1_ps(1.0f / 720);
    for (int i = 0; i < 6; i++)
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(series[i]));
    return _mm512_scalef_ps(sum, n);
}

/* 16 columns of silu(gate) * up: both rounded first, as if they had been products of their own. */
UNIT static void activate(bf16 *out, const float *sums, int rows)
{
    for (int row = 0; row < rows; row++) {
        __m512 gate = rounded(_mm512_loadu_ps(sums + row * 16));
        __m512 up = rounded(_mm512_loadu_ps(sums + 256 + row * 16));
        __m512 power = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
        __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
        _mm256_storeu_si256((__m256i *)(out + row * 32), narrow(_mm512_mul_ps(silu, up)));
    }
}

/* ---- rows into and out of tiles -------------------------------------------------------------- */

/* [rows, width] -> [rows / 16][width / 32] tiles */
UNIT static void pack_rows(char *tiles, const bf16 *rows, Py_ssize_t num_rows, Py_ssize_t width)
{
    Py_ssize_t depth = blocks(width, 32), whole = width / 32;
    __mmask32 rest = (__mmask32)((1u << width % 32) - 1);
    for (Py_ssize_t row = 0; row < num_rows; row++, rows += width) {
        char *tile = tiles + row / 16 * depth * TILE + row % 16 * 64;
        for (Py_ssize_t k = 0; k < whole; k++)
            _mm512_storeu_si512(tile + k * TILE, _mm512_loadu_si512(rows + k * 32));
        if (rest)
            _mm512_storeu_si512(tile + whole * TILE,
                                _mm512_maskz_loadu_epi16(rest, rows + whole * 32));
    }
}

/* The columns of one panel, from `first` on, of rows that are `width` long. */
UNIT static void unpack_panel(bf16 *out, const float *sums, Py_ssize_t num_rows, Py_ssize_t first,
                              Py_ssize_t width)
{
    Py_ssize_t valid = width - first < 32 ? width - first : 32;
    __mmask16 left = (__mmask16)((1u << (valid < 16 ? valid : 16)) - 1);
    __mmask16 right = (__mmask16)(valid > 16 ? (1u << (valid - 16)) - 1 : 0);
    out += first;
    for (Py_ssize_t row = 0; row < num_rows; row++, out += width) {
        const float *sum = sums + row / 16 * PAIR + row % 16 * 16;
        _mm256_mask_storeu_epi16(out, left, narrow(_mm512_loadu_ps(sum)));
        _mm256_mask_storeu_epi16(out + 16, right, narrow(_mm512_loadu_ps(sum + 256)));
    }
}

/* 16 columns of 32 of K, of which so many are there. */
static void pack_tile(uint32_t *tile, const bf16 *weight, Py_ssize_t columns, Py_ssize_t rest,
                      Py_ssize_t depth)
{
    if (columns >= 16 && rest >= 32) {
        for (int column = 0; column < 16; column++)
            for (int pair = 0; pair < 16; pair++)
                memcpy(&tile[pair * 16 + column], &weight[column * depth + pair * 2], 4);
        return;
    }
    memset(tile, 0, TILE);
    for (int column = 0; column < 16 && column < columns; column++)
        for (int k = 0; k < 32 && k < rest; k++)
            ((bf16 *)tile)[k / 2 * 32 + column * 2 + k % 2] = weight[column * depth + k];
}

/* A weight [columns, depth], or two of them one after the other if `gated`, into panels. */
static void pack_weight(char *panels, const bf16 *weight, Py_ssize_t columns, Py_ssize_t depth,
                        int gated)
{
    Py_ssize_t step = gated ? 16 : 32, apart = gated ? columns : 16;
    Py_ssize_t count = gated ? blocks(columns, 32) * 2 : blocks(columns, 32);
    for (Py_ssize_t panel = 0; panel < count; panel++)
        for (Py_ssize_t k = 0; k < depth; k += 32)
            for (int side = 0; side < 2; side++, panels += TILE) {
                Py_ssize_t rest = columns - panel * step - (gated ? 0 : side * 16);
                pack_tile((uint32_t *)panels, weight + (panel * step + side * apart) * depth + k,
                          rest, depth - k, depth);
            }
}

/* ---- products ------------------------------------------------------------------------------ */

typedef struct {
    Py_ssize_t hidden, inner;
    char *outer_tiles, *inner_tiles; /* CHUNK_TILES * 16 rows each */
} Work;

/* out [rows, columns] = rows [rows, depth] times a weight, for one chunk in `tiles` */
static void product(bf16 *out, const char *tiles, const char *panels, Py_ssize_t num_rows,
                    Py_ssize_t columns, Py_ssize_t depth)
{
    float sums[CHUNK_TILES * PAIR] __attribute__((aligned(64)));
    Py_ssize_t k = blocks(depth, 32);
    for (Py_ssize_t first = 0; first < columns; first += 32, panels += k * 2 * TILE) {
        multiply_panel(sums, tiles, panels, k, blocks(num_rows, 16));
        unpack_panel(out, sums, num_rows, first, columns);
    }
}

static void gated_chunk(const Work *work, bf16 *out, const bf16 *rows, const char *panels,
                        Py_ssize_t num_rows)
{
    float sums[CHUNK_TILES * PAIR] __attribute__((aligned(64)));
    Py_ssize_t outer = blocks(work->hidden, 32), inner = blocks(work->inner, 32);
    Py_ssize_t num_tiles = blocks(num_rows, 16);
    pack_rows(work->outer_tiles, rows, num_rows, work->hidden);
    for (Py_ssize_t panel = 0; panel < inner * 2; panel++, panels += outer * 2 * TILE) {
        multiply_panel(sums, work->outer_tiles, panels, outer, num_tiles);
        char *at = work->inner_tiles + panel / 2 * TILE + panel % 2 * 32;
        for (Py_ssize_t tile = 0; tile < num_tiles; tile++) {
            Py_ssize_t rest = num_rows - tile * 16;
            activate((bf16 *)(at + tile * inner * TILE), sums + tile * PAIR,
                     rest < 16 ? (int)rest : 16);
        }
    }
    product(out, work->inner_tiles, panels, num_rows, work->hidden, work->inner);
}

/* Items: (rows, address of the weights) each. */
static void gated_items(const Work *work, bf16 *out, const bf16 *rows, const int64_t *items,
                        Py_ssize_t num_items)
{
    take_unit();
    for (; num_items--; items += 2)
        for (int64_t left = items[0]; left > 0;) {
            int64_t some = left < CHUNK_TILES * 16 ? left : CHUNK_TILES * 16;
            gated_chunk(work, out, rows, (const char *)(uintptr_t)items[1], some);
            out += some * work->hidden;
            rows += some * work->hidden;
            left -= some;
        }
    leave_unit();
}

static void plain_rows(char *tiles, bf16 *out, const bf16 *rows, const char *panels,
                       Py_ssize_t num_rows, Py_ssize_t columns, Py_ssize_t depth)
{
    take_unit();
    while (num_rows > 0) {
        Py_ssize_t some = num_rows < CHUNK_TILES * 16 ? num_rows : CHUNK_TILES * 16;
        pack_rows(tiles, rows, some, depth);
        product(out, tiles, panels, some, columns, depth);
        out += some * columns;
        rows += some * depth;
        num_rows -= some;
    }
    leave_unit();
}
#endif

/* ---- the module ---------------------------------------------------------------------------- */

static int supported_here = 0;

PyDoc_STRVAR(supported_doc, "supported()\n--\n\nWhether this processor has the unit, and we may use it.");

static PyObject *supported(PyObject *module, PyObject *none)
{
    (void)module;
    (void)none;
    return PyBool_FromLong(supported_here);
}

/* Whole numbers, of which the first `num_addresses` are addresses. */
static int take_numbers(PyObject *const *args, Py_ssize_t given, int64_t *numbers, int wanted,
                        const char *name)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %d arguments, got %zd", name, wanted, given);
        return -1;
    }
    if (!supported_here) {
        PyErr_Format(PyExc_NotImplementedError, "%s: this processor has no tile unit", name);
        return -1;
    }
    for (int i = 0; i < wanted; i++)
        numbers[i] = (int64_t)PyLong_AsUnsignedLongLong(args[i]);
    return PyErr_Occurred() ? -1 : 0;
}

PyDoc_STRVAR(pack_doc, "pack(panels, weight, columns, depth, gated)\n--\n\n"
                       "Reorder a weight [columns, depth], or the two of a gated layer.");

static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    int64_t n[5];
    if (take_numbers(args, count, n, 5, "pack"))
        return NULL;
#if TILES
    Py_BEGIN_ALLOW_THREADS
    pack_weight((char *)n[0], (const bf16 *)n[1], n[2], n[3], (int)n[4]);
    Py_END_ALLOW_THREADS
#endif
    Py_RETURN_NONE;
}

PyDoc_STRVAR(multiply_doc, "multiply(out, rows, panels, num_rows, columns, depth, scratch)\n--\n\n"
                           "Write rows [num_rows, depth] times a packed weight to `out`.");

static PyObject *multiply(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    int64_t n[7];
    if (take_numbers(args, count, n, 7, "multiply"))
        return NULL;
#if TILES
    Py_BEGIN_ALLOW_THREADS
    plain_rows((char *)n[6], (bf16 *)n[0], (const bf16 *)n[1], (const char *)n[2], n[3], n[4], n[5]);
    Py_END_ALLOW_THREADS
#endif
    Py_RETURN_NONE;
}

PyDoc_STRVAR(gated_doc, "gated(out, rows, items, num_items, hidden, inner, scratch)\n--\n\n"
                        "Apply gated layers to rows [R, hidden]; an item is int64 rows and the\n"
                        "address of that layer's packed weights.");

static PyObject *gated(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    int64_t n[7];
    if (take_numbers(args, count, n, 7, "gated"))
        return NULL;
#if TILES
    Work work = {n[4], n[5], (char *)n[6], NULL};
    work.inner_tiles = work.outer_tiles + CHUNK_TILES * blocks(work.hidden, 32) * TILE;
    Py_BEGIN_ALLOW_THREADS
    gated_items(&work, (bf16 *)n[0], (const bf16 *)n[1], (const int64_t *)n[2], n[3]);
    Py_END_ALLOW_THREADS
#endif
    Py_RETURN_NONE;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

static PyMethodDef methods[] = {
    {"supported", supported, METH_NOARGS, supported_doc},
    FAST(pack),
    FAST(multiply),
    FAST(gated),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "moe_runtime.models._tiles",
    .m_doc = "Compiled matrix products.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__tiles(void)
{
#if TILES
    supported_here = has_unit();
#endif
    PyObject *module = PyModule_Create(&definition);
    if (module)
        PyModule_AddIntConstant(module, "CHUNK_ROWS", CHUNK_TILES * 16);
    return module;
}
