/* Which CPUs there are to run on, a part of launcher.c. */
#ifndef GQA_TVM_CPUS_H
#define GQA_TVM_CPUS_H

#include <sched.h>
#include <string.h>
#include <unistd.h>

/* Those of the process, that is of its main thread: the calling thread may be pinned. */
static cpu_set_t usable_cpus(void) {
  cpu_set_t cpus; /* too small for more than 1024 CPUs; then the call fails */
  if (sched_getaffinity(getpid(), sizeof cpus, &cpus) != 0) memset(&cpus, 0xFF, sizeof cpus);
  return cpus;
}

static int usable_cpu_count(void) {
  cpu_set_t cpus = usable_cpus();
  return CPU_COUNT(&cpus);
}

/* Where a worker should run: anywhere but on the CPU of the caller. A scheduler may wake a helper
 * there although other CPUs are idle, and not move it for many ms: the launches become serial. */
static cpu_set_t cpus_beside(unsigned caller_cpu) {
  cpu_set_t cpus = usable_cpus();
  if (CPU_COUNT(&cpus) > 1) CPU_CLR(caller_cpu, &cpus);
  return cpus;
}

#endif
