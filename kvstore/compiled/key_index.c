/* A dictionary of the keys of blocks: what `PlainKeyIndex` of `kvstore/key_index.py` is in Python.
 *
 *     slots   print, row   an open hash table, in the order of the prints; row -1 is empty
 *     keys    the owner's list: the key of each row, which is therefore not kept here again
 *
 * A key is looked for from its print's own slot on; there are always empty ones. What is taken out
 * leaves no trace, so the table does not grow while keys come and go. A larger table has the same
 * order: growing copies one slot behind the other and looks at no key. An index may be mirrored: then
 * a post office has a word for each of its keys (`taken_keys.c`). Part of `kvstore/rows.c`.
 */

#define SLOTS_MIN 64

typedef struct {
    uint32_t print;
    int32_t row;
} KeySlot;

typedef struct {
    PyObject_HEAD
    PyObject *keys;
    KeySlot *slots;
    Py_ssize_t num_slots, used;
    PostOffice *office; /* has a word for each key; null: none does */
} KeyIndex;

static Py_ssize_t key_slot_of(const KeyIndex *index, uint32_t print)
{
    return (Py_ssize_t)(((uint64_t)print * (uint64_t)index->num_slots) >> 32);
}

static Py_ssize_t key_slot_behind(const KeyIndex *index, Py_ssize_t slot)
{
    return slot + 1 == index->num_slots ? 0 : slot + 1;
}

static Py_ssize_t put_key(KeyIndex *index, KeySlot fresh)
{
    Py_ssize_t slot = key_slot_of(index, fresh.print);
    while (index->slots[slot].row != EMPTY)
        slot = key_slot_behind(index, slot);
    index->slots[slot] = fresh;
    return slot;
}

/* Make sure that one more fits: three quarters of the slots are in use at most. */
static int reserve_key(KeyIndex *index)
{
    if ((index->used + 1) * 4 <= index->num_slots * 3)
        return 0;
    KeyIndex larger = *index;
    larger.num_slots = index->num_slots ? index->num_slots + index->num_slots / 2 : SLOTS_MIN;
    larger.slots = PyMem_New(KeySlot, larger.num_slots);
    if (!larger.slots) {
        PyErr_NoMemory();
        return -1;
    }
    memset(larger.slots, 0xff, (size_t)larger.num_slots * sizeof(KeySlot)); /* all are empty */
    for (Py_ssize_t slot = 0; slot < index->num_slots; slot++)
        if (index->slots[slot].row != EMPTY)
            (void)put_key(&larger, index->slots[slot]);
    PyMem_Free(index->slots);
    index->slots = larger.slots;
    index->num_slots = larger.num_slots;
    return 0;
}

/* Read a key. Comparing bytes runs no other code, so nothing changes under a search. */
static int key_print_of(PyObject *key, uint32_t *print)
{
    if (PyBytes_CheckExact(key))
        return print_of(key, print);
    PyErr_Format(PyExc_TypeError, "a key is bytes, not %s", Py_TYPE(key)->tp_name);
    return -1;
}

static bool is_key(const KeyIndex *index, Py_ssize_t row, PyObject *key)
{
    if (row >= PyList_GET_SIZE(index->keys))
        return false;
    PyObject *there = PyList_GET_ITEM(index->keys, row);
    return there == key || (PyBytes_CheckExact(there) &&
                            PyBytes_GET_SIZE(there) == PyBytes_GET_SIZE(key) &&
                            !memcmp(PyBytes_AS_STRING(there), PyBytes_AS_STRING(key),
                                    (size_t)PyBytes_GET_SIZE(key)));
}

/* Return the slot of a key, -1 if it is not there. */
static Py_ssize_t find_key(const KeyIndex *index, PyObject *key, uint32_t print)
{
    if (!index->used)
        return EMPTY;
    for (Py_ssize_t slot = key_slot_of(index, print); index->slots[slot].row != EMPTY;
         slot = key_slot_behind(index, slot))
        if (index->slots[slot].print == print && is_key(index, index->slots[slot].row, key))
            return slot;
    return EMPTY;
}

/* Empty a slot; what was put behind it for want of a place moves up. */
static void take_key_out(KeyIndex *index, Py_ssize_t hole)
{
    for (Py_ssize_t slot = key_slot_behind(index, hole); index->slots[slot].row != EMPTY;
         slot = key_slot_behind(index, slot)) {
        Py_ssize_t own = key_slot_of(index, index->slots[slot].print);
        bool stays = hole <= slot ? hole < own && own <= slot : hole < own || own <= slot;
        if (!stays) {
            index->slots[hole] = index->slots[slot];
            hole = slot;
        }
    }
    index->slots[hole].row = EMPTY;
    index->used--;
}

static int take_row(PyObject *number, int32_t *row)
{
    long value = PyLong_AsLong(number);
    if (value >= 0 && value <= INT32_MAX) {
        *row = (int32_t)value;
        return 0;
    }
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "row %ld", value);
    return -1;
}

