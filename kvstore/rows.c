/* Loops over rows of columns: what `kvstore/row_loops.py` does in Python, without an object per
 * step. A column is anything with a one-dimensional buffer of machine integers (`array.array`), a
 * row a position in it. All rows of a call are checked before anything is changed. The dictionary of
 * keys is here too: `compiled/key_index.c`.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "compiled/arguments.c"

#define NOWHERE (-1)
#define FEW 128 /* rows that need no memory of their own */

typedef struct {
    Py_buffer buffer;
    Py_ssize_t count;
    char kind; /* as of `array.typecode`: B, i, I, q or Q */
} Column;

typedef struct {
    Py_ssize_t count;
    int32_t *values;
    int32_t few[FEW];
    PyObject *sequence; /* the same rows as Python's integers */
} Rows;

static int take_column(PyObject *object, Column *column)
{
    if (PyObject_GetBuffer(object, &column->buffer, PyBUF_FORMAT | PyBUF_WRITABLE | PyBUF_ND))
        return -1;
    const char *format = column->buffer.format ? column->buffer.format : "B";
    Py_ssize_t size = column->buffer.itemsize;
    char kind = format[0] == 'l' ? 'q' : format[0] == 'L' ? 'Q' : format[0];
    bool known = kind == 'B' ? size == 1 : kind == 'i' || kind == 'I' ? size == 4
                                       : (kind == 'q' || kind == 'Q') && size == 8;
    if (!known || format[1] || column->buffer.ndim != 1) {
        PyErr_SetString(PyExc_TypeError, "expected a column of type B, i, I, q or Q");
        PyBuffer_Release(&column->buffer);
        return -1;
    }
    column->kind = kind;
    column->count = column->buffer.len / size;
    return 0;
}

static void give_rows(Rows *rows)
{
    if (rows->values != rows->few)
        PyMem_Free(rows->values);
    Py_XDECREF(rows->sequence);
}

/* Read rows, each below `limit`. */
static int take_rows(PyObject *object, Py_ssize_t limit, Rows *rows)
{
    rows->values = rows->few;
    rows->sequence = PySequence_Fast(object, "expected a sequence of rows");
    if (!rows->sequence)
        return -1;
    rows->count = PySequence_Fast_GET_SIZE(rows->sequence);
    if (rows->count > FEW) {
        rows->values = PyMem_New(int32_t, rows->count);
        if (!rows->values) {
            rows->values = rows->few;
            give_rows(rows);
            PyErr_NoMemory();
            return -1;
        }
    }
    PyObject **items = PySequence_Fast_ITEMS(rows->sequence);
    for (Py_ssize_t i = 0; i < rows->count; i++) {
        long row = PyLong_AsLong(items[i]);
        if (row < 0 || row >= limit || row > INT32_MAX) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_IndexError, "row %ld of %zd", row, limit);
            give_rows(rows);
            return -1;
        }
        rows->values[i] = (int32_t)row;
    }
    return 0;
}

static int take_both(PyObject *of_column, PyObject *of_rows, Column *column, Rows *rows)
{
    if (take_column(of_column, column))
        return -1;
    if (take_rows(of_rows, column->count, rows)) {
        PyBuffer_Release(&column->buffer);
        return -1;
    }
    return 0;
}

static void give_both(Column *column, Rows *rows)
{
    PyBuffer_Release(&column->buffer);
    give_rows(rows);
}

/* Do BODY with `values` of the column's own type T. */
#define TYPED(column, BODY)                                                                        \
    switch ((column).kind) {                                                                       \
    case 'B': { typedef uint8_t T; T *values = (column).buffer.buf; BODY } break;                  \
    case 'i': { typedef int32_t T; T *values = (column).buffer.buf; BODY } break;                  \
    case 'I': { typedef uint32_t T; T *values = (column).buffer.buf; BODY } break;                 \
    case 'q': { typedef int64_t T; T *values = (column).buffer.buf; BODY } break;                  \
    default: { typedef uint64_t T; T *values = (column).buffer.buf; BODY } break;                  \
    }

