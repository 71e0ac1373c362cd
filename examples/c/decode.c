/* Ten tokens of attention with an int8 cache, from C: append to the cache, decode, compare with plain
 * loops. Usage: decode LIBRARY. Kernels and their arguments: gqa_tvm.h. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "gqa_tvm.h"
enum { N = 4, N_KV = 2, H = 64, C = 16 }; /* query heads, key-value heads, head size, rows of the cache */
static const float K_SCALE = 0.02f, V_SCALE = 0.01f;
static float query[N * H], key[N_KV * H], value[N_KV * H], output[N * H];
static int8_t keys[N_KV * C * H], values[N_KV * C * H];
typedef struct { DLTensor dl; int64_t shape[6], strides[6]; } Tensor;
static TVMFFIAny tensor(Tensor* t, void* data, int code, int bits, int axes, const int64_t* shape) {
  t->dl = (DLTensor){data, {kDLCPU, 0}, axes, {code, bits, 1}, t->shape, t->strides, 0};
  for (int64_t axis = axes - 1, stride = 1; axis >= 0; stride *= shape[axis--])
    t->shape[axis] = shape[axis], t->strides[axis] = stride;
  return (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &t->dl};
}
#define TENSOR(data, code, bits, ...) \
  tensor(&(Tensor){0}, data, code, bits, sizeof((int64_t[]){__VA_ARGS__}) / 8, (int64_t[]){__VA_ARGS__})
#define FLOATS(data, ...) TENSOR(data, kDLFloat, 32, __VA_ARGS__)
static TVMFFIAny whole(int64_t x) { return (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = x}; }
static TVMFFIAny real(double x) { return (TVMFFIAny){.type_index = kTVMFFIFloat, .v_float64 = x}; }
static float noise(void) { return 2.0f * rand() / RAND_MAX - 1.0f; }

static double largest_error(int tokens) { /* of the output, from the codes in the cache */
  double largest = 0;
  for (int n = 0; n < N; ++n) {
    const int8_t *k = keys + n / (N / N_KV) * C * H, *v = values + n / (N / N_KV) * C * H;
    double sum = 0, weighted[H] = {0};
    for (int t = 0; t < tokens; ++t) {
      double score = 0;
      for (int h = 0; h < H; ++h) score += (double)query[n * H + h] * k[t * H + h] * K_SCALE;
      double p = exp(score / sqrt(H));
      sum += p;
      for (int h = 0; h < H; ++h) weighted[h] += p * v[t * H + h] * V_SCALE;
    }
    for (int h = 0; h < H; ++h) largest = fmax(largest, fabs(output[n * H + h] - weighted[h] / sum));
  }
  return largest;
}
static int fail(const char* why) { return fprintf(stderr, "%s\n", why), 1; }

int main(int argc, char** argv) {
  void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (library == NULL) return fail(argc == 2 ? dlerror() : "usage: decode LIBRARY");
  __typeof__(&gqa_tvm_kernel) find = dlsym(library, "gqa_tvm_kernel");
  TVMFFISafeCallType append = find("append_f32_i8_h64"), decode = find("flash_decode_f32_i8_h64_r2");
  if (append == NULL || decode == NULL) return fail("a kernel is missing");
  float zero[H + 2] = {0}, k_scale = K_SCALE, v_scale = V_SCALE;
  int64_t position = 0;
  TVMFFIAny k = TENSOR(keys, kDLInt, 8, 1, N_KV, C, H), v = TENSOR(values, kDLInt, 8, 1, N_KV, C, H);
  TVMFFIAny at = TENSOR(&position, kDLInt, 64, 1, 1), table = FLOATS(zero, 1, 1), norm = FLOATS(zero, H);
  TVMFFIAny ks = FLOATS(&k_scale, 1), vs = FLOATS(&v_scale, 1), no = whole(0), none;
  TVMFFIAny bias = FLOATS(zero, 1, 1, 1, 1), sink = FLOATS(zero, 1), partial = FLOATS(zero, 1, 1, 1, 1, 1, H + 2);
  for (int past = 0; past < 10; ++past) {
    for (int i = 0; i < N * H; ++i) query[i] = 4 * noise();
    for (int i = 0; i < N_KV * H; ++i) key[i] = 2 * noise(), value[i] = noise();
    TVMFFIAny new_key = FLOATS(key, 1, 1, N_KV * H), new_value = FLOATS(value, 1, 1, N_KV * H);
    TVMFFIAny entries = TENSOR(((int32_t[]){past, past + 1, 1, 0}), kDLInt, 32, 1, 4);
    TVMFFIAny add[] = {new_key, new_value, k, v, entries, at, table, table, norm, ks, vs, real(0), no, no, no};
    TVMFFIAny attend[] = {FLOATS(query, 1, 1, N * H), k, v, entries, at, table, table, bias, sink, norm, ks, vs,
                          FLOATS(output, 1, 1, N, H), partial, real(1 / sqrt(H)), real(0), whole(-1), whole(1),
                          real(0), no, no, no, whole(64)};
    if (append(NULL, add, 15, &none) != 0 || decode(NULL, attend, 23, &none) != 0) return fail("a call failed");
    if (!(largest_error(past + 1) < 1e-5)) return fail("the output is wrong");
  }
  puts("ok: 10 tokens");
  return 0;
}
