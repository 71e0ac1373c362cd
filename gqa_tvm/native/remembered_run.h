/* Running the kernels of a remembered call, a part of launcher.c. */
#ifndef GQA_TVM_REMEMBERED_RUN_H
#define GQA_TVM_REMEMBERED_RUN_H

#include "valid_call.h"
#include "workspace.h"

enum { PARTIAL_DIMS = 6, MOST_VALUES = ATTENTION_TENSORS + ATTENTION_SCALARS + 2 };

typedef struct {
  Tensor tensor;
  int64_t shape[PARTIAL_DIMS], strides[PARTIAL_DIMS];
} Shaped;

/* What a kernel is called with. */
typedef struct {
  int count;
  Value values[MOST_VALUES];
  Tensor tensors[ATTENTION_TENSORS];
  Shaped caches[2], bias, extra; /* those whose shape changes between calls */
} KernelValues;

static void set_compact(Shaped* shaped, int ndim, const int64_t* shape) {
  int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    shaped->shape[i] = shape[i];
    shaped->strides[i] = stride;
    stride *= shape[i];
  }
}

static void set_as(Shaped* shaped, const Array* array, int64_t itemsize) {
  for (int i = 0; i < array->ndim; ++i) {
    shaped->shape[i] = array->shape[i];
    shaped->strides[i] = array->strides[i] / itemsize;
  }
}

static Tensor* point(Shaped* shaped, Tensor like, int ndim, void* data) {
  shaped->tensor = like;
  shaped->tensor.data = data;
  shaped->tensor.ndim = ndim;
  shaped->tensor.shape = shaped->shape;
  shaped->tensor.strides = shaped->strides;
  return &shaped->tensor;
}

static Tensor* cache_tensor(const Step* step, const Argument* argument, int which, Shaped* shaped) {
  const Facts* facts = &step->call->facts;
  const int64_t together = keys_together(step, argument);
  if (step->presents == PAST_IN_PLACE)
    set_as(shaped, step->given[PRESENT_KEY + which], facts->cache_itemsize);
  else
    set_compact(shaped, 4, (int64_t[]){facts->batch, facts->kv_heads, step->rows, facts->columns});
  shaped->shape[2] /= together, shaped->shape[3] *= together, shaped->strides[2] *= together;
  return point(shaped, argument->tensor, 4, step->cache[which]);
}

static Tensor* tensor_of(const Step* step, const Argument* argument, KernelValues* kernel, int i) {
  const int source = argument->source;
  if (source == PRESENT_KEY || source == PRESENT_VALUE)
    return cache_tensor(step, argument, source - PRESENT_KEY, &kernel->caches[source - PRESENT_KEY]);
  if (source == BIAS) {
    set_as(&kernel->bias, step->given[BIAS], argument->tensor.bits / 8);
    return point(&kernel->bias, argument->tensor, 4, step->given[BIAS]->data);
  }
  Tensor* tensor = &kernel->tensors[i];
  *tensor = argument->tensor;
  if (source == ENTRIES)
    tensor->data = step->entries;
  else if (source == POSITIONS)
    tensor->data = step->positions;
  else if (source == OUTPUT)
    tensor->data = step->output;
  else if (source != CONSTANT)
    tensor->data = step->given[source]->data;
  return tensor;
}

static void add_tensor(KernelValues* kernel, Tensor* tensor) {
  kernel->values[kernel->count++] = (Value){.type_index = TENSOR_VALUE, .pointer = tensor};
}

static void add_tensors(const Step* step, KernelValues* kernel, const Argument* arguments, int count) {
  for (int i = 0; i < count; ++i) add_tensor(kernel, tensor_of(step, &arguments[i], kernel, i));
}

static void add_scalars(KernelValues* kernel, const Value* values, int count) {
  memcpy(&kernel->values[kernel->count], values, (size_t)count * sizeof *values);
  kernel->count += count;
}

/* Keys of a task of flash decoding. */
static int64_t chunk_keys(const Step* step) {
  const Choice* choice = step->choice;
  return choice->chunk ? choice->chunk
                       : (step->longest + choice->kv_block - 1) / choice->kv_block * choice->kv_block;
}

/* How many chunks the longest entry has. */
static int64_t chunk_count(const Step* step) {
  const int64_t keys = chunk_keys(step);
  return (step->longest + keys - 1) / keys;
}

/* Rows of a task see this many keys at most of a window: it begins inside a block. */
static void heed_window(Step* step) {
  const Facts* facts = &step->call->facts;
  const int64_t seen = facts->window + facts->tokens - 1 + step->choice->kv_block;
  if (facts->window > 0 && seen < step->longest) step->longest = seen;
}

static size_t partial_numbers(const Step* step) {
  const Facts* facts = &step->call->facts;
  const Choice* choice = step->choice;
  if (choice->kind != FLASH_DECODE || step->longest <= chunk_keys(step)) return 0;
  return (size_t)(facts->batch * facts->kv_heads * choice->groups * chunk_count(step) * choice->rows *
                  choice->width);
}

