/* Runs compiled kernels for a test of another machine: calls come on stdin, their arrays go back on stdout.
 *
 * A call is an int64, how many threads to use, then, each as an int64 length and bytes, the path of a kernel library,
 * a symbol, the arguments (Argument below) and the memory of each tensor. The answer, in the same form: the error text,
 * empty for none, and each tensor's memory. Linked with launcher.c, whose services it gives to the libraries as a
 * Python process does.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

enum { MAX_ARGUMENTS = 48, MAX_AXES = 8, MAX_THREADS = 256, GUARD = 64, GUARD_BYTE = 0xA5 };

typedef struct {
  int32_t kind; /* kTVMFFIInt, kTVMFFIFloat, kTVMFFIDLTensorPtr */
  int32_t axes;
  int64_t integer;
  double number;
  int32_t code, bits; /* of the elements, as DLPack has them */
  int64_t shape[MAX_AXES], strides[MAX_AXES];
} Argument;

typedef struct {
  DLTensor tensor;
  unsigned char* memory; /* guard, the elements, guard */
  int64_t size;
} Array;

void gqa_tvm_hooks(void* hooks[3]);
int gqa_tvm_set_num_threads(int n);

static _Thread_local char error[4096];

/* What kernels and the launcher call of tvm_ffi. */
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  size_t used = (size_t)snprintf(error, sizeof error, "%s: ", kind);
  for (int i = 0; i < count && used < sizeof error; ++i)
    if (parts[i] != NULL) used += (size_t)snprintf(error + used, sizeof error - used, "%s", parts[i]);
}

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &text, 1);
}

static void give_up(const char* what) {
  fprintf(stderr, "kernel_server: %s\n", what);
  exit(1);
}

static void take(void* memory, int64_t size) {
  if (fread(memory, 1, (size_t)size, stdin) != (size_t)size) give_up("the call ends early");
}

static int64_t take_length(int64_t most) {
  int64_t length;
  take(&length, sizeof length);
  if (length < 0 || length > most) give_up("a length makes no sense");
  return length;
}

static void take_text(char* text, int64_t room) {
  int64_t length = take_length(room - 1);
  take(text, length);
  text[length] = 0;
}

static void give(const void* memory, int64_t size) {
  fwrite(&size, sizeof size, 1, stdout);
  fwrite(memory, 1, (size_t)size, stdout);
}

/* The elements lie at no better address than their own size asks for. */
static void take_array(Argument* argument, Array* array) {
  int64_t size = take_length(INT64_MAX / 2), offset = GUARD + argument->bits / 8;
  array->size = size;
  array->memory = aligned_alloc(GUARD, (size_t)(size + 4 * GUARD) / GUARD * GUARD);
  if (array->memory == NULL) give_up("no memory");
  memset(array->memory, GUARD_BYTE, (size_t)(size + 4 * GUARD) / GUARD * GUARD);
  take(array->memory + offset, size);
  array->tensor = (DLTensor){
      .data = array->memory + offset,
      .device = {kDLCPU, 0},
      .ndim = argument->axes,
      .dtype = {(uint8_t)argument->code, (uint8_t)argument->bits, 1},
      .shape = argument->shape,
      .strides = argument->strides,
  };
}

static void check_guards(const Array* array, int index) {
  const unsigned char* begin = array->tensor.data;
  for (const unsigned char* at = array->memory; at < begin + array->size + GUARD; ++at) {
    if (at == begin) at += array->size;
    if (*at != GUARD_BYTE) snprintf(error, sizeof error, "wrote outside of tensor argument %d", index);
  }
}

static void* find_kernel(const char* path, const char* symbol) {
  static const char* names[] = {"__TVMBackendParallelLaunch", "__TVMBackendAllocWorkspace", "__TVMBackendFreeWorkspace"};
  void *hooks[3], *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) give_up(dlerror());
  gqa_tvm_hooks(hooks);
  for (int i = 0; i < 3; ++i) {
    void** pointer = dlsym(library, names[i]);
    if (pointer != NULL) *pointer = hooks[i];
  }
  void* kernel = dlsym(library, symbol);
  if (kernel == NULL) give_up(dlerror());
  return kernel;
}

static void serve_call(void) {
  char path[4096], symbol[512];
  Argument arguments[MAX_ARGUMENTS];
  Array arrays[MAX_ARGUMENTS];
  TVMFFIAny packed[MAX_ARGUMENTS], result = {0};
  gqa_tvm_set_num_threads((int)take_length(MAX_THREADS));
  take_text(path, sizeof path);
  take_text(symbol, sizeof symbol);
  int64_t bytes = take_length(sizeof arguments);
  int count = (int)(bytes / (int64_t)sizeof(Argument)), tensors = 0;
  take(arguments, bytes);
  for (int i = 0; i < count; ++i) {
    packed[i] = (TVMFFIAny){.type_index = arguments[i].kind};
    if (arguments[i].kind == kTVMFFIInt) packed[i].v_int64 = arguments[i].integer;
    if (arguments[i].kind == kTVMFFIFloat) packed[i].v_float64 = arguments[i].number;
    if (arguments[i].kind != kTVMFFIDLTensorPtr) continue;
    take_array(&arguments[i], &arrays[tensors]);
    packed[i].v_ptr = &arrays[tensors++].tensor;
  }
  TVMFFISafeCallType kernel = (TVMFFISafeCallType)find_kernel(path, symbol);
  error[0] = 0;
  if (kernel(NULL, packed, count, &result) != 0 && error[0] == 0) strcpy(error, "failed without a message");
  for (int i = 0; i < tensors; ++i) check_guards(&arrays[i], i);
  give(error, (int64_t)strlen(error));
  for (int i = 0; i < tensors; ++i) {
    give(arrays[i].tensor.data, arrays[i].size);
    free(arrays[i].memory);
  }
  fflush(stdout);
}

int main(void) {
  for (int first; (first = getchar()) != EOF;) {
    ungetc(first, stdin);
    serve_call();
  }
  return 0;
}
