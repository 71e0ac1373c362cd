/* Remembering a call that has run, a part of launcher.c. */
#ifndef GQA_TVM_REMEMBER_H
#define GQA_TVM_REMEMBER_H

#include "remembered_calls.h"

/* Arguments of `remember`, see remembered_calls.py. Arrays of numbers are int64. */
enum {
  GIVEN, TENSORS, FREE_AXES, FACTS, SOURCE_NUMBERS, SCALARS, CHOICE, PLAN, RESULT_FORMS,
  REMEMBER_ARGUMENTS
};

static const void* numbers_of(PyObject* array) { return ((Array*)array)->data; }

static bool is_array(const Calls* calls, PyObject* object) { return object->type == calls->array_type; }

static bool set_form(Form* form, const Array* array, int free_axis, int flags) {
  if (array->ndim > MAX_DIMS || (array->flags & flags) != flags) return false;
  *form = (Form){owned(array->dtype), array->ndim, flags, -1, {0}, {0}};
  if (free_axis >= 0 && (array->flags & C_CONTIGUOUS)) {
    form->free_axis = free_axis;
    form->flags |= C_CONTIGUOUS;
  }
  for (int i = 0; i < array->ndim; ++i) {
    form->shape[i] = array->shape[i];
    form->strides[i] = array->strides[i];
  }
  return true;
}

static bool set_forms(const Calls* calls, Call* call, PyObject* given, const int64_t* free_axes) {
  for (int i = 0; i < ARRAYS; ++i) {
    PyObject* array = PyTuple_GetItem(given, i);
    if (array == &_Py_NoneStruct) continue;
    const int flags = i < PRESENT_KEY ? ALIGNED : ALIGNED | WRITEABLE;
    if (!is_array(calls, array) || !set_form(&call->forms[i], (Array*)array, (int)free_axes[i], flags))
      return false;
  }
  return true;
}

/* numbers: the source, DLPack's code and the bytes of an element. False for a tensor that is not the
 * memory of its source. */
static bool set_argument(Argument* argument, PyObject* tensor, PyObject* given,
                         const int64_t* numbers) {
  const Array* array = (Array*)tensor;
  const int source = (int)numbers[0];
  if (array->ndim > MAX_DIMS) return false;
  argument->source = source;
  if (source == CONSTANT) argument->kept = owned(tensor);
  if (source >= 0 && source < PRESENT_KEY &&
      ((Array*)PyTuple_GetItem(given, source))->data != array->data)
    return false;
  const int64_t itemsize = numbers[2];
  argument->tensor = (Tensor){.data = array->data, .device_type = ON_CPU, .ndim = array->ndim};
  argument->tensor.code = (uint8_t)numbers[1];
  argument->tensor.bits = (uint8_t)(8 * itemsize);
  argument->tensor.lanes = 1;
  argument->tensor.shape = argument->shape;
  argument->tensor.strides = argument->strides;
  int64_t compact = 1;
  for (int i = array->ndim - 1; i >= 0; --i) {
    argument->shape[i] = array->shape[i];
    argument->strides[i] = array->flags & C_CONTIGUOUS ? compact : array->strides[i] / itemsize;
    compact *= array->shape[i];
  }
  return true;
}

static bool set_arguments(Call* call, PyObject* tensors, PyObject* given, const int64_t (*numbers)[3]) {
  for (int i = 0; i < APPEND_TENSORS + ATTENTION_TENSORS; ++i) {
    Argument* argument = i < APPEND_TENSORS ? &call->append[i] : &call->attention[i - APPEND_TENSORS];
    if (!set_argument(argument, PyTuple_GetItem(tensors, i), given, numbers[i])) return false;
  }
  return true;
}

static Call* new_call(const Calls* calls, PyObject* const* from) {
  Call* call = calloc(1, sizeof *call);
  if (call == NULL) return NULL;
  memcpy(&call->facts, numbers_of(from[FACTS]), sizeof call->facts);
  const Value* scalars = numbers_of(from[SCALARS]);
  memcpy(call->append_scalars, scalars, sizeof call->append_scalars);
  memcpy(call->attention_scalars, scalars + APPEND_SCALARS, sizeof call->attention_scalars);
  call->output_shape = owned(PyTuple_GetItem(from[RESULT_FORMS], 0));
  call->output_dtype = owned(PyTuple_GetItem(from[RESULT_FORMS], 1));
  call->cache_dtype = owned(PyTuple_GetItem(from[RESULT_FORMS], 2));
  if (set_forms(calls, call, from[GIVEN], numbers_of(from[FREE_AXES])) &&
      set_arguments(call, from[TENSORS], from[GIVEN], numbers_of(from[SOURCE_NUMBERS])))
    return call;
  forget_call(call);
  return NULL;
}

