/* Kernels by name, for programs without Python: linked, with launcher.c, into a library that holds the
 * kernels of several targets. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#include "gqa_tvm.h"
#include "kernel_call.h"

/* What launcher.c declares for itself is what kernels are compiled for. */
_Static_assert(sizeof(Tensor) == sizeof(DLTensor) && sizeof(Value) == sizeof(TVMFFIAny), "sizes");
_Static_assert(offsetof(Tensor, device_type) == offsetof(DLTensor, device) &&
                   offsetof(Tensor, ndim) == offsetof(DLTensor, ndim) &&
                   offsetof(Tensor, code) == offsetof(DLTensor, dtype) &&
                   offsetof(Tensor, shape) == offsetof(DLTensor, shape) &&
                   offsetof(Tensor, strides) == offsetof(DLTensor, strides) &&
                   offsetof(Tensor, byte_offset) == offsetof(DLTensor, byte_offset) &&
                   offsetof(Value, whole) == offsetof(TVMFFIAny, v_int64),
               "places");
_Static_assert((int)WHOLE_VALUE == (int)kTVMFFIInt && (int)REAL_VALUE == (int)kTVMFFIFloat &&
                   (int)TENSOR_VALUE == (int)kTVMFFIDLTensorPtr && (int)ON_CPU == (int)kDLCPU,
               "numbers");
_Static_assert((int)SIGNED_CODE == (int)kDLInt && (int)UNSIGNED_CODE == (int)kDLUInt &&
                   (int)FLOAT_CODE == (int)kDLFloat,
               "types");

/* Written when the library is built: {suffix of the target's symbols, features that it needs}, best
 * first, then {NULL, NULL}. */
extern const char* const gqa_tvm_targets[][2] __attribute__((visibility("hidden")));

const char* gqa_tvm_best_target(void) {
  const char* const(*at)[2] = gqa_tvm_targets;
  while ((*at)[0] != NULL && !gqa_tvm_cpu_has((*at)[1])) ++at;
  return (*at)[0];
}

/* A target's symbol is missing where a lesser one's code is as good, and serves. */
TVMFFISafeCallType gqa_tvm_kernel(const char* name) {
  Dl_info file;
  if (dladdr((const void*)gqa_tvm_targets, &file) == 0) return NULL;
  void* library = dlopen(file.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == NULL) return NULL;
  void* kernel = NULL;
  for (const char* const(*at)[2] = gqa_tvm_targets; kernel == NULL && (*at)[0] != NULL; ++at) {
    char symbol[256];
    if (!gqa_tvm_cpu_has((*at)[1])) continue;
    int length = snprintf(symbol, sizeof symbol, "__tvm_ffi_%s__%s", name, (*at)[0]);
    if (length > 0 && (size_t)length < sizeof symbol) kernel = dlsym(library, symbol);
  }
  dlclose(library); /* the count goes back to what it was */
  return (TVMFFISafeCallType)kernel;
}
