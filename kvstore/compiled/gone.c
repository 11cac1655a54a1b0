/* Names of blocks that went, in the order of going: what `kvstore/eviction/gone.py` does in Python.
 *
 *     prints, numbers   a ring: what is kept of a name, and its number, -1 if it returned
 *     slots             positions in the ring, by print: an open hash table, -1 is empty
 *
 * A name is kept as 32 bits of its hash. Slots are searched one after the other from the print's
 * own one on; there are always empty ones. Part of `kvstore/rows.c`.
 */

#define EMPTY (-1)
#define RETURNED (-1)

typedef struct {
    Column columns[3];
    uint32_t *prints;
    int64_t *numbers;
    int32_t *slots;
    Py_ssize_t length; /* of the ring */
    Py_ssize_t num_slots;
} Gone;

static void give_gone(Gone *gone)
{
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&gone->columns[i].buffer);
}

static int take_gone(PyObject *const *args, Gone *gone)
{
    static const char kinds[] = "Iqi";
    for (int i = 0; i < 3; i++) {
        bool taken = !take_column(args[i], &gone->columns[i]);
        if (taken && gone->columns[i].kind == kinds[i])
            continue;
        if (taken)
            PyErr_SetString(PyExc_TypeError, "expected columns of the types I, q and i");
        for (int j = 0; j < i + (int)taken; j++)
            PyBuffer_Release(&gone->columns[j].buffer);
        return -1;
    }
    gone->prints = gone->columns[0].buffer.buf;
    gone->numbers = gone->columns[1].buffer.buf;
    gone->slots = gone->columns[2].buffer.buf;
    gone->length = gone->columns[0].count;
    gone->num_slots = gone->columns[2].count;
    if (gone->columns[1].count == gone->length && gone->num_slots > gone->length)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the ring has one length, and more slots than that");
    give_gone(gone);
    return -1;
}

static Py_ssize_t own_slot(const Gone *gone, uint32_t print)
{
    return (Py_ssize_t)(((uint64_t)print * (uint64_t)gone->num_slots) >> 32);
}

static Py_ssize_t next_slot(const Gone *gone, Py_ssize_t slot)
{
    return slot + 1 == gone->num_slots ? 0 : slot + 1;
}

static int print_of(PyObject *name, uint32_t *print)
{
    Py_hash_t hash = PyObject_Hash(name);
    *print = (uint32_t)(((uint64_t)hash * UINT64_C(0x9E3779B97F4A7C15)) >> 32);
    return hash == -1 ? -1 : 0;
}

static void enter_gone(Gone *gone, int32_t place)
{
    Py_ssize_t slot = own_slot(gone, gone->prints[place]);
    while (gone->slots[slot] != EMPTY)
        slot = next_slot(gone, slot);
    gone->slots[slot] = place;
}

/* Empty a slot; what was put behind it for want of a place moves up. */
static void empty_slot(Gone *gone, Py_ssize_t hole)
{
    for (Py_ssize_t slot = next_slot(gone, hole); gone->slots[slot] != EMPTY;
         slot = next_slot(gone, slot)) {
        Py_ssize_t own = own_slot(gone, gone->prints[gone->slots[slot]]);
        bool stays = hole <= slot ? hole < own && own <= slot : hole < own || own <= slot;
        if (!stays) {
            gone->slots[hole] = gone->slots[slot];
            hole = slot;
        }
    }
    gone->slots[hole] = EMPTY;
}

/* Return the slot of the place, or of any with this print if that is -1; -1 if there is none. */
static Py_ssize_t find_slot(const Gone *gone, uint32_t print, int32_t place)
{
    Py_ssize_t slot = own_slot(gone, print);
    for (; gone->slots[slot] != EMPTY; slot = next_slot(gone, slot)) {
        int32_t there = gone->slots[slot];
        if (place == EMPTY ? gone->prints[there] == print : there == place)
            return slot;
    }
    return EMPTY;
}