/* Read an integer that a column can hold, as the 64 bits of it. */
static int take_value(char kind, PyObject *object, uint64_t *value)
{
    if (kind == 'Q') {
        *value = PyLong_AsUnsignedLongLong(object);
        return *value == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
    }
    int64_t number = PyLong_AsLongLong(object);
    if (number == -1 && PyErr_Occurred())
        return -1;
    bool fits = kind == 'q' || (kind == 'B' && number >= 0 && number <= UINT8_MAX) ||
                (kind == 'I' && number >= 0 && number <= UINT32_MAX) ||
                (kind == 'i' && number >= INT32_MIN && number <= INT32_MAX);
    if (!fits) {
        PyErr_Format(PyExc_OverflowError, "%lld in a column of type %c", (long long)number, kind);
        return -1;
    }
    *value = (uint64_t)number;
    return 0;
}

static PyObject *gather(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Column column;
    Rows rows;
    if (expect(count, 2, "gather") || take_both(args[0], args[1], &column, &rows))
        return NULL;
    PyObject *found = PyList_New(rows.count);
    if (found) {
        bool is_unsigned = column.kind == 'Q';
        TYPED(column, {
            for (Py_ssize_t i = 0; i < rows.count; i++) {
                T value = values[rows.values[i]];
                PyObject *number = is_unsigned ? PyLong_FromUnsignedLongLong((uint64_t)value)
                                               : PyLong_FromLongLong((int64_t)value);
                if (!number) {
                    Py_CLEAR(found);
                    break;
                }
                PyList_SET_ITEM(found, i, number);
            }
        })
    }
    give_both(&column, &rows);
    return found;
}

static PyObject *total(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Column column;
    Rows rows;
    if (expect(count, 2, "total") || take_both(args[0], args[1], &column, &rows))
        return NULL;
    int64_t sum = 0;
    bool overflows = column.kind == 'Q'; /* which needs more than 64 bits at once */
    TYPED(column, {
        for (Py_ssize_t i = 0; i < rows.count && !overflows; i++)
            overflows = __builtin_add_overflow(sum, (int64_t)values[rows.values[i]], &sum);
    })
    give_both(&column, &rows);
    if (overflows) {
        PyErr_SetString(PyExc_OverflowError, "a total of more than 64 bits");
        return NULL;
    }
    return PyLong_FromLongLong(sum);
}

static PyObject *all_are(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Column column;
    Rows rows;
    uint64_t wanted;
    if (expect(count, 3, "all_are") || take_both(args[0], args[1], &column, &rows))
        return NULL;
    bool are = true;
    int failed = take_value(column.kind, args[2], &wanted);
    if (!failed)
        TYPED(column, {
            for (Py_ssize_t i = 0; i < rows.count && are; i++)
                are = values[rows.values[i]] == (T)wanted;
        })
    give_both(&column, &rows);
    return failed ? NULL : PyBool_FromLong(are);
}

static PyObject *all_own(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Column column;
    Rows rows;
    if (expect(count, 2, "all_own") || take_both(args[0], args[1], &column, &rows))
        return NULL;
    bool are = true;
    TYPED(column, {
        for (Py_ssize_t i = 0; i < rows.count && are; i++)
            are = values[rows.values[i]] == (T)rows.values[i];
    })
    give_both(&column, &rows);
    return PyBool_FromLong(are);
}

static PyObject *where(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Column column;
    Rows rows;
    uint64_t wanted;
    if (expect(count, 3, "where") || take_both(args[0], args[1], &column, &rows))
        return NULL;
    PyObject *found = take_value(column.kind, args[2], &wanted) ? NULL : PyList_New(0);
    if (found) {
        PyObject **items = PySequence_Fast_ITEMS(rows.sequence);
        TYPED(column, {
            for (Py_ssize_t i = 0; i < rows.count; i++)
                if (values[rows.values[i]] == (T)wanted && PyList_Append(found, items[i])) {
                    Py_CLEAR(found);
                    break;
                }
        })
    }
    give_both(&column, &rows);
    return found;
}