/* A place for one more call, of the one that has been there longest if need be; -1 if all are being
 * used. */
static int free_place(Calls* calls) {
  if (calls->count < MAX_CALLS) return calls->count++;
  for (int i = 0; i < MAX_CALLS; ++i) {
    const int at = calls->oldest;
    calls->oldest = (at + 1) % MAX_CALLS;
    if (calls->calls[at]->users > 0) continue;
    forget_call(calls->calls[at]);
    return at;
  }
  return -1;
}

/* remember(..): whether a call that has just run will be run the short way from now on. */
static PyObject* remember_call(PyObject* self, PyObject* const* from, ssize_t count) {
  Calls* calls = PyCapsule_GetPointer(self, CALLS_NAME);
  if (count != REMEMBER_ARGUMENTS) return PyBool_FromLong(false);
  Array* given[ARRAYS];
  for (int i = 0; i < ARRAYS; ++i) given[i] = (Array*)PyTuple_GetItem(from[GIVEN], i);
  Call* call = find_call(calls, given);
  if (call == NULL) {
    call = new_call(calls, from);
    const int place = call ? free_place(calls) : -1;
    if (call != NULL && place < 0) forget_call(call);
    if (place < 0) return PyBool_FromLong(false);
    calls->calls[place] = call;
    if (call->forms[PRESENT_KEY].dtype != NULL)
      call->apart = given[PRESENT_VALUE]->data - given[PRESENT_KEY]->data;
  }
  const Choice* choice = numbers_of(from[CHOICE]);
  for (int i = 0; i < call->choice_count; ++i)
    if (call->choices[i].bucket == choice->bucket && call->choices[i].is_long == choice->is_long)
      return PyBool_FromLong(true);
  if (call->choice_count == MAX_CHOICES) return PyBool_FromLong(false);
  call->choices[call->choice_count] = *choice;
  call->plans[call->choice_count++] = owned(from[PLAN]);
  return PyBool_FromLong(true);
}

static PyObject* function_of(PyMethodDef* method, PyObject* capsule) {
  return capsule ? PyCFunction_NewEx(method, capsule, NULL) : NULL;
}

/* (run, remember) of an operator that runs on so many threads. names: numpy.ndarray, numpy.empty,
 * numpy.zeros, dtype of uint8. Called with the interpreter's lock. */
PyObject* gqa_tvm_calls(int threads, PyObject* names) {
  static PyMethodDef methods[] = {{"run", run_call, METH_FASTCALL, NULL},
                                  {"remember", remember_call, METH_FASTCALL, NULL}};
  Calls* calls = calloc(1, sizeof *calls);
  if (calls == NULL) return none();
  calls->threads = threads;
  calls->array_type = owned(PyTuple_GetItem(names, 0));
  calls->empty = owned(PyTuple_GetItem(names, 1));
  calls->zeros = owned(PyTuple_GetItem(names, 2));
  calls->byte_type = owned(PyTuple_GetItem(names, 3));
  PyObject* capsule = PyCapsule_New(calls, CALLS_NAME, forget_calls);
  PyObject* functions[] = {function_of(&methods[0], capsule), function_of(&methods[1], capsule)};
  Py_DecRef(capsule);
  return tuple_of(2, functions);
}

/* What the code above reads of an array, for a test of the fields' places: {data, ndim, flags, address
 * of the type, of the dtype, length and stride of the last axis}. The array has one axis at least. */
void gqa_tvm_read_array(PyObject* object, int64_t seen[7]) {
  const Array* array = (Array*)object;
  seen[0] = (intptr_t)array->data, seen[1] = array->ndim, seen[2] = array->flags;
  seen[3] = (intptr_t)array->head.type, seen[4] = (intptr_t)array->dtype;
  seen[5] = array->shape[array->ndim - 1], seen[6] = array->strides[array->ndim - 1];
}

#endif