static PyObject *remember(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Gone gone;
    if (expect(count, 6, "remember"))
        return NULL;
    Py_ssize_t place = PyLong_AsSsize_t(args[5]);
    if (PyErr_Occurred() || take_gone(args, &gone))
        return NULL;
    if (!PyList_Check(args[3]) || !PyList_Check(args[4]) ||
        PyList_GET_SIZE(args[3]) != PyList_GET_SIZE(args[4])) {
        PyErr_SetString(PyExc_TypeError, "expected two lists of one length");
    } else if (place < 0 || PyList_GET_SIZE(args[3]) > gone.length - place) {
        PyErr_SetString(PyExc_IndexError, "there is not so much room");
    } else {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[3]); i++, place++) {
            uint32_t print;
            int64_t number = PyLong_AsLongLong(PyList_GET_ITEM(args[4], i));
            if (PyErr_Occurred() || print_of(PyList_GET_ITEM(args[3], i), &print))
                break;
            gone.prints[place] = print;
            gone.numbers[place] = number;
            enter_gone(&gone, (int32_t)place);
        }
    }
    give_gone(&gone);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *recall(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Gone gone;
    if (expect(count, 4, "recall") || take_gone(args, &gone))
        return NULL;
    PyObject *names = PySequence_Fast(args[3], "expected names");
    PyObject *found = names ? PyList_New(PySequence_Fast_GET_SIZE(names)) : NULL;
    for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(found); i++) {
        uint32_t print;
        PyObject *number = NULL;
        if (!print_of(PySequence_Fast_GET_ITEM(names, i), &print)) {
            int64_t found_number = RETURNED;
            Py_ssize_t slot = find_slot(&gone, print, EMPTY);
            if (slot != EMPTY) {
                found_number = gone.numbers[gone.slots[slot]];
                gone.numbers[gone.slots[slot]] = RETURNED;
                empty_slot(&gone, slot);
            }
            number = found_number == RETURNED ? Py_NewRef(Py_None)
                                              : PyLong_FromLongLong(found_number);
        }
        if (number)
            PyList_SET_ITEM(found, i, number);
        else
            Py_CLEAR(found);
    }
    Py_XDECREF(names);
    give_gone(&gone);
    return found;
}

static PyObject *forget(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Gone gone;
    if (expect(count, 6, "forget"))
        return NULL;
    Py_ssize_t place = PyLong_AsSsize_t(args[3]), end = PyLong_AsSsize_t(args[4]);
    Py_ssize_t most = PyLong_AsSsize_t(args[5]);
    if (PyErr_Occurred() || take_gone(args, &gone))
        return NULL;
    PyObject *numbers = PyList_New(0);
    if (place < 0 || end > gone.length) {
        PyErr_SetString(PyExc_IndexError, "not in the ring");
        Py_CLEAR(numbers);
    }
    for (; numbers && place < end && PyList_GET_SIZE(numbers) < most; place++) {
        if (gone.numbers[place] == RETURNED)
            continue;
        PyObject *number = PyLong_FromLongLong(gone.numbers[place]);
        if (!number || PyList_Append(numbers, number))
            Py_CLEAR(numbers);
        Py_XDECREF(number);
        Py_ssize_t slot = find_slot(&gone, gone.prints[place], (int32_t)place);
        if (slot != EMPTY)
            empty_slot(&gone, slot);
    }
    give_gone(&gone);
    return numbers ? Py_BuildValue("(Nn)", numbers, place) : NULL;
}

static PyObject *close_up(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Gone from, to;
    if (expect(count, 9, "close_up"))
        return NULL;
    Py_ssize_t place = PyLong_AsSsize_t(args[6]), end = PyLong_AsSsize_t(args[7]);
    Py_ssize_t kept = PyLong_AsSsize_t(args[8]);
    if (PyErr_Occurred() || take_gone(args, &from))
        return NULL;
    if (take_gone(args + 3, &to)) {
        give_gone(&from);
        return NULL;
    }
    bool fits = place >= 0 && end <= from.length && kept >= 0;
    for (; fits && place < end; place++) {
        if (from.numbers[place] == RETURNED)
            continue;
        fits = kept < to.length;
        if (!fits)
            break;
        to.prints[kept] = from.prints[place];
        to.numbers[kept] = from.numbers[place];
        from.numbers[place] = RETURNED; /* its slot stays, and is found in vain */
        enter_gone(&to, (int32_t)kept++);
    }
    give_gone(&from);
    give_gone(&to);
    if (fits)
        return PyLong_FromSsize_t(kept);
    PyErr_SetString(PyExc_IndexError, "not in the ring");
    return NULL;
}