static PyObject *fill(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Column column;
    Rows rows;
    uint64_t value;
    if (expect(count, 3, "fill") || take_both(args[0], args[1], &column, &rows))
        return NULL;
    int failed = take_value(column.kind, args[2], &value);
    if (!failed)
        TYPED(column, {
            for (Py_ssize_t i = 0; i < rows.count; i++)
                values[rows.values[i]] = (T)value;
        })
    give_both(&column, &rows);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *stairs(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Column column;
    Rows rows;
    uint64_t first = 0, last = 0;
    if (expect(count, 4, "stairs") || take_both(args[0], args[1], &column, &rows))
        return NULL;
    int64_t step = PyLong_AsLongLong(args[3]), rise = 0;
    int failed = (step == -1 && PyErr_Occurred()) || take_value(column.kind, args[2], &first);
    if (!failed && rows.count) { /* the last one fits too, and so do those in between */
        PyObject *ends = NULL;
        if (__builtin_mul_overflow(step, (int64_t)(rows.count - 1), &rise)) {
            PyErr_SetString(PyExc_OverflowError, "stairs that leave the column's type");
            failed = -1;
        } else if (!(ends = PyLong_FromLongLong(rise)))
            failed = -1;
        if (!failed) {
            PyObject *sum = PyNumber_Add(args[2], ends);
            failed = !sum || take_value(column.kind, sum, &last);
            Py_XDECREF(sum);
        }
        Py_XDECREF(ends);
    }
    if (!failed)
        TYPED(column, {
            uint64_t value = first;
            for (Py_ssize_t i = 0; i < rows.count; i++, value += (uint64_t)step)
                values[rows.values[i]] = (T)value;
        })
    give_both(&column, &rows);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *scatter(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Column column;
    Rows rows;
    if (expect(count, 3, "scatter") || take_both(args[0], args[1], &column, &rows))
        return NULL;
    PyObject *fresh = PySequence_Fast(args[2], "expected a sequence of values");
    int failed = !fresh;
    if (fresh && PySequence_Fast_GET_SIZE(fresh) != rows.count) {
        PyErr_Format(PyExc_ValueError, "%zd rows, %zd values", rows.count,
                     PySequence_Fast_GET_SIZE(fresh));
        failed = -1;
    }
    for (int written = 0; written < 2 && !failed; written++) /* looked at, and then stored */
        TYPED(column, {
            PyObject **items = PySequence_Fast_ITEMS(fresh);
            for (Py_ssize_t i = 0; i < rows.count && !failed; i++) {
                uint64_t value;
                failed = take_value(column.kind, items[i], &value);
                if (written)
                    values[rows.values[i]] = (T)value;
            }
        })
    Py_XDECREF(fresh);
    give_both(&column, &rows);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *add(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Column column;
    Rows rows;
    if (expect(count, 4, "add") || take_both(args[0], args[1], &column, &rows))
        return NULL;
    long delta = PyLong_AsLong(args[2]), wanted = -1;
    PyObject *reached = NULL;
    if (delta != -1 || !PyErr_Occurred())
        wanted = PyLong_AsLong(args[3]);
    if (column.kind != 'i')
        PyErr_SetString(PyExc_TypeError, "`add` counts in columns of type i");
    else if (!PyErr_Occurred())
        reached = PyList_New(0);
    if (reached) {
        int32_t *values = column.buffer.buf;
        PyObject **items = PySequence_Fast_ITEMS(rows.sequence);
        for (Py_ssize_t i = 0; i < rows.count && reached; i++) {
            int32_t *value = values + rows.values[i];
            *value = (int32_t)(*value + delta);
            if (*value == wanted && PyList_Append(reached, items[i]))
                Py_CLEAR(reached);
        }
    }
    give_both(&column, &rows);
    return reached;
}

/* Read rows of a list of objects. */
static int take_rows_of_list(PyObject *list, PyObject *of_rows, Rows *rows)
{
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "expected a list");
        return -1;
    }
    return take_rows(of_rows, PyList_GET_SIZE(list), rows);
}

static PyObject *pick(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Rows rows;
    if (expect(count, 2, "pick") || take_rows_of_list(args[0], args[1], &rows))
        return NULL;
    PyObject *found = PyList_New(rows.count);
    for (Py_ssize_t i = 0; found && i < rows.count; i++)
        PyList_SET_ITEM(found, i, Py_NewRef(PyList_GET_ITEM(args[0], rows.values[i])));
    give_rows(&rows);
    return found;
}

static PyObject *place(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Rows rows;
    if (expect(count, 3, "place") || take_rows_of_list(args[0], args[1], &rows))
        return NULL;
    PyObject *fresh = PySequence_Fast(args[2], "expected a sequence of objects");
    bool equal = fresh && PySequence_Fast_GET_SIZE(fresh) == rows.count;
    if (fresh && !equal)
        PyErr_SetString(PyExc_ValueError, "rows and objects differ in number");
    for (Py_ssize_t i = 0; equal && i < rows.count; i++)
        PyList_SetItem(args[0], rows.values[i], Py_NewRef(PySequence_Fast_GET_ITEM(fresh, i)));
    Py_XDECREF(fresh);
    give_rows(&rows);
    if (!equal)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *claim(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (expect(count, 3, "claim"))
        return NULL;
    if (!PyDict_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]) ||
        PyList_GET_SIZE(args[1]) != PyList_GET_SIZE(args[2])) {
        PyErr_SetString(PyExc_TypeError, "expected a dict, and two lists of one length");
        return NULL;
    }
    PyObject *taken = PyList_New(0);
    for (Py_ssize_t i = 0; taken && i < PyList_GET_SIZE(args[1]); i++) {
        PyObject *row = PyList_GET_ITEM(args[2], i);
        PyObject *there = PyDict_SetDefault(args[0], PyList_GET_ITEM(args[1], i), row);
        int same = there == row ? 1 : there ? PyObject_RichCompareBool(there, row, Py_EQ) : -1;
        PyObject *position = same == 0 ? PyLong_FromSsize_t(i) : NULL;
        if (same < 0 || (same == 0 && (!position || PyList_Append(taken, position))))
            Py_CLEAR(taken);
        Py_XDECREF(position);
    }
    return taken;
}

