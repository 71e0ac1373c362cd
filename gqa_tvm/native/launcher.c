/* Threads and scratch memory for compiled kernels, and what the CPU can run. A process has one such
 * pool, of whichever file brings it first: kernel libraries get its services through gqa_tvm_hooks.
 * A library that has this file linked in, as told next, takes those of another by gqa_tvm_use_hooks.
 *
 * TVM's code calls its runtime through pointers that its object file defines as weak symbols. Here
 * they are strong and hidden: the linker binds the kernels to this file, in whatever order the
 * objects come; several such libraries in a process do not see each other's; and tvm_ffi, which
 * overwrites the exported pointers of a library that it loads after TVM, does not find them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>

#include "cpus.h"
#include "cpu_features.h"
#include "raised.h"
#include "waiting.h"
#include "workspace.h"

#define HIDDEN __attribute__((visibility("hidden")))

enum {
  MAX_THREADS = 256,     /* of one launch; must fit in SEATS */
  MAX_JOBS = 32,         /* launches under way at once; any more run serially */
  TASKS_PER_THREAD = 32, /* 1/32 of a thread's share is the most that can be left over at the end */
  SPIN_NS = 100 * 1000,  /* covers the gap between two kernels of one operator call */
};

typedef struct {
  void* sync_handle;
  int32_t num_task;
} TVMParallelGroupEnv;
typedef int (*FTVMParallelLambda)(int task_id, TVMParallelGroupEnv* penv, void* cdata);

static _Thread_local int wanted_threads; /* 0: not set yet */

/* A launch takes a job slot, opens its gate to helpers, works, and shuts the gate. The gate counts
 * free seats and active helpers, and tells whether the caller sleeps until the last one leaves. */
#define SEATS 0x1FFu
#define CALLER_SLEEPS 0x200u
#define ONE_ACTIVE 0x400u
#define ACTIVE (~(SEATS | CALLER_SLEEPS))

typedef struct {
  alignas(LINE) atomic_int next_task;
} Lane;

/* Slots are static, so a late worker may always look at a gate. A seat taken there makes the rest
 * safe to read, for a job does not end while a helper is active in it. */
typedef struct {
  alignas(LINE) atomic_uint gate;
  atomic_bool taken;
  alignas(LINE) FTVMParallelLambda lambda;
  void* cdata;
  TVMParallelGroupEnv env;
  int num_threads;
  void* raised;
  atomic_int error;
  alignas(LINE) atomic_int drained_lanes;
  Lane lanes[MAX_THREADS];
} Job;

static Job jobs[MAX_JOBS];

static struct {
  alignas(LINE) atomic_uint launches; /* what idle workers watch and sleep on */
  atomic_int sleeping;
  alignas(LINE) atomic_int workers;
  atomic_int idle; /* sleeping ones included */
  atomic_int jobs_used;
  atomic_uint caller_cpu; /* of the latest launch */
  atomic_bool growing;
} pool;

static void record_failure(Job* job, int error) {
  int none = 0;
  void* raised = take_raised();
  if (atomic_compare_exchange_strong(&job->error, &none, error))
    job->raised = raised;
  else if (raised != NULL)
    TVMFFIObjectDecRef(raised);
}

/* Lane c holds the tasks from here to the start of lane c + 1. */
static int lane_start(const Job* job, int lane) {
  return (int)((int64_t)lane * job->env.num_task / job->num_threads);
}

/* A thread empties its own lane, then takes from the others. So neighbouring iterations, which tend
 * to share data, stay on one core, and threads rarely meet at a counter, yet none is idle while
 * tasks are left. A loop with fewer iterations than tasks has them all in the first lanes. */
static void run_tasks(Job* job, int lane) {
  const int n = job->num_threads;
  for (int k = 0; k < n; ++k, lane = lane + 1 < n ? lane + 1 : 0) {
    atomic_int* next_task = &job->lanes[lane].next_task;
    const int end = lane_start(job, lane + 1);
    while (atomic_load_explicit(next_task, memory_order_relaxed) < end) {
      int task = atomic_fetch_add_explicit(next_task, 1, memory_order_relaxed);
      if (task >= end || atomic_load_explicit(&job->error, memory_order_relaxed) != 0) break;
      if (task == end - 1) atomic_fetch_add_explicit(&job->drained_lanes, 1, memory_order_relaxed);
      int error = job->lambda(task, &job->env, job->cdata);
      if (error != 0) record_failure(job, error);
    }
    if (atomic_load_explicit(&job->drained_lanes, memory_order_relaxed) == n) return;
  }
}

