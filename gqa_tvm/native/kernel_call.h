/* How compiled kernels are called, a part of launcher.c: the part of DLPack and of tvm_ffi's C
 * interface that it takes, which this file needs without their headers. library.c compares it with
 * them. */
#ifndef GQA_TVM_KERNEL_CALL_H
#define GQA_TVM_KERNEL_CALL_H

#include <stdint.h>

/* As DLTensor; strides in elements. */
typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} Tensor;

/* As TVMFFIAny. */
typedef struct {
  int32_t type_index;
  uint32_t padding;
  union {
    int64_t whole;
    double real;
    void* pointer;
  };
} Value;

enum { WHOLE_VALUE = 1, REAL_VALUE = 3, TENSOR_VALUE = 7 };
enum { ON_CPU = 1, SIGNED_CODE = 0, UNSIGNED_CODE = 1, FLOAT_CODE = 2 };

typedef int (*KernelFunction)(void* handle, const Value* values, int32_t count, Value* result);

#endif
