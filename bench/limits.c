/* What a machine can do at most: float32 multiply-adds from registers, and reading memory.
 * Vector types of GCC, so that the widest instructions of the CPU are used without naming any. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#if defined(__AVX512F__)
enum { VECTOR = 64, SUMS = 24 };
#elif defined(__AVX__)
enum { VECTOR = 32, SUMS = 12 };
#else
enum { VECTOR = 16, SUMS = 12 };
#endif
enum { HUGE_PAGE = 2 << 20, LANES = VECTOR / sizeof(float), MAX_THREADS = 256 };

typedef float Floats __attribute__((vector_size(VECTOR)));
typedef uint64_t Words __attribute__((vector_size(VECTOR)));

typedef struct {
  long repeats;
  const Words* words;
  size_t count; /* vectors of this thread */
  pthread_barrier_t* start;
  double begin, end;
} Work;

static volatile float float_sink;
static volatile uint64_t word_sink;

/* CPU time for one thread, so that other processes do not count; several threads share no such clock. */
static clockid_t clock_id;

static double now(void) {
  struct timespec t;
  clock_gettime(clock_id, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void* multiply_add(void* argument) {
  Work* work = argument;
  Floats sums[SUMS], factor = {0}, term = {0}, total = {0};
  factor += 0.9999f;
  term += 0.0001f;
  for (int j = 0; j < SUMS; j++) sums[j] = term * (float)j;
  pthread_barrier_wait(work->start);
  work->begin = now();
  for (long i = 0; i < work->repeats; i++) {
#pragma GCC unroll 24
    for (int j = 0; j < SUMS; j++) sums[j] = sums[j] * factor + term;
  }
  work->end = now();
  for (int j = 0; j < SUMS; j++) total += sums[j];
  float_sink = total[0];
  return NULL;
}

static void* read_words(void* argument) {
  Work* work = argument;
  Words a = {0}, b = {0}, c = {0}, d = {0};
  pthread_barrier_wait(work->start);
  work->begin = now();
  for (long i = 0; i < work->repeats; i++) {
    for (size_t k = 0; k + 4 <= work->count; k += 4) {
      a ^= work->words[k];
      b ^= work->words[k + 1];
      c ^= work->words[k + 2];
      d ^= work->words[k + 3];
    }
    __asm__ volatile("" : "+m"(*(Work*)argument) : : "memory");
  }
  work->end = now();
  a ^= b ^ c ^ d;
  word_sink = a[0];
  return NULL;
}

/* Each thread on a CPU of its own: the system may leave two of them on one CPU for longer than this takes. */
static void start_on_own_cpu(pthread_t* id, void* (*task)(void*), Work* work, int number) {
  cpu_set_t allowed, own;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) > 0) {
    int skip = number % CPU_COUNT(&allowed), cpu = 0;
    while (!CPU_ISSET(cpu, &allowed) || skip-- > 0) cpu++;
    CPU_ZERO(&own);
    CPU_SET(cpu, &own);
    pthread_attr_setaffinity_np(&attributes, sizeof own, &own);
  }
  if (pthread_create(id, &attributes, task, work) != 0) abort();
  pthread_attr_destroy(&attributes);
}

/* Seconds from the first thread's begin to the last one's end. */
static double run(void* (*task)(void*), Work* works, int threads) {
  pthread_t ids[MAX_THREADS];
  pthread_barrier_t start;
  double begin, end;
  clock_id = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  pthread_barrier_init(&start, NULL, (unsigned)threads);
  for (int t = 0; t < threads; t++) {
    works[t].start = &start;
    start_on_own_cpu(&ids[t], task, &works[t], t);
  }
  for (int t = 0; t < threads; t++) pthread_join(ids[t], NULL);
  begin = works[0].begin, end = works[0].end;
  for (int t = 1; t < threads; t++) {
    if (works[t].begin < begin) begin = works[t].begin;
    if (works[t].end > end) end = works[t].end;
  }
  pthread_barrier_destroy(&start);
  return end - begin;
}

/* float32 operations a second, a multiply-add counted as two. */
double peak_flops(int threads, long repeats) {
  Work works[MAX_THREADS] = {0};
  for (int t = 0; t < threads; t++) works[t].repeats = repeats;
  return 2.0 * SUMS * LANES * (double)repeats * threads / run(multiply_add, works, threads);
}

/* Bytes a second out of `size` bytes, each thread reading its own part `repeats` times; 0 without memory. */
double read_bandwidth(size_t size, int threads, long repeats) {
  Work works[MAX_THREADS] = {0};
  size_t count = size / VECTOR / (size_t)threads;
  double seconds;
  void* memory = NULL;
  if (posix_memalign(&memory, HUGE_PAGE, size) != 0) return 0;
  madvise(memory, size, MADV_HUGEPAGE);
  memset(memory, 1, size);
  for (int t = 0; t < threads; t++)
    works[t] = (Work){.repeats = repeats, .words = (Words*)memory + (size_t)t * count, .count = count};
  seconds = run(read_words, works, threads);
  free(memory);
  return (double)count * VECTOR * threads * (double)repeats / seconds;
}