static bool help_some_job(void) {
  int used = atomic_load_explicit(&pool.jobs_used, memory_order_acquire);
  for (Job* job = jobs; job < jobs + used; ++job) {
    unsigned gate = atomic_load_explicit(&job->gate, memory_order_relaxed);
    while ((gate & SEATS) != 0) {
      if (!atomic_compare_exchange_weak_explicit(&job->gate, &gate, gate - 1 + ONE_ACTIVE,
                                                 memory_order_acquire, memory_order_relaxed))
        continue;
      atomic_fetch_sub(&pool.idle, 1);
      run_tasks(job, job->num_threads - (int)(gate & SEATS));
      drop_all_blocks(); /* there are some only after a failure */
      atomic_fetch_add(&pool.idle, 1); /* first, or the next launch would miss this worker */
      gate = atomic_fetch_sub_explicit(&job->gate, ONE_ACTIVE, memory_order_release);
      if ((gate & CALLER_SLEEPS) != 0 && (gate & ACTIVE) == ONE_ACTIVE) futex_wake(&job->gate, 1);
      return true;
    }
  }
  return false;
}

static void* work(void* unused) {
  in_task = true;
  unsigned turn = 0;
  for (int64_t until = now_ns() + SPIN_NS;;) {
    unsigned seen = atomic_load(&pool.launches);
    unsigned caller_cpu = atomic_load_explicit(&pool.caller_cpu, memory_order_relaxed);
    if ((unsigned)sched_getcpu() == caller_cpu) {
      cpu_set_t cpus = cpus_beside(caller_cpu);
      sched_setaffinity(0, sizeof cpus, &cpus);
    }
    if (help_some_job()) {
      until = now_ns() + SPIN_NS;
      continue;
    }
    while (atomic_load_explicit(&pool.launches, memory_order_relaxed) == seen && spin(&turn, until)) {
    }
    /* A launch counts itself, then looks for sleepers; here it is the other way round. So either it
     * sees this sleeper, or the kernel sees that `launches` has moved and does not let it sleep. */
    atomic_fetch_add(&pool.sleeping, 1);
    if (atomic_load(&pool.launches) == seen) futex_wait(&pool.launches, seen);
    atomic_fetch_sub(&pool.sleeping, 1);
  }
  return unused;
}

/* Callers share the workers; there are more than the CPUs only if one launch asks for more. */
static void grow_pool(int helpers) {
  if (atomic_exchange(&pool.growing, true)) return; /* never wait here: the caller can work alone */
  int limit = usable_cpu_count() - 1;
  if (limit < helpers) limit = helpers;
  sigset_t blocked, before; /* the process's signals are for its own threads, except faults */
  sigfillset(&blocked);
  for (const int* fault = (int[]){SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, 0}; *fault; ++fault)
    sigdelset(&blocked, *fault);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  cpu_set_t cpus = cpus_beside(atomic_load(&pool.caller_cpu));
  pthread_attr_setaffinity_np(&attributes, sizeof cpus, &cpus);
  while (atomic_load(&pool.idle) < helpers && atomic_load(&pool.workers) < limit) {
    pthread_t thread;
    atomic_fetch_add(&pool.idle, 1);
    if (pthread_create(&thread, &attributes, work, NULL) != 0) {
      atomic_fetch_sub(&pool.idle, 1);
      break;
    }
    atomic_fetch_add(&pool.workers, 1);
  }
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  atomic_store(&pool.growing, false);
}

static void call_helpers(int helpers) {
  atomic_store_explicit(&pool.caller_cpu, (unsigned)sched_getcpu(), memory_order_relaxed);
  if (atomic_load(&pool.idle) < helpers) grow_pool(helpers);
  atomic_fetch_add(&pool.launches, 1);
  int sleeping = atomic_load(&pool.sleeping);
  int missing = helpers - (atomic_load(&pool.idle) - sleeping); /* the others spin and see it */
  if (sleeping > 0 && missing > 0) futex_wake(&pool.launches, missing);
}

static void wait_for_helpers(Job* job) {
  unsigned gate = atomic_fetch_and_explicit(&job->gate, ~SEATS, memory_order_acquire);
  if ((gate & ACTIVE) == 0) return;
  unsigned turn = 0;
  int64_t until = now_ns() + SPIN_NS;
  while ((atomic_load_explicit(&job->gate, memory_order_acquire) & ACTIVE) != 0) {
    if (spin(&turn, until)) continue;
    gate = atomic_fetch_or_explicit(&job->gate, CALLER_SLEEPS, memory_order_acquire);
    if ((gate & ACTIVE) != 0) futex_wait(&job->gate, gate | CALLER_SLEEPS);
  }
}

static Job* take_job_slot(void) {
  for (int i = 0; i < MAX_JOBS; ++i) {
    if (atomic_load_explicit(&jobs[i].taken, memory_order_relaxed)) continue;
    if (atomic_exchange_explicit(&jobs[i].taken, true, memory_order_acquire)) continue;
    int used = atomic_load(&pool.jobs_used);
    while (used <= i && !atomic_compare_exchange_weak(&pool.jobs_used, &used, i + 1)) {
    }
    return &jobs[i];
  }
  return NULL;
}

