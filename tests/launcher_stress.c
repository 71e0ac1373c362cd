/* Many callers on the launcher at once, for ThreadSanitizer: Python threads do not press hard enough. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { void* sync_handle; int32_t num_task; } Env;
typedef int (*Task)(int, Env*, void*);
extern int (*__TVMBackendParallelLaunch)(Task, void*, int);
extern void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int);
extern int (*__TVMBackendFreeWorkspace)(int, int, void*);
int gqa_tvm_set_num_threads(int);

typedef struct { int extent, failing; int* data; } Loop;

static int body(int task, Env* env, void* closure) {
  Loop* loop = closure;
  int chunk = (loop->extent + env->num_task - 1) / env->num_task;
  for (int i = task * chunk; i < loop->extent && i < (task + 1) * chunk; ++i) {
    int* scratch = __TVMBackendAllocWorkspace(1, 0, 4 + (i % 50) * 1000, 2, 32);
    *scratch = i;
    if (i == loop->failing) return 7;
    loop->data[i] += *scratch;
    __TVMBackendFreeWorkspace(1, 0, scratch);
  }
  return 0;
}

static void* caller(void* number) {
  unsigned seed = (unsigned)(uintptr_t)number;
  for (int round = 0; round < 200; ++round) {
    int data[300], extent = rand_r(&seed) % 300, wanted = extent > 0 && round % 5 == 0 ? 7 : 0;
    Loop loop = {extent, wanted ? extent - 1 : -1, data};
    memset(data, 0, sizeof data);
    gqa_tvm_set_num_threads(1 + rand_r(&seed) % 6);
    if (__TVMBackendParallelLaunch(body, &loop, 0) != wanted) abort();
    for (int i = 0; wanted == 0 && i < extent; ++i)
      if (data[i] != i) abort();
    if (rand_r(&seed) % 4 == 0) usleep(rand_r(&seed) % 250);
  }
  return NULL;
}

int main(void) {
  pthread_t threads[40]; /* more than there are job slots */
  for (uintptr_t i = 0; i < 40; ++i) pthread_create(&threads[i], NULL, caller, (void*)i);
  for (int i = 0; i < 40; ++i) pthread_join(threads[i], NULL);
  return 0;
}
