/* Spinning and sleeping on a word, a part of launcher.c. */
#ifndef GQA_TVM_WAITING_H
#define GQA_TVM_WAITING_H

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory"); /* `yield` is a no-op on most cores */
#endif
}

/* One turn of a bounded spin; false when the time is over. It counts turns to keep system calls rare. */
static bool spin(unsigned* turn, int64_t until) {
  relax();
  if (++*turn % 64 != 0) return true;
  sched_yield(); /* what is waited for may be waiting for this CPU */
  return now_ns() < until;
}

static void futex_wait(atomic_uint* word, unsigned value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(atomic_uint* word, int count) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

#endif
