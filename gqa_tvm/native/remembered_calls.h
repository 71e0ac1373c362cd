/* The calls that an operator remembers, and the Python functions that run and remember them, a part of
 * launcher.c. Used under the interpreter's lock, which is free while kernels run. */
#ifndef GQA_TVM_REMEMBERED_CALLS_H
#define GQA_TVM_REMEMBERED_CALLS_H

#include "remembered_run.h"

enum { MAX_CALLS = 64, OUTPUT_ALIGNMENT = 64 };

typedef struct {
  int threads, count, latest, oldest;
  Call* calls[MAX_CALLS];
  PyObject *array_type, *empty, *zeros, *byte_type; /* numpy.ndarray, .empty, .zeros, dtype of uint8 */
} Calls;

static const char* const CALLS_NAME = "gqa_tvm.calls";

static void forget_call(Call* call) {
  for (int i = 0; i < ARRAYS; ++i) Py_DecRef(call->forms[i].dtype);
  for (int i = 0; i < APPEND_TENSORS; ++i) Py_DecRef(call->append[i].kept);
  for (int i = 0; i < ATTENTION_TENSORS; ++i) Py_DecRef(call->attention[i].kept);
  for (int i = 0; i < call->choice_count; ++i) Py_DecRef(call->plans[i]);
  Py_DecRef(call->output_shape), Py_DecRef(call->output_dtype), Py_DecRef(call->cache_dtype);
  free(call);
}

static void forget_calls(PyObject* capsule) {
  Calls* calls = PyCapsule_GetPointer(capsule, CALLS_NAME);
  for (int i = 0; i < calls->count; ++i) forget_call(calls->calls[i]);
  Py_DecRef(calls->array_type), Py_DecRef(calls->empty), Py_DecRef(calls->zeros),
      Py_DecRef(calls->byte_type);
  free(calls);
}

static bool has_forms(const Call* call, Array* const* given) {
  for (int i = 0; i < ARRAYS; ++i)
    if (!has_form(given[i], &call->forms[i])) return false;
  return true;
}

static Call* find_call(Calls* calls, Array* const* given) {
  for (int i = 0; i < ARRAYS; ++i)
    if (given[i]->head.type != calls->array_type && &given[i]->head != &_Py_NoneStruct) return NULL;
  for (int i = 0; i < calls->count; ++i) {
    const int at = (calls->latest + i) % calls->count;
    if (has_forms(calls->calls[at], given)) return calls->calls[calls->latest = at];
  }
  return NULL;
}

/* A new array whose first element lies at a multiple of 64 bytes; NULL with an exception set. Takes
 * over `shape`. */
static PyObject* new_array(const Calls* calls, PyObject* allocate, int64_t bytes, PyObject* shape,
                           PyObject* dtype) {
  PyObject* size[] = {PyLong_FromLongLong(bytes + OUTPUT_ALIGNMENT), owned(calls->byte_type)};
  PyObject* arguments = tuple_of(2, size);
  PyObject* memory = arguments ? PyObject_CallObject(allocate, arguments) : NULL;
  Py_DecRef(arguments);
  if (memory == NULL) {
    Py_DecRef(shape);
    return NULL;
  }
  const uint64_t start = -(uint64_t)(intptr_t)((Array*)memory)->data % OUTPUT_ALIGNMENT;
  PyObject* parts[] = {shape, owned(dtype), memory, PyLong_FromLongLong((int64_t)start)};
  arguments = tuple_of(4, parts);
  PyObject* array = arguments ? PyObject_CallObject(calls->array_type, arguments) : NULL;
  Py_DecRef(arguments);
  return array;
}

static PyObject* new_output(const Calls* calls, const Call* call) {
  const int64_t bytes = call->facts.output_bytes;
  PyObject* output =
      new_array(calls, calls->empty, bytes, owned(call->output_shape), call->output_dtype);
  if (output != NULL && poison) memset(((Array*)output)->data, 0xFF, (size_t)bytes);
  return output;
}

static PyObject* new_cache(const Calls* calls, const Step* step) {
  const Facts* facts = &step->call->facts;
  const int64_t shape[] = {facts->batch, facts->kv_heads, step->rows, facts->columns};
  PyObject* lengths[4];
  int64_t bytes = facts->cache_itemsize;
  for (int i = 0; i < 4; ++i) {
    lengths[i] = PyLong_FromLongLong(shape[i]);
    if (__builtin_mul_overflow(bytes, shape[i], &bytes)) bytes = INT64_MAX / 2;
  }
  return new_array(calls, calls->zeros, bytes, tuple_of(4, lengths), step->call->cache_dtype);
}

