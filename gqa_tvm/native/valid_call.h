/* Whether the values in a call's arrays are valid for certain, a part of launcher.c: the rules of
 * validation*.py, and of kv_cache.py for what is written, that forms alone do not decide. */
#ifndef GQA_TVM_VALID_CALL_H
#define GQA_TVM_VALID_CALL_H

#include "remembered_call.h"

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

/* Whether no byte of one array lies between the first and the last of the other. */
static bool are_apart(const Array* a, const Array* b, int64_t itemsize) {
  const Array* arrays[] = {a, b};
  const char *low[2], *high[2];
  for (int k = 0; k < 2; ++k) {
    low[k] = arrays[k]->data, high[k] = arrays[k]->data + itemsize;
    for (int i = 0; i < arrays[k]->ndim; ++i) {
      const int64_t length = arrays[k]->shape[i], last = (length - 1) * arrays[k]->strides[i];
      if (length == 0) return true;
      *(last < 0 ? &low[k] : &high[k]) += last;
    }
  }
  return high[0] <= low[1] || high[1] <= low[0];
}

static bool is_given(const Step* step, int array) { return step->call->forms[array].dtype != NULL; }

static bool is_same_memory(const Array* a, const Array* b) {
  return a->data == b->data && a->ndim == b->ndim && same_numbers(a->shape, b->shape, a->ndim, -1) &&
         same_numbers(a->strides, b->strides, a->ndim, -1);
}

static Presents presents_of(const Step* step) {
  if (!is_given(step, PRESENT_KEY)) return NEW_PRESENTS;
  if (!is_given(step, PAST_KEY)) return OTHER_PRESENTS;
  const bool same = is_same_memory(step->given[PRESENT_KEY], step->given[PAST_KEY]) &&
                    is_same_memory(step->given[PRESENT_VALUE], step->given[PAST_VALUE]);
  return same ? PAST_IN_PLACE : OTHER_PRESENTS;
}

/* Given present caches have room, keep off each other, and off a past that they are not. */
static bool presents_may_be_written(const Step* step) {
  Array *const keys = step->given[PRESENT_KEY], *const values = step->given[PRESENT_VALUE];
  const int64_t itemsize = step->call->facts.cache_itemsize;
  if (keys->shape[2] != step->rows || values->shape[2] != step->rows) return false;
  if (step->presents == OTHER_PRESENTS && step->call->facts.has_past &&
      !(are_apart(keys, step->given[PAST_KEY], itemsize) &&
        are_apart(values, step->given[PAST_VALUE], itemsize)))
    return false;
  if (are_apart(keys, values, itemsize)) return true;
  /* Rows of one may lie between those of the other. */
  return step->call->forms[PRESENT_KEY].free_axis < 0 && values->data - keys->data == step->call->apart;
}

/* Keys that lie together in a row of a kernel's cache: more than one where a cache is not rows of keys. */
static int64_t keys_together(const Step* step, const Argument* cache) {
  return cache->shape[MAX_DIMS - 1] / step->call->facts.columns;
}

/* Whether so many keys fit in the present caches, whose rows it sets. */
static bool find_room(Step* step, int64_t capacity) {
  const Facts* facts = &step->call->facts;
  step->rows = capacity;
  if (step->presents != PAST_IN_PLACE && keys_together(step, &step->call->attention[1]) != 1) return false;
  if (facts->sliding) return step->presents == PAST_IN_PLACE && capacity >= facts->window;
  if (step->total < facts->kv_tokens) return false;
  if (step->total <= capacity) return true;
  step->rows = step->total;
  return step->presents != PAST_IN_PLACE && !is_given(step, QUERY_SEQLENS) &&
         step->total == capacity + facts->kv_tokens;
}

/* Everything of a call that no entry of the batch decides. */
static bool begin_step(Step* step) {
  const Facts* facts = &step->call->facts;
  const int64_t total = step->total = element(step->given[TOTAL], 0);
  const int64_t capacity = facts->has_past ? step->given[PAST_KEY]->shape[2] : 0;
  if (facts->has_past && step->given[PAST_VALUE]->shape[2] != capacity) return false;
  step->presents = presents_of(step);
  if (total <= 0 || total > facts->rotary_rows || !find_room(step, capacity) || step->rows > INT32_MAX)
    return false;
  if (is_given(step, BIAS) && step->given[BIAS]->shape[3] != total) return false;
  if (step->presents != NEW_PRESENTS && !presents_may_be_written(step)) return false;
  const bool padded = is_given(step, QUERY_SEQLENS);
  step->is_prompt = !padded && facts->tokens == total;
  step->is_chunk = !padded && facts->tokens != total && facts->tokens > 1;
  if (step->is_chunk && facts->batch != 1) return false;
  return !facts->quantized || scales_are_finite(step);
}

/* The positions of one entry's tokens, of which `count` are no padding; false for one beyond the
 * tables. */
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

/* Where an entry's rows lie; false if a sliding window moves up or keeps too few, which is left to the
 * long way. */
static bool place_entry(const Step* step, int32_t entry[4], int64_t past, int64_t total,
                        int64_t count) {
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
  const int64_t most =
      facts->sliding && !padded && !is_given(step, BIAS) ? INT32_MAX - 1 : step->total - 1;
  if (last < least || last > most || last >= facts->rotary_rows) return false;
  const int64_t past = step->is_prompt && !facts->sliding ? 0 : last + 1 - count;
  const int64_t room = facts->sliding ? INT32_MAX : step->rows;
  if (padded && (count < 0 || count > facts->tokens || past < 0 || past + facts->tokens > room))
    return false;
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

#endif