static PyObject *drop(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (expect(count, 2, "drop"))
        return NULL;
    if (!PyDict_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a dict");
        return NULL;
    }
    PyObject *keys = PySequence_Fast(args[1], "expected a sequence of keys");
    if (!keys)
        return NULL;
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PySequence_Fast_GET_SIZE(keys); i++)
        failed = PyDict_DelItem(args[0], PySequence_Fast_GET_ITEM(keys, i));
    Py_DECREF(keys);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* -- queues: see `kvstore/eviction/rows.py` --------------------------------------------------- */

typedef struct {
    Column older_column, newer_column;
    Rows rows;
    int32_t *older, *newer;
    long oldest, youngest;
} Queue;

/* Read (older, newer, rows, oldest, youngest). */
static int take_queue(PyObject *const *args, Queue *queue)
{
    if (take_column(args[0], &queue->older_column))
        return -1;
    if (take_column(args[1], &queue->newer_column)) {
        PyBuffer_Release(&queue->older_column.buffer);
        return -1;
    }
    Py_ssize_t limit = queue->older_column.count;
    bool are_links = queue->older_column.kind == 'i' && queue->newer_column.kind == 'i' &&
                     queue->newer_column.count == limit;
    queue->oldest = PyLong_AsLong(args[3]);
    queue->youngest = PyLong_AsLong(args[4]);
    if (!are_links || queue->oldest < NOWHERE || queue->youngest < NOWHERE ||
        queue->oldest >= limit || queue->youngest >= limit) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "these are no columns and ends of a queue");
    } else if (!take_rows(args[2], limit, &queue->rows)) {
        queue->older = queue->older_column.buffer.buf;
        queue->newer = queue->newer_column.buffer.buf;
        return 0;
    }
    PyBuffer_Release(&queue->older_column.buffer);
    PyBuffer_Release(&queue->newer_column.buffer);
    return -1;
}

static PyObject *give_queue(Queue *queue)
{
    PyBuffer_Release(&queue->older_column.buffer);
    PyBuffer_Release(&queue->newer_column.buffer);
    give_rows(&queue->rows);
    return Py_BuildValue("(ll)", queue->oldest, queue->youngest);
}

static void push(Queue *queue, int32_t row)
{
    queue->older[row] = (int32_t)queue->youngest;
    queue->newer[row] = NOWHERE;
    if (queue->youngest == NOWHERE)
        queue->oldest = row;
    else
        queue->newer[queue->youngest] = row;
    queue->youngest = row;
}

static PyObject *extend(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Queue queue;
    if (expect(count, 5, "extend") || take_queue(args, &queue))
        return NULL;
    for (Py_ssize_t i = 0; i < queue.rows.count; i++)
        push(&queue, queue.rows.values[i]);
    return give_queue(&queue);
}