/* The tensor that only some kernels take: partial states, or the scores that nobody wants. */
static void add_extra(const Step* step, KernelValues* kernel) {
  static float nothing;
  const Facts* facts = &step->call->facts;
  const Choice* choice = step->choice;
  const Tensor numbers = {.device_type = ON_CPU, .code = FLOAT_CODE, .bits = 32, .lanes = 1};
  int64_t shape[PARTIAL_DIMS] = {1, 1, 1, 1, 1, choice->width};
  if (choice->kind == FLASH) return;
  if (choice->kind == FLASH_DECODE && step->partial != NULL) {
    shape[0] = facts->batch, shape[1] = facts->kv_heads, shape[2] = choice->groups;
    shape[3] = chunk_count(step), shape[4] = choice->rows;
  }
  const int ndim = choice->kind == FLASH_DECODE ? PARTIAL_DIMS : 4;
  set_compact(&kernel->extra, ndim, shape);
  add_tensor(kernel, point(&kernel->extra, numbers, ndim, step->partial ? step->partial : &nothing));
}

static void add_last(const Step* step, KernelValues* kernel) {
  const int64_t last = step->choice->kind == FLASH_DECODE ? chunk_keys(step) : 0;
  if (step->choice->kind != FLASH)
    add_scalars(kernel, &(Value){.type_index = WHOLE_VALUE, .whole = last}, 1);
}

static void bind_append(const Step* step, KernelValues* kernel) {
  kernel->count = 0;
  add_tensors(step, kernel, step->call->append, APPEND_TENSORS);
  add_scalars(kernel, step->call->append_scalars, APPEND_SCALARS);
}

static void bind_attention(const Step* step, KernelValues* kernel) {
  kernel->count = 0;
  add_tensors(step, kernel, step->call->attention, ATTENTION_TENSORS);
  add_extra(step, kernel);
  add_scalars(kernel, step->call->attention_scalars, ATTENTION_SCALARS);
  add_last(step, kernel);
}

static void copy_rows(Rows to, Rows from, int64_t count, int64_t bytes) {
  if (to.strides[2] == bytes && from.strides[2] == bytes) {
    memcpy(to.start, from.start, (size_t)(count * bytes));
    return;
  }
  for (int64_t r = 0; r < count; ++r)
    memcpy(to.start + r * to.strides[2], from.start + r * from.strides[2], (size_t)bytes);
}

static Rows rows_at(Rows rows, int64_t entry, int64_t head) {
  rows.start += entry * rows.strides[0] + head * rows.strides[1];
  return rows;
}

/* Rows of new caches, all of them compact. */
static Rows new_rows(const Step* step, int which) {
  const Facts* facts = &step->call->facts;
  const int64_t row = facts->columns * facts->cache_itemsize;
  return (Rows){step->cache[which], {facts->kv_heads * step->rows * row, step->rows * row, row}};
}

/* Rows of the past that a new cache takes over, or all rows that a present gets of it. */
static void copy_caches(const Step* step, const Rows olds[2], bool to_new) {
  const Facts* facts = &step->call->facts;
  const int64_t row = facts->columns * facts->cache_itemsize;
  for (int64_t k = 0; k < 2 * facts->batch * facts->kv_heads; ++k) {
    const int64_t which = k % 2, entry = k / 2 / facts->kv_heads, head = k / 2 % facts->kv_heads;
    if (olds[which].start == NULL) continue;
    const Rows made = rows_at(new_rows(step, (int)which), entry, head);
    const Rows old = rows_at(olds[which], entry, head);
    if (to_new)
      copy_rows(made, old, facts->kv_tokens ? step->entries[entry][0] : step->entries[entry][1], row);
    else
      copy_rows(old, made, step->rows, row);
  }
}

static int call_kernel(int64_t address, const KernelValues* kernel) {
  Value result = {0};
  return ((KernelFunction)(intptr_t)address)(NULL, kernel->values, kernel->count, &result);
}

/* Numbers of the output times keys that one more thread is worth, some microseconds: it begins with
 * none of the caller's memory in its cache. A number to append takes as long as one over so many keys.
 * The long way, which takes longer than that anyway, keeps all threads. */
enum { WORK_OF_THREAD = 1 << 17, KEYS_OF_APPEND = 8 };

static void use_threads_worth(int64_t work, int most) {
  const int64_t worth = work / WORK_OF_THREAD;
  gqa_tvm_set_num_threads(worth >= most ? most : worth > 1 ? (int)worth : 1);
}

static int append_rows(const Step* step, const KernelValues* kernel, int threads) {
  const Facts* facts = &step->call->facts;
  if (facts->kv_tokens == 0) return 0;
  const int64_t numbers = 2 * facts->batch * facts->kv_tokens * facts->kv_heads * facts->columns;
  use_threads_worth(KEYS_OF_APPEND * numbers, threads);
  return call_kernel(facts->append, kernel);
}

static int attend(const Step* step, const KernelValues* kernel, int threads) {
  use_threads_worth(step->call->facts.output_numbers * step->longest, threads);
  return call_kernel(step->choice->address, kernel);
}

static int run_kernels(const Step* step, const KernelValues* append, const KernelValues* attention,
                       int threads) {
  copy_caches(step, step->past, true);
  int error = append_rows(step, append, threads);
  if (error == 0) error = attend(step, attention, threads);
  if (error == 0) copy_caches(step, step->present, false);
  gqa_tvm_set_num_threads(threads);
  return error;
}

static void* scratch_memory(size_t bytes) {
  return alloc_workspace(ON_CPU, 0, bytes, UNSIGNED_CODE, 8);
}

static void release_scratch(void* memory) { free_workspace(ON_CPU, 0, memory); }

/* A failed kernel has left its blocks, which lie above ours. */
static void forget_failure(void) {
  void* raised = take_raised();
  if (raised != NULL) TVMFFIObjectDecRef(raised);
  drop_all_blocks();
}

#endif