/* Enter a key if it is not there. Returns its slot, or -1 with an exception. */
static Py_ssize_t enter_key(KeyIndex *index, PyObject *key, int32_t row)
{
    uint32_t print;
    if (key_print_of(key, &print))
        return -1;
    Py_ssize_t slot = find_key(index, key, print);
    if (slot != EMPTY)
        return slot;
    if (reserve_key(index))
        return -1;
    index->used++;
    if (index->office)
        enter_word(&index->office->words, key);
    return put_key(index, (KeySlot){print, row});
}

/* Ask for the slots of many keys, so that they come beside one another and are not waited for in turn. */
static void fetch_slots(const KeyIndex *index, PyObject *const *keys, Py_ssize_t count)
{
    uint32_t print;
    for (Py_ssize_t i = 0; index->num_slots && i < count; i++)
        if (PyBytes_CheckExact(keys[i]) && !print_of(keys[i], &print))
            __builtin_prefetch(index->slots + key_slot_of(index, print), 1);
}

/* ---- methods, as those of a dictionary */

static PyObject *key_index_get(KeyIndex *index, PyObject *const *args, Py_ssize_t count)
{
    uint32_t print;
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "get takes a key, and what to return without it");
        return NULL;
    }
    if (key_print_of(args[0], &print))
        return NULL;
    Py_ssize_t slot = find_key(index, args[0], print);
    if (slot == EMPTY)
        return Py_NewRef(count == 2 ? args[1] : Py_None);
    return PyLong_FromLong(index->slots[slot].row);
}

static PyObject *key_index_setdefault(KeyIndex *index, PyObject *const *args, Py_ssize_t count)
{
    int32_t row;
    if (expect(count, 2, "setdefault") || take_row(args[1], &row))
        return NULL;
    Py_ssize_t slot = enter_key(index, args[0], row);
    return slot < 0 ? NULL : PyLong_FromLong(index->slots[slot].row);
}

static PyObject *key_index_claim(KeyIndex *index, PyObject *const *args, Py_ssize_t count)
{
    if (expect(count, 2, "claim"))
        return NULL;
    if (!PyList_Check(args[0]) || !PyList_Check(args[1]) ||
        PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected two lists of one length");
        return NULL;
    }
    fetch_slots(index, PySequence_Fast_ITEMS(args[0]), PyList_GET_SIZE(args[0]));
    PyObject *taken = PyList_New(0);
    for (Py_ssize_t i = 0; taken && i < PyList_GET_SIZE(args[0]); i++) {
        int32_t row;
        Py_ssize_t slot = take_row(PyList_GET_ITEM(args[1], i), &row)
                              ? -1
                              : enter_key(index, PyList_GET_ITEM(args[0], i), row);
        bool other = slot >= 0 && index->slots[slot].row != row;
        PyObject *position = other ? PyLong_FromSsize_t(i) : NULL;
        if (slot < 0 || (other && (!position || PyList_Append(taken, position))))
            Py_CLEAR(taken);
        Py_XDECREF(position);
    }
    return taken;
}

static int remove_key(KeyIndex *index, PyObject *key)
{
    uint32_t print;
    if (key_print_of(key, &print))
        return -1;
    Py_ssize_t slot = find_key(index, key, print);
    if (slot == EMPTY) {
        PyErr_SetObject(PyExc_KeyError, key);
        return -1;
    }
    take_key_out(index, slot);
    if (index->office)
        leave_word(&index->office->words, key);
    return 0;
}

static PyObject *key_index_drop(KeyIndex *index, PyObject *of_keys)
{
    PyObject *keys = PySequence_Fast(of_keys, "expected a sequence of keys");
    if (!keys)
        return NULL;
    fetch_slots(index, PySequence_Fast_ITEMS(keys), PySequence_Fast_GET_SIZE(keys));
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PySequence_Fast_GET_SIZE(keys); i++)
        failed = remove_key(index, PySequence_Fast_GET_ITEM(keys, i));
    Py_DECREF(keys);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static int key_index_contains(KeyIndex *index, PyObject *key)
{
    uint32_t print;
    return key_print_of(key, &print) ? -1 : find_key(index, key, print) != EMPTY;
}

