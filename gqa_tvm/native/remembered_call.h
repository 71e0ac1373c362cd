/* A call of the operator as an earlier one with arrays of the same form has left it: what its kernels take,
 * and what must hold of the values in its arrays. A part of launcher.c.
 *
 * Validation in Python is the truth. Here a call is either known to be valid for certain or left to it. */
#ifndef GQA_TVM_REMEMBERED_CALL_H
#define GQA_TVM_REMEMBERED_CALL_H

#include "kernel_call.h"
#include "python_api.h"

/* The operator's arrays in its order, then what kernels take besides. */
enum {
  QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, SEQLENS, TOTAL, COS, SIN, POSITION_IDS, BIAS, HEAD_SINK,
  K_SCALE, V_SCALE, Q_NORM, K_NORM, QUERY_SEQLENS, PRESENT_KEY, PRESENT_VALUE, ARRAYS,
  ENTRIES = ARRAYS, POSITIONS, OUTPUT, SOURCES, CONSTANT = -1
};
enum { MAX_DIMS = 4, APPEND_TENSORS = 11, ATTENTION_TENSORS = 13, APPEND_SCALARS = 4, ATTENTION_SCALARS = 8 };
enum { MAX_CHOICES = 24, FLASH = 0, FLASH_DECODE = 1, NAIVE = 2 };

/* The form of an array; `dtype` is NULL for one that is absent. free_axis: an axis of a contiguous array
 * that may have any length, -1 = none. */
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
  int64_t batch, tokens, kv_tokens, kv_heads, columns, cache_itemsize, output_bytes;
  int64_t has_past, in_place, has_positions, quantized, sliding;
  int64_t rotary_rows; /* of cos_cache, INT64_MAX without */
  int64_t window, kv_chunk, append; /* `append`: address of the kernel */
} Facts;

/* An attention kernel and the totals it serves: of a power of two, and above kv_chunk or not. As `_Choice` in
 * remembered_calls.py. kv_block .. width: of flash decoding; chunk: keys of a task, 0 = all. */
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

/* A call under way. */
typedef struct {
  const Call* call;
  const Choice* choice;
  Array* const* given;
  int64_t total, rows, longest; /* T, of the present caches, of the longest entry */
  bool is_prompt, is_chunk;
  int32_t (*entries)[4];
  int64_t* positions;
  float* partial;
  void* output;
  char* cache[2];
  const char* past[2]; /* NULL: nothing is copied from there */
  int64_t past_strides[2][3];
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

static int bucket_of(int64_t total) { return total > 1 ? 64 - __builtin_clzll((uint64_t)total - 1) : 0; }

static int find_choice(const Call* call, int64_t total) {
  for (int i = 0; i < call->choice_count; ++i) {
    const Choice* choice = &call->choices[i];
    if (choice->bucket == bucket_of(total) && choice->is_long == (total > call->facts.kv_chunk)) return i;
  }
  return -1;
}

/* No number of `count` is infinite or NaN. */
static bool all_finite(const float* numbers, int64_t count) {
  typedef uint32_t Lanes __attribute__((vector_size(16), aligned(4), may_alias));
  const uint32_t exponent = 0x7F800000;
  Lanes wrong = {0};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    Lanes bits;
    memcpy(&bits, numbers + i, sizeof bits);
    wrong |= (Lanes)((bits & exponent) == exponent);
  }
  for (; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, numbers + i, sizeof bits);
    wrong[0] |= (bits & exponent) == exponent;
  }
  return (wrong[0] | wrong[1] | wrong[2] | wrong[3]) == 0;
}

static bool scales_are_finite(const Step* step) {
  for (int i = 0; i < 2; ++i) {
    const Argument* scale = &step->call->attention[ATTENTION_TENSORS - 3 + i]; /* before the output */
    if (!all_finite((const float*)step->given[K_SCALE + i]->data, scale->shape[0])) return false;
  }
  return true;
}

/* Numbers of an array that is a vector but for axes of length 1. */
static int32_t element(const Array* array, int64_t index) {
  int64_t stride = 0;
  for (int i = 0; i < array->ndim; ++i)
    if (array->shape[i] > 1) stride = array->strides[i];
  return *(const int32_t*)(array->data + index * stride);
}

/* Bytes from the first element to behind the last of a cache. */
static int64_t extent(const Array* array) {
  int64_t last = array->strides[array->ndim - 1];
  for (int i = 0; i < array->ndim; ++i) last += (array->shape[i] - 1) * array->strides[i];
  return last;
}

/* Key and value cache are those of the past, and apart from each other. */
static bool caches_may_be_written(const Step* step) {
  Array *const keys = step->given[PRESENT_KEY], *const values = step->given[PRESENT_VALUE];
  Array *const past_keys = step->given[PAST_KEY], *const past_values = step->given[PAST_VALUE];
  if (keys->data != past_keys->data || values->data != past_values->data) return false;
  const int64_t rows = past_keys->shape[2]; /* of the values too, says begin_step */
  if (keys->shape[2] != rows || values->shape[2] != rows) return false;
  const int64_t apart = values->data - keys->data;
  if (apart >= extent(keys) || -apart >= extent(values)) return true;
  return step->call->forms[PRESENT_KEY].free_axis < 0 && apart == step->call->apart;
}

static bool is_given(const Step* step, int array) { return step->call->forms[array].dtype != NULL; }

/* Whether so many keys fit in the present caches, whose rows it sets. */
static bool find_room(Step* step, int64_t capacity) {
  const Facts* facts = &step->call->facts;
  step->rows = capacity;
  if (facts->sliding) return true;
  if (step->total < facts->kv_tokens) return false;
  if (step->total <= capacity) return true;
  step->rows = step->total;
  return !facts->in_place && !is_given(step, QUERY_SEQLENS) && step->total == capacity + facts->kv_tokens;
}