static PyObject *renew(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Queue queue;
    if (expect(count, 5, "renew") || take_queue(args, &queue))
        return NULL;
    int64_t limit = queue.older_column.count;
    for (Py_ssize_t i = 0; i < queue.rows.count; i++) {
        int32_t row = queue.rows.values[i];
        if (row == queue.youngest)
            continue;
        int32_t before = queue.older[row], after = queue.newer[row];
        if (before < NOWHERE || before >= limit || after < 0 || after >= limit) {
            Py_XDECREF(give_queue(&queue));
            PyErr_Format(PyExc_ValueError, "row %d is not in the queue", (int)row);
            return NULL;
        }
        if (before == NOWHERE)
            queue.oldest = after;
        else
            queue.newer[before] = after;
        queue.older[after] = before;
        push(&queue, row);
    }
    return give_queue(&queue);
}

static PyObject *follow(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Column column;
    if (expect(count, 3, "follow"))
        return NULL;
    long row = PyLong_AsLong(args[1]);
    Py_ssize_t most = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || take_column(args[0], &column))
        return NULL;
    PyObject *found = PyList_New(0);
    if (column.kind != 'i') {
        PyErr_SetString(PyExc_TypeError, "links are a column of type i");
        Py_CLEAR(found);
    }
    while (found && row != NOWHERE && PyList_GET_SIZE(found) < most) {
        if (row < 0 || row >= column.count) {
            PyErr_Format(PyExc_IndexError, "row %ld of %zd", row, column.count);
            Py_CLEAR(found);
            break;
        }
        PyObject *number = PyLong_FromLong(row);
        if (!number || PyList_Append(found, number))
            Py_CLEAR(found);
        Py_XDECREF(number);
        row = ((int32_t *)column.buffer.buf)[row];
    }
    PyBuffer_Release(&column.buffer);
    return found;
}

#include "compiled/gone.c"
#include "compiled/taken_keys.c"
#include "compiled/post_ring.c"
#include "compiled/claims.c"
#include "compiled/own_words.c"
#include "compiled/rings.c"
#include "compiled/post_office.c"
#include "compiled/key_index.c"

#define METHOD(name, signature, text)                                                              \
    {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, #name signature "\n--\n\n" text}

static PyMethodDef methods[] = {
    METHOD(gather, "(column, rows)", "Return the values of these rows."),
    METHOD(total, "(column, rows)", "Return their sum."),
    METHOD(all_are, "(column, rows, value)", "Tell whether all have this value."),
    METHOD(all_own, "(column, rows)", "Tell whether each names itself."),
    METHOD(where, "(column, rows, value)", "Return those that have this value."),
    METHOD(fill, "(column, rows, value)", "Give all of them this value."),
    METHOD(stairs, "(column, rows, first, step)", "Give them rising values."),
    METHOD(scatter, "(column, rows, values)", "Give each its value."),
    METHOD(add, "(column, rows, delta, reached)", "Add; return the rows that came to `reached`."),
    METHOD(pick, "(objects, rows)", "Return the objects of these rows."),
    METHOD(place, "(objects, rows, fresh)", "Give each its object."),
    METHOD(claim, "(index, keys, rows)", "Enter keys; return the positions that were taken."),
    METHOD(drop, "(index, keys)", "Take keys out that are there."),
    METHOD(extend, "(older, newer, rows, oldest, youngest)", "Enter rows; return the ends."),
    METHOD(renew, "(older, newer, rows, oldest, youngest)", "Make rows the youngest."),
    METHOD(follow, "(links, row, count)", "Return a row and those behind it, at most so many."),
    METHOD(remember, "(prints, numbers, slots, names, fresh, place)", "Enter names that went."),
    METHOD(recall, "(prints, numbers, slots, names)", "Take names out; return their numbers."),
    METHOD(forget, "(prints, numbers, slots, place, end, most)", "Take the oldest out."),
    METHOD(close_up, "(prints, numbers, slots, to_prints, to_numbers, to_slots, place, end, kept)",
           "Move what did not return."),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvstore._rows", "Loops over rows of columns.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    bool ready = !PyType_Ready(&key_index_type) && !PyType_Ready(&post_office_type);
    PyObject *module = ready ? PyModule_Create(&definition) : NULL;
    if (module && (PyModule_AddObjectRef(module, "KeyIndex", (PyObject *)&key_index_type) ||
                   PyModule_AddObjectRef(module, "PostOffice", (PyObject *)&post_office_type)))
        Py_CLEAR(module);
    return module;
}