static PyObject *key_index_has(KeyIndex *index, PyObject *key)
{
    int found = key_index_contains(index, key);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

static PyObject *key_index_has_any(KeyIndex *index, PyObject *of_keys)
{
    PyObject *keys = PySequence_Fast(of_keys, "expected keys");
    if (!keys)
        return NULL;
    fetch_slots(index, PySequence_Fast_ITEMS(keys), PySequence_Fast_GET_SIZE(keys));
    int found = 0;
    for (Py_ssize_t i = 0; !found && i < PySequence_Fast_GET_SIZE(keys); i++)
        found = key_index_contains(index, PySequence_Fast_GET_ITEM(keys, i));
    Py_DECREF(keys);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

static PyObject *key_index_rows(KeyIndex *index, PyObject *ignored)
{
    (void)ignored;
    PyObject *rows = PyList_New(0);
    for (Py_ssize_t slot = 0; rows && slot < index->num_slots; slot++) {
        if (index->slots[slot].row == EMPTY)
            continue;
        PyObject *row = PyLong_FromLong(index->slots[slot].row);
        if (!row || PyList_Append(rows, row))
            Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    return rows;
}

static PyObject *key_index_mirror(KeyIndex *index, PyObject *office)
{
    if (office != Py_None && !Py_IS_TYPE(office, &post_office_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a PostOffice, or None");
        return NULL;
    }
    Py_XSETREF(index->office, office == Py_None ? NULL : (PostOffice *)Py_NewRef(office));
    for (Py_ssize_t slot = 0; index->office && slot < index->num_slots; slot++)
        if (index->slots[slot].row != EMPTY)
            enter_word(&index->office->words, PyList_GET_ITEM(index->keys, index->slots[slot].row));
    Py_RETURN_NONE;
}

static Py_ssize_t key_index_length(KeyIndex *index)
{
    return index->used;
}

static PyObject *key_index_item(KeyIndex *index, PyObject *key)
{
    uint32_t print;
    if (key_print_of(key, &print))
        return NULL;
    Py_ssize_t slot = find_key(index, key, print);
    if (slot != EMPTY)
        return PyLong_FromLong(index->slots[slot].row);
    PyErr_SetObject(PyExc_KeyError, key);
    return NULL;
}

static int key_index_set_item(KeyIndex *index, PyObject *key, PyObject *number)
{
    int32_t row;
    if (!number)
        return remove_key(index, key);
    if (take_row(number, &row))
        return -1;
    Py_ssize_t slot = enter_key(index, key, row);
    if (slot < 0)
        return -1;
    index->slots[slot].row = row;
    return 0;
}

/* ---- its type */

static PyObject *key_index_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *keys;
    static char *names[] = {"keys", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!", names, &PyList_Type, &keys))
        return NULL;
    KeyIndex *index = (KeyIndex *)type->tp_alloc(type, 0); /* zeroed */
    if (index)
        index->keys = Py_NewRef(keys);
    return (PyObject *)index;
}

static void key_index_dealloc(KeyIndex *index)
{
    Py_XDECREF(index->keys);
    Py_XDECREF(index->office);
    PyMem_Free(index->slots);
    Py_TYPE(index)->tp_free((PyObject *)index);
}

static PyObject *key_index_sizeof(KeyIndex *index, PyObject *ignored)
{
    (void)ignored;
    return PyLong_FromSsize_t((Py_ssize_t)sizeof(KeyIndex) +
                              index->num_slots * (Py_ssize_t)sizeof(KeySlot));
}

#define KEY_METHOD(name, flags, text)                                                              \
    {#name, (PyCFunction)(void (*)(void))key_index_##name, flags, text}

static PyMethodDef key_index_methods[] = {
    KEY_METHOD(get, METH_FASTCALL, "get(key, default=None)\n--\n\nReturn its row."),
    KEY_METHOD(setdefault, METH_FASTCALL, "setdefault(key, row)\n--\n\nReturn its row then."),
    KEY_METHOD(claim, METH_FASTCALL, "claim(keys, rows)\n--\n\nAs `row_loops.claim`."),
    KEY_METHOD(drop, METH_O, "drop(keys)\n--\n\nAs `row_loops.drop`."),
    KEY_METHOD(has_any, METH_O, "has_any(keys)\n--\n\nTell whether one of them is there."),
    KEY_METHOD(mirror, METH_O, "mirror(office)\n--\n\nKeep a word for each key there; None: nowhere."),
    KEY_METHOD(rows, METH_NOARGS, "rows()\n--\n\nReturn all rows, in no order."),
    {"__contains__", (PyCFunction)key_index_has, METH_O | METH_COEXIST, NULL},
    {"__sizeof__", (PyCFunction)key_index_sizeof, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMappingMethods key_index_mapping = {
    .mp_length = (lenfunc)key_index_length,
    .mp_subscript = (binaryfunc)key_index_item,
    .mp_ass_subscript = (objobjargproc)key_index_set_item,
};

static PySequenceMethods key_index_sequence = {.sq_contains = (objobjproc)key_index_contains};

static PyTypeObject key_index_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvstore._rows.KeyIndex",
    .tp_doc = "KeyIndex(keys)\n--\n\nKey -> row, of rows whose keys are in a list of the owner's.",
    .tp_basicsize = sizeof(KeyIndex),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = key_index_new,
    .tp_dealloc = (destructor)key_index_dealloc,
    .tp_methods = key_index_methods,
    .tp_as_mapping = &key_index_mapping,
    .tp_as_sequence = &key_index_sequence,
};
