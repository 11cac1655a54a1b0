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

static void sum_rows(const Sum *s)
{
    for (Py_ssize_t token = 0; token < s->count; token++)
        for (Py_ssize_t begin = 0; begin < s->hidden; begin += STRIP) {
            Py_ssize_t rest = s->hidden - begin;
            sum_strip(s, token, begin, rest < STRIP ? (int)rest : STRIP);
        }
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

PyDoc_STRVAR(gather_rows_doc, "gather_rows(target, rows, row_bytes)\n--\n\n"
                              "Copy rows from their addresses to `target`, one after the other.");

static PyObject *gather_rows(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (check_count(count, 3, "gather_rows"))
        return NULL;
    char *target = (char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    Py_ssize_t row_bytes = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (row_bytes < 0) {
        PyErr_Format(PyExc_ValueError, "rows of %zd bytes", row_bytes);
        return NULL;
    }
    Py_buffer rows;
    Py_ssize_t num_rows = take(args[1], &rows, 8, "rows");
    if (num_rows < 0)
        return NULL;
    const int64_t *addresses = rows.buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < num_rows; i++)
        memcpy(target + i * row_bytes, (const void *)(uintptr_t)addresses[i], (size_t)row_bytes);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&rows);
    Py_RETURN_NONE;
}

/* ---- the module --------------------------------------------------------------------------- */

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

static PyMethodDef methods[] = {
    FAST(weighted_sums),
    FAST(gather_rows),
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
