/* A call of the operator as an earlier one with arrays of the same form has left it: what its kernels
 * take, and what must hold of the values in its arrays. A part of launcher.c.
 *
 * Validation in Python is the truth. Here a call is either known to be valid for certain or left to it.
 */
#ifndef GQA_TVM_REMEMBERED_CALL_H
#define GQA_TVM_REMEMBERED_CALL_H

#include "kernel_call.h"
#include "python_api.h"

/* The operator's arrays in its order, then what kernels take besides. */
enum {
  QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, SEQLENS, TOTAL, COS, SIN, POSITION_IDS, BIAS, HEAD_SINK,
  K_SCALE, V_SCALE, Q_NORM, K_NORM, QUERY_SEQLENS, PRESENT_KEY, PRESENT_VALUE, ARRAYS,
  ENTRIES = ARRAYS, POSITIONS, OUTPUT, CONSTANT = -1
};
enum { MAX_DIMS = 4, APPEND_TENSORS = 11, ATTENTION_TENSORS = 13 };
enum { APPEND_SCALARS = 4, ATTENTION_SCALARS = 8 };
enum { MAX_CHOICES = 24, FLASH = 0, FLASH_DECODE = 1, NAIVE = 2 };

/* The form of an array; `dtype` is NULL for one that is absent. free_axis: an axis of a contiguous
 * array that may have any length, -1 = none. */
typedef struct {
  PyObject* dtype;
  int ndim, flags, free_axis;
  int64_t shape[MAX_DIMS], strides[MAX_DIMS];
} Form;

/* A kernel's tensor: its memory is that of a source, or of an array that is kept. */
typedef struct {
  int source;
  PyObject* kept;
  Tensor tensor;
  int64_t shape[MAX_DIMS], strides[MAX_DIMS];
} Argument;

/* Of all calls of these forms; as `_Facts` in remembered_calls.py. has_past .. sliding: 0 or 1. */
typedef struct {
  int64_t batch, tokens, kv_tokens, kv_heads, columns, cache_itemsize, output_bytes, output_numbers;
  int64_t has_past, has_positions, quantized, sliding;
  int64_t rotary_rows; /* of cos_cache, INT64_MAX without */
  int64_t window, kv_chunk, append; /* `append`: address of the kernel */
} Facts;

/* An attention kernel and the totals it serves: of a power of two, and above kv_chunk or not. As
 * `_Choice` in remembered_calls.py. kv_block .. width: of flash decoding; chunk: keys of a task,
 * 0 = all. */
typedef struct {
  int64_t bucket, is_long, address, kind, kv_block, chunk, groups, rows, width;
} Choice;

typedef struct {
  int users; /* callers that are using it at this moment */
  Form forms[ARRAYS];
  Facts facts;
  Argument append[APPEND_TENSORS], attention[ATTENTION_TENSORS];
  Value append_scalars[APPEND_SCALARS], attention_scalars[ATTENTION_SCALARS];
  int choice_count;
  Choice choices[MAX_CHOICES];
  PyObject* plans[MAX_CHOICES];
  int64_t apart; /* from key cache to value cache in the call that is remembered */
  PyObject *output_shape, *output_dtype, *cache_dtype;
} Call;

/* Rows of a cache [B, N_kv, .., columns]; `start` is NULL where nothing is to be copied. */
typedef struct {
  char* start;
  int64_t strides[3];
} Rows;

/* What the present caches are: new, the past itself, or others that get a copy of new ones in the end. */
typedef enum { NEW_PRESENTS, PAST_IN_PLACE, OTHER_PRESENTS } Presents;

/* A call under way. past, present: what is copied from and to, if anything. */
typedef struct {
  const Call* call;
  const Choice* choice;
  Array* const* given;
  int64_t total, rows, longest; /* T, of the present caches, of the longest entry */
  Presents presents;
  bool is_prompt, is_chunk;
  int32_t (*entries)[4];
  int64_t* positions;
  float* partial;
  void* output;
  char* cache[2];
  Rows past[2], present[2];
} Step;

static bool same_numbers(const int64_t* a, const int64_t* b, int count, int except) {
  for (int i = 0; i < count; ++i)
    if (a[i] != b[i] && i != except) return false;
  return true;
}

static bool has_form(const Array* array, const Form* form) {
  if (form->dtype == NULL || &array->head == &_Py_NoneStruct)
    return form->dtype == NULL && &array->head == &_Py_NoneStruct;
  if (array->dtype != form->dtype || array->ndim != form->ndim) return false;
  if ((array->flags & form->flags) != form->flags) return false;
  return same_numbers(array->shape, form->shape, form->ndim, form->free_axis) &&
         (form->free_axis >= 0 || same_numbers(array->strides, form->strides, form->ndim, -1));
}

static int bucket_of(int64_t total) {
  return total > 1 ? 64 - __builtin_clzll((uint64_t)total - 1) : 0;
}

static int find_choice(const Call* call, int64_t total) {
  for (int i = 0; i < call->choice_count; ++i) {
    const Choice* choice = &call->choices[i];
    if (choice->bucket == bucket_of(total) && choice->is_long == (total > call->facts.kv_chunk))
      return i;
  }
  return -1;
}

#endif