static Rows rows_of(const Array* cache) {
  return (Rows){cache->data, {cache->strides[0], cache->strides[1], cache->strides[2]}};
}

/* The caches that kernels write: the caller's past, or new ones. False with an exception set without
 * memory. */
static bool take_caches(const Calls* calls, Step* step, PyObject* caches[2]) {
  const bool has_past = step->call->facts.has_past;
  for (int which = 0; which < 2; ++which) {
    Array *const past = step->given[PAST_KEY + which], *const present =
                                                           step->given[PRESENT_KEY + which];
    const bool in_place = step->presents == PAST_IN_PLACE;
    caches[which] = in_place ? owned(&present->head) : new_cache(calls, step);
    if (caches[which] == NULL) return false;
    step->cache[which] = ((Array*)caches[which])->data;
    if (has_past && !in_place) step->past[which] = rows_of(past);
    if (step->presents == OTHER_PRESENTS) step->present[which] = rows_of(present);
  }
  return true;
}

/* Fills scratch memory, runs, and frees it; nothing of Python happens here. False: nothing has been
 * done that the long way would not do again. */
static bool run_step(Step* step, int threads) {
  const Facts* facts = &step->call->facts;
  const size_t entries = (size_t)facts->batch * sizeof *step->entries;
  const size_t positions =
      facts->has_positions ? (size_t)(facts->batch * facts->tokens) * sizeof(int64_t) : 0;
  step->entries = scratch_memory(entries + positions);
  if (step->entries == NULL) return false;
  step->positions = (int64_t*)((char*)step->entries + entries);
  if (!fill_entries(step)) {
    release_scratch(step->entries);
    return false;
  }
  heed_window(step);
  const size_t numbers = partial_numbers(step);
  step->partial = numbers ? scratch_memory(numbers * sizeof(float)) : NULL;
  if (numbers && step->partial == NULL) return false;
  KernelValues append, attention;
  if (facts->kv_tokens) bind_append(step, &append);
  bind_attention(step, &attention);
  /* From here on other threads may reshape the caller's arrays: these are not looked at again. */
  void* thread = PyEval_SaveThread();
  int error = run_kernels(step, &append, &attention, threads);
  PyEval_RestoreThread(thread);
  if (error != 0) return false;
  if (numbers) release_scratch(step->partial);
  release_scratch(step->entries);
  return true;
}

static PyObject* run_found(const Calls* calls, Call* call, int choice, Array* const* given) {
  Step step = {.call = call, .choice = &call->choices[choice], .given = given};
  PyObject *caches[2] = {NULL, NULL}, *output = NULL, *result = NULL;
  if (!begin_step(&step)) return NULL;
  output = new_output(calls, call);
  if (output != NULL && take_caches(calls, &step, caches)) {
    step.output = ((Array*)output)->data;
    if (run_step(&step, calls->threads)) {
      const bool given_back = step.presents == OTHER_PRESENTS;
      PyObject* key = given_back ? &given[PRESENT_KEY]->head : caches[0];
      PyObject* value = given_back ? &given[PRESENT_VALUE]->head : caches[1];
      PyObject* parts[] = {owned(output), owned(key), owned(value), none()};
      PyObject* both[] = {tuple_of(4, parts), owned(call->plans[choice])};
      result = tuple_of(2, both);
    } else {
      forget_failure();
    }
  }
  Py_DecRef(output), Py_DecRef(caches[0]), Py_DecRef(caches[1]);
  return result;
}

/* run(query, .., present_value): ((output, present_key, present_value, None), plan), or None for a call
 * that is not known to be valid, and then nothing has changed that the same call would not change. */
static PyObject* run_call(PyObject* self, PyObject* const* given, ssize_t count) {
  Calls* calls = PyCapsule_GetPointer(self, CALLS_NAME);
  Call* call = count == ARRAYS ? find_call(calls, (Array* const*)given) : NULL;
  const int choice = call ? find_choice(call, element((Array*)given[TOTAL], 0)) : -1;
  if (choice < 0) return none();
  ++call->users;
  PyObject* result = run_found(calls, call, choice, (Array* const*)given);
  --call->users;
  if (result == NULL) PyErr_Clear();
  return result != NULL ? result : none();
}

#endif