/* Everything of a call that no entry of the batch decides. */
static bool begin_step(Step* step) {
  const Facts* facts = &step->call->facts;
  const int64_t total = step->total = element(step->given[TOTAL], 0);
  const int64_t capacity = facts->has_past ? step->given[PAST_KEY]->shape[2] : 0;
  if (facts->has_past && step->given[PAST_VALUE]->shape[2] != capacity) return false;
  if (total <= 0 || total > facts->rotary_rows || !find_room(step, capacity) || step->rows > INT32_MAX) return false;
  if (is_given(step, BIAS) && step->given[BIAS]->shape[3] != total) return false;
  if (facts->in_place && !caches_may_be_written(step)) return false;
  const bool padded = is_given(step, QUERY_SEQLENS);
  step->is_prompt = !padded && facts->tokens == total;
  step->is_chunk = !padded && facts->tokens != total && facts->tokens > 1;
  if (step->is_chunk && facts->batch != 1) return false;
  return !facts->quantized || scales_are_finite(step);
}

/* The positions of one entry's tokens, of which `count` are no padding; false for one beyond the tables. */
static bool fill_positions(const Step* step, int64_t entry, int64_t past, int64_t count) {
  const Facts* facts = &step->call->facts;
  const Array* ids = step->given[POSITION_IDS];
  const bool given = is_given(step, POSITION_IDS);
  int64_t* positions = step->positions + entry * facts->tokens;
  int64_t first = step->is_prompt ? 0 : past;
  if (given && step->is_prompt) { /* for all entries */
    first = *(const int64_t*)ids->data;
    if (first < 0 || first > facts->rotary_rows - facts->tokens) return false;
  }
  for (int64_t s = 0; s < facts->tokens; ++s) {
    positions[s] = s < count ? first + s : 0;
    if (!given || step->is_prompt || s >= count) continue;
    positions[s] = *(const int64_t*)(ids->data + entry * ids->strides[0] + s * ids->strides[1]);
    if (positions[s] < 0 || positions[s] >= facts->rotary_rows) return false;
  }
  return true;
}

/* Rows of a sliding window cache after so many tokens, as in sliding_window.py. */
static int64_t retained(const Step* step, int64_t tokens) {
  const int64_t dropped_at_once = step->rows - step->call->facts.window + 1;
  const int64_t over = tokens > step->rows ? tokens - step->rows : 0;
  return tokens - (over + dropped_at_once - 1) / dropped_at_once * dropped_at_once;
}

/* Where an entry's rows lie; false if a sliding window moves up or keeps too few, which is left to the long way. */
static bool place_entry(const Step* step, int32_t entry[4], int64_t past, int64_t total, int64_t count) {
  int64_t final = total;
  if (step->call->facts.sliding) {
    final = retained(step, total);
    if (retained(step, past) != final - count) return false;
    const int64_t needed = past + 1 - step->call->facts.window;
    if (count > 0 && (needed > 0 ? needed : 0) < total - final) return false;
  }
  entry[0] = (int32_t)(step->call->facts.sliding ? final - count : past);
  entry[1] = (int32_t)final, entry[2] = (int32_t)count, entry[3] = (int32_t)(total - final);
  return true;
}

static bool fill_entry(const Step* step, int64_t b) {
  const Facts* facts = &step->call->facts;
  const bool padded = is_given(step, QUERY_SEQLENS);
  const int64_t last = element(step->given[SEQLENS], b);
  const int64_t count = padded ? element(step->given[QUERY_SEQLENS], b) : facts->tokens;
  const int64_t least = step->is_chunk || (facts->sliding && step->is_prompt) ? facts->tokens - 1 : 0;
  const int64_t most = facts->sliding && !padded && !is_given(step, BIAS) ? INT32_MAX - 1 : step->total - 1;
  if (last < least || last > most || last >= facts->rotary_rows) return false;
  const int64_t past = step->is_prompt && !facts->sliding ? 0 : last + 1 - count;
  const int64_t room = facts->sliding ? INT32_MAX : step->rows;
  if (padded && (count < 0 || count > facts->tokens || past < 0 || past + facts->tokens > room)) return false;
  if (!place_entry(step, step->entries[b], past, last + 1, count)) return false;
  return !facts->has_positions || fill_positions(step, b, past, count);
}

/* The rows of every entry, and the longest. */
static bool fill_entries(Step* step) {
  step->longest = 0;
  for (int64_t b = 0; b < step->call->facts.batch; ++b) {
    if (!fill_entry(step, b)) return false;
    if (step->entries[b][1] > step->longest) step->longest = step->entries[b][1];
  }
  return true;
}

/* Rows of the past that a new cache takes over. */
static void copy_past(const Step* step, int which) {
  const Facts* facts = &step->call->facts;
  const int64_t row = facts->columns * facts->cache_itemsize, *strides = step->past_strides[which];
  for (int64_t b = 0; b < facts->batch; ++b) {
    const int64_t rows = facts->kv_tokens ? step->entries[b][0] : step->entries[b][1];
    for (int64_t n = 0; n < facts->kv_heads; ++n) {
      char* to = step->cache[which] + (b * facts->kv_heads + n) * step->rows * row;
      const char* from = step->past[which] + b * strides[0] + n * strides[1];
      if (strides[2] == row)
        memcpy(to, from, (size_t)(rows * row));
      else
        for (int64_t r = 0; r < rows; ++r) memcpy(to + r * row, from + r * strides[2], (size_t)row);
    }
  }
}

#endif
