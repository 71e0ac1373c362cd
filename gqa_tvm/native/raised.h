/* The error that tvm_ffi keeps for each thread, a part of launcher.c. The functions are weak: a C
 * program may use the kernels without tvm_ffi. */
#ifndef GQA_TVM_RAISED_H
#define GQA_TVM_RAISED_H

#include <stddef.h>

extern void TVMFFIErrorMoveFromRaised(void** error) __attribute__((weak));
extern void TVMFFIErrorSetRaised(void* error) __attribute__((weak));
extern int TVMFFIObjectDecRef(void* object) __attribute__((weak));
extern void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text) __attribute__((weak));

static void raise_new(const char* kind, const char* text) {
  if (TVMFFIErrorSetRaisedFromCStr) TVMFFIErrorSetRaisedFromCStr(kind, text);
}

static void* take_raised(void) {
  void* error = NULL;
  if (TVMFFIErrorMoveFromRaised) TVMFFIErrorMoveFromRaised(&error);
  return error;
}

/* The caller of a kernel reads the error from its own thread, and must find one there. */
static void raise_again(void* raised) {
  if (raised != NULL) {
    TVMFFIErrorSetRaised(raised);
    TVMFFIObjectDecRef(raised);
  } else {
    raise_new("RuntimeError", "a task of a kernel failed");
  }
}

#endif
