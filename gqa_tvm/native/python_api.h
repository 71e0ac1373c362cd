/* What this project takes of CPython's stable ABI and of NumPy's arrays, a part of launcher.c. The
 * functions are weak: one file serves every Python version, and C programs without Python. */
#ifndef GQA_TVM_PYTHON_API_H
#define GQA_TVM_PYTHON_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* An object of CPython without optional fields. remembered_calls.py finds out whether this
 * interpreter's objects and arrays are laid out so. */
typedef struct PyObject {
  ssize_t references;
  struct PyObject* type;
} PyObject;

/* Fields that the accessors of NumPy's headers read, compiled into every extension module. */
typedef struct {
  PyObject head;
  char* data;
  int ndim;
  int64_t *shape, *strides; /* in bytes */
  PyObject *base, *dtype;
  int flags;
} Array;

enum { C_CONTIGUOUS = 0x1, ALIGNED = 0x100, WRITEABLE = 0x400 };

typedef struct {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* const* given, ssize_t count);
  int flags;
  const char* text;
} PyMethodDef;

enum { METH_FASTCALL = 0x80 };

#define FROM_PYTHON __attribute__((weak))
extern PyObject _Py_NoneStruct FROM_PYTHON;
extern void Py_IncRef(PyObject*) FROM_PYTHON;
extern void Py_DecRef(PyObject*) FROM_PYTHON;
extern void PyErr_Clear(void) FROM_PYTHON;
extern void* PyEval_SaveThread(void) FROM_PYTHON;
extern void PyEval_RestoreThread(void*) FROM_PYTHON;
extern PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*) FROM_PYTHON;
extern PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*)) FROM_PYTHON;
extern void* PyCapsule_GetPointer(PyObject*, const char*) FROM_PYTHON;
extern PyObject* PyObject_CallObject(PyObject*, PyObject*) FROM_PYTHON;
extern PyObject* PyBool_FromLong(long) FROM_PYTHON;
extern PyObject* PyLong_FromLongLong(long long) FROM_PYTHON;
extern PyObject* PyTuple_New(ssize_t) FROM_PYTHON;
extern int PyTuple_SetItem(PyObject*, ssize_t, PyObject*) FROM_PYTHON;
extern PyObject* PyTuple_GetItem(PyObject*, ssize_t) FROM_PYTHON;
extern ssize_t PyTuple_Size(PyObject*) FROM_PYTHON;

static PyObject* owned(PyObject* object) {
  Py_IncRef(object);
  return object;
}

static PyObject* none(void) { return owned(&_Py_NoneStruct); }

/* A tuple that takes over `count` references; NULL with an exception set, also if an item is NULL. */
static PyObject* tuple_of(int count, PyObject* const* items) {
  bool complete = true;
  PyObject* tuple = PyTuple_New(count);
  for (int i = 0; i < count; ++i) {
    complete = complete && items[i] != NULL;
    if (tuple != NULL)
      PyTuple_SetItem(tuple, i, items[i]);
    else
      Py_DecRef(items[i]);
  }
  if (complete) return tuple;
  Py_DecRef(tuple);
  return NULL;
}

#endif