static int run_job(Job* job, FTVMParallelLambda lambda, void* cdata, int num_task, int threads) {
  job->lambda = lambda;
  job->cdata = cdata;
  job->env = (TVMParallelGroupEnv){NULL, num_task > 0 ? num_task : TASKS_PER_THREAD * threads};
  job->num_threads = threads;
  job->raised = NULL;
  atomic_store_explicit(&job->error, 0, memory_order_relaxed);
  atomic_store_explicit(&job->drained_lanes, 0, memory_order_relaxed);
  for (int i = 0; i < threads; ++i)
    atomic_store_explicit(&job->lanes[i].next_task, lane_start(job, i), memory_order_relaxed);
  atomic_store_explicit(&job->gate, (unsigned)threads - 1, memory_order_release);
  call_helpers(threads - 1);
  in_task = true;
  run_tasks(job, 0);
  in_task = false;
  wait_for_helpers(job);
  int error = atomic_load_explicit(&job->error, memory_order_relaxed);
  void* raised = job->raised;
  atomic_store_explicit(&job->taken, false, memory_order_release);
  if (error != 0) raise_again(raised);
  return error;
}

static int run_serially(FTVMParallelLambda lambda, void* cdata, int num_task) {
  TVMParallelGroupEnv env = {NULL, num_task > 0 ? num_task : 1};
  int error = 0;
  for (int task = 0; task < env.num_task && error == 0; ++task) error = lambda(task, &env, cdata);
  if (error != 0) raise_again(take_raised());
  return error;
}

/* Threads for launches by the calling thread, itself included; 0: one for each CPU the process may
 * use. Returns the number in force (MAX_THREADS at most), or -1 for a negative n. */
int gqa_tvm_set_num_threads(int n) {
  if (n < 0) return -1;
  if (n == 0) n = usable_cpu_count();
  return wanted_threads = n < MAX_THREADS ? n : MAX_THREADS;
}

static int threads_of_caller(void) {
  return wanted_threads != 0 ? wanted_threads : gqa_tvm_set_num_threads(0);
}

int gqa_tvm_get_num_threads(void) { return threads_of_caller(); }

static int parallel_launch(FTVMParallelLambda lambda, void* cdata, int num_task) {
  int threads = in_task ? 1 : threads_of_caller();
  if (num_task > 0 && threads > num_task) threads = num_task;
  Job* job = threads > 1 ? take_job_slot() : NULL;
  int error = job != NULL ? run_job(job, lambda, cdata, num_task, threads)
                          : run_serially(lambda, cdata, num_task);
  if (error != 0 && !in_task) drop_all_blocks();
  return error;
}

HIDDEN int (*__TVMBackendParallelLaunch)(FTVMParallelLambda, void*, int) = parallel_launch;
HIDDEN void* (*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = alloc_workspace;
HIDDEN int (*__TVMBackendFreeWorkspace)(int, int, void*) = free_workspace;

/* The three services, for kernel libraries that are linked without this file and share its pool. */
void gqa_tvm_hooks(void* hooks[3]) {
  hooks[0] = (void*)parallel_launch;
  hooks[1] = (void*)alloc_workspace;
  hooks[2] = (void*)free_workspace;
}

/* Makes the kernels that are linked with this file use the services of another. Not while they run. */
void gqa_tvm_use_hooks(void* const hooks[3]) {
  memcpy(&__TVMBackendParallelLaunch, &hooks[0], sizeof hooks[0]);
  memcpy(&__TVMBackendAllocWorkspace, &hooks[1], sizeof hooks[1]);
  memcpy(&__TVMBackendFreeWorkspace, &hooks[2], sizeof hooks[2]);
}

#include "remember.h"

/* Whether the CPU has all of these features, named as in /proc/cpuinfo and separated by spaces. */
int gqa_tvm_cpu_has(const char* names) { return cpu_has_all(names); }

/* Scratch memory that all threads hold at present. */
int64_t gqa_tvm_workspace_bytes(void) { return atomic_load(&reserved_bytes); }

/* Only the forking thread lives on in the child: there are no workers and no launches of others. */
static void forget_other_threads(void) {
  memset(&pool, 0, sizeof pool);
  for (Job* job = jobs; job < jobs + MAX_JOBS; ++job) {
    atomic_store(&job->gate, 0);
    atomic_store(&job->taken, false);
  }
}

__attribute__((constructor)) static void initialise(void) {
  /* Sleeping workers and exiting threads run this code: it must stay mapped after a dlclose. The
   * call fails only for a main program, which nobody unloads. */
  Dl_info file;
  if (dladdr(&pool, &file) != 0) dlopen(file.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  initialise_workspace();
  pthread_atfork(NULL, NULL, forget_other_threads);
}
