/* The compiled part of the package: loops that would cost Python work per piece or per system call.
 *
 * One concept a file, in `compiled/`, all of it one translation unit: everything is static.
 *
 * Optional. `transfer/native.py` imports it as `transfer._native` and has the same names in Python
 * for where it was not built. Callers have checked all bounds; what is checked here is what would
 * corrupt memory however careful they are (sizes of arrays, negative lengths).
 */
#define PY_SSIZE_T_CLEAN
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <Python.h>
#include <structmember.h>

#include <assert.h>
#include <endian.h>
#include <errno.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "compiled/arguments.c"
#include "compiled/copies.c"
#include "compiled/file_calls.c"
#include "compiled/call_line.c"
#include "compiled/stream.c"
#include "compiled/look.c"
#include "compiled/cores.c"
#include "compiled/courtesy.c"
#include "compiled/lane.c"
#include "compiled/left_bulk.c"
#include "compiled/progress.c"
#include "compiled/books.c"
#include "compiled/message.c"
#include "compiled/mapped_copy.c"
#include "compiled/short_way.c"
#include "compiled/mapped.c"
#include "compiled/small_ones.c"
#include "compiled/server.c"
#include "compiled/in_place.c"
#include "compiled/served.c"
#include "compiled/server_type.c"
#include "compiled/board.c"
#include "compiled/local_line.c"
#include "compiled/local_callers.c"

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

static PyMethodDef methods[] = {
    FAST(copy_one),
    FAST(copy_pieces),
    FAST(process_vm_write),
    FAST(process_vm_read),
    FAST(progress),
    {"num_urgent", num_urgent, METH_NOARGS, num_urgent_doc},
    {"hurry", hurry, METH_NOARGS, hurry_doc},
    {"num_turns_taken", num_turns_taken, METH_NOARGS, num_turns_taken_doc},
    {"num_cores_changed", get_num_cores_changed, METH_NOARGS, num_cores_changed_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "transfer._native",
    .m_doc = "Compiled loops of the transfer engine.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    static PyTypeObject *const types[] = {&lane_type,    &rail_load_type, &books_type,
                                          &message_type, &short_way_type, &server_type,
                                          &local_line_type, &local_callers_type, &mapped_window_type,
                                          &mapped_copy_type, &call_line_type};
    if (!make_names())
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    bool added = module != NULL;
    for (size_t i = 0; added && i < sizeof types / sizeof *types; i++)
        added = PyModule_AddType(module, types[i]) == 0;
    if (!added) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
