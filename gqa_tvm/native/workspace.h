/* Scratch memory of the kernels, a part of launcher.c: a stack of blocks for each thread, cut from
 * chunks that are kept for reuse until the thread ends. */
#ifndef GQA_TVM_WORKSPACE_H
#define GQA_TVM_WORKSPACE_H

#include <pthread.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "raised.h"

enum {
  LINE = 64, /* alignment of everything */
  FIRST_CHUNK = 256 * 1024,
  HUGE_PAGE = 2 * 1024 * 1024,
  DIRECT_BYTES = 64 * 1024 * 1024, /* larger blocks go back to the system when they are freed */
};

typedef struct Chunk {
  alignas(LINE) struct Chunk* next;
  size_t size, used; /* this header included */
} Chunk;

typedef struct Block {
  alignas(LINE) struct Block* below;
  Chunk* chunk; /* the current chunk when this block was made; direct blocks lie outside of it */
  size_t size;
  bool direct, freed;
} Block;

static _Thread_local struct {
  Block* top;
  Chunk *first, *current;
} scratch;

/* True while this thread runs a task: others may be using blocks of the kernel that launched it. */
static _Thread_local bool in_task;

static atomic_llong reserved_bytes;
static pthread_key_t thread_exit_key;
static bool poison;

static void* reserve(size_t size) {
  void* memory = NULL;
  bool huge = size >= HUGE_PAGE;
  if (posix_memalign(&memory, huge ? HUGE_PAGE : LINE, size) != 0) return NULL;
  if (huge) madvise(memory, size, MADV_HUGEPAGE);
  atomic_fetch_add_explicit(&reserved_bytes, (long long)size, memory_order_relaxed);
  return memory;
}

static void release(void* memory, size_t size) {
  atomic_fetch_sub_explicit(&reserved_bytes, (long long)size, memory_order_relaxed);
  free(memory);
}

static void pop_freed_blocks(void) {
  Block* block;
  while ((block = scratch.top) != NULL && block->freed) {
    scratch.top = block->below;
    scratch.current = scratch.top ? scratch.top->chunk : scratch.first;
    if (block->direct)
      release(block, block->size);
    else
      block->chunk->used = (size_t)((char*)block - (char*)block->chunk);
  }
}

/* A kernel that fails returns at once and leaves its blocks behind; nobody reads them any more. */
static void drop_all_blocks(void) {
  for (Block* block = scratch.top; block != NULL; block = block->below) block->freed = true;
  pop_freed_blocks();
}

/* Chunks after the current one are empty, so any of them that is large enough will do. */
static Chunk* chunk_with_room(size_t size) {
  Chunk *chunk = scratch.current, *last = NULL;
  size_t wanted = FIRST_CHUNK;
  for (; chunk != NULL; last = chunk, chunk = chunk->next)
    if (size <= chunk->size - chunk->used) return scratch.current = chunk;
  if (last != NULL) wanted = last->size < DIRECT_BYTES / 2 ? 2 * last->size : DIRECT_BYTES;
  while (wanted < size + sizeof(Chunk)) wanted *= 2;
  if ((chunk = reserve(wanted)) == NULL) return NULL;
  *chunk = (Chunk){.next = NULL, .size = wanted, .used = sizeof(Chunk)};
  *(last != NULL ? &last->next : &scratch.first) = chunk;
  if (last == NULL) pthread_setspecific(thread_exit_key, &scratch);
  return scratch.current = chunk;
}

static Block* push_block(size_t size) {
  bool direct = size > DIRECT_BYTES;
  Chunk* chunk = direct ? scratch.current : chunk_with_room(size);
  if (!direct && chunk == NULL) return NULL;
  Block* block = direct ? reserve(size) : (Block*)((char*)chunk + chunk->used);
  if (block == NULL) return NULL;
  if (!direct) chunk->used += size;
  *block = (Block){.below = scratch.top, .chunk = chunk, .size = size, .direct = direct};
  return scratch.top = block;
}

static void* alloc_workspace(int device_type, int device_id, uint64_t nbytes, int code, int bits) {
  (void)device_type, (void)device_id, (void)code, (void)bits;
  Block* block = NULL;
  if (nbytes <= PTRDIFF_MAX - 2 * LINE)
    block = push_block(sizeof(Block) + (nbytes + LINE - 1) / LINE * LINE);
  if (block == NULL) { /* generated code tests for NULL, and returns -1 without a message */
    raise_new("MemoryError", "no memory for the scratch buffer of a kernel");
    if (!in_task) drop_all_blocks();
    return NULL;
  }
  if (poison) memset(block + 1, 0xFF, block->size - sizeof(Block));
  return block + 1;
}

static int free_workspace(int device_type, int device_id, void* pointer) {
  (void)device_type, (void)device_id;
  ((Block*)pointer - 1)->freed = true;
  pop_freed_blocks();
  return 0;
}

static void release_thread_memory(void* unused) {
  (void)unused;
  drop_all_blocks();
  for (Chunk *chunk = scratch.first, *next; chunk != NULL; chunk = next) {
    next = chunk->next;
    release(chunk, chunk->size);
  }
  scratch.first = scratch.current = NULL;
}

static void initialise_workspace(void) {
  pthread_key_create(&thread_exit_key, release_thread_memory);
  const char* value = getenv("GQA_TVM_POISON_SCRATCH");
  poison = value != NULL && strcmp(value, "1") == 0;
}

#endif
