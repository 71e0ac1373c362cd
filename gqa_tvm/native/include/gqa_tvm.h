/* The kernels of a library of gqa_tvm for C and C++, without Python. `gqa-tvm build -o libgqa.so` makes
 * the library; apache-tvm-ffi has the headers included here and libtvm_ffi.so (`tvm-ffi-config
 * --includedir --dlpack-includedir --libdir`).
 *
 * A kernel takes its arguments as an array of TVMFFIAny. Tensors are passed as
 *   {.type_index = kTVMFFIDLTensorPtr, .v_ptr = &dl_tensor}, whole numbers and floats as
 *   {.type_index = kTVMFFIInt, .v_int64 = 1}, {.type_index = kTVMFFIFloat, .v_float64 = 0.125}.
 * It returns 0, or -1 for arguments of wrong number, type or shape; TVMFFIErrorMoveFromRaised has the
 * text then. It keeps nothing. Several threads may call at once. Tensors are on {kDLCPU, 0} and need
 * the alignment of their elements; the last axis is contiguous, `strides` must be given (in elements).
 *
 * Names: <operation>_<query>_<cache>_h<H>[_r<rows>] with query f32, f16 or bf16 (bf16 is passed as
 * uint16) and cache f32, f16, bf16, i8 or i4, such as flash_decode_f32_i8_h64_r2.
 * B batch, S new tokens, T keys of an entry with the new ones, N query heads, N_kv key-value heads,
 * G = N / N_kv, H head size, C capacity of the cache. columns: H, for i4 (H + 1) / 2 bytes with the
 * even column in the low nibble and 8 added to every code.
 *
 * append_*: 15 arguments, writes new keys and values into the cache
 *    0 key, 1 value    [B, S, hidden] query type, the heads from first_*_head on
 *    2 key_cache, 3 value_cache    [B, N_kv, C, columns] cache type, written
 *    4 entries         [B, 4] int32: rows in the cache before (P), rows after (T), tokens that count
 *                      (T - P), position of cache row 0 (0)
 *    5 positions       [B, S] int64, 6 cos, 7 sin [positions, rotary / 2] query type; any [1, 1] if
 *                      rotary is 0
 *    8 norm_weight     [H] query type, read only if norm_epsilon is not 0
 *    9 k_scale, 10 v_scale    [1] or [N_kv * H] float32; [1] with any value for a float cache
 *   11 norm_epsilon    float, 0 = no RMS norm of the keys
 *   12 rotary          0 off, 1 halves, 2 interleaved
 *   13 first_key_head, 14 first_value_head    0, or where they start in packed QKV
 *
 * flash_prefill_*: 21 arguments
 *    0 query           [B, S, hidden] query type, N heads from column 0 on, not yet rotated
 *    1 key_cache, 2 value_cache, 3 entries, 4 positions, 5 cos, 6 sin    as above, only read
 *    7 bias            [B or 1, N or 1, S, T] query type; [1, 1, 1, 1] without
 *    8 head_sink       [N] query type; [1] without
 *    9 norm_weight     [H] of the query's RMS norm, 10 k_scale, 11 v_scale    as above
 *   12 output          [B, S, N, H] query type, contiguous, written
 *   13 softmax_scale   float, such as 1 / sqrt(H)
 *   14 softcap         float, 0 = off
 *   15 window          keys that a token sees, itself included; -1 = all
 *   16 causal          0 or 1
 *   17 norm_epsilon    float, 0 = no RMS norm of the query
 *   18 rotary          as above
 *   19 has_bias        0 or 1
 *   20 sink            0 none, 1 smooth softmax, 2 head_sink
 *
 * flash_decode_*_r<R>: the 13 tensors of flash_prefill, 13 partial, the 8 scalars, 22 kv_chunk.
 *   For S = 1 and R = G (for G > 8 the even share of the fewest tiles of at most 8 rows).
 *   kv_chunk           keys of a task, a multiple of 64; at least T rounded up: one task for each
 *                      entry and key-value head, else they are split and merged
 *   partial            [B, N_kv, groups, chunks, rows, W] float32 scratch; [1, 1, 1, 1, 1, W] if
 *                      kv_chunk is at least every T. groups and rows: tasks of the G rows of a head, for
 *                      G <= 32: 1 and G; chunks: the largest T / kv_chunk, rounded up. W: 2 + columns
 *                      rounded up to whole vectors of the target (16, 8 or 4 floats), twice that for i4
 *
 * naive_*: the 13 tensors of flash_prefill, 13 output_qk [B, N, S, T] float32, zeros at first, the 8
 *   scalars, 22 qk_output: 0 none ([1, 1, 1, 1] is passed), 1 scores, 2 probabilities.
 */
#ifndef GQA_TVM_H
#define GQA_TVM_H

#include <tvm/ffi/c_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The kernel of this name for the best target of the library that this CPU can run; NULL = none. */
TVMFFISafeCallType gqa_tvm_kernel(const char* name);

/* That target as symbols have it, such as x86_avx512; NULL = none runs here. */
const char* gqa_tvm_best_target(void);

/* Threads for kernels that the calling thread calls, itself included; 0: one for each CPU that the
 * process may use, which is what holds at first. Returns the number in force, -1 for a negative n. */
int gqa_tvm_set_num_threads(int n);
int gqa_tvm_get_num_threads(void);

/* Bytes of scratch memory that all threads hold at present. */
int64_t gqa_tvm_workspace_bytes(void);

/* Whether the CPU has all of these features, named as in /proc/cpuinfo and separated by spaces. */
int gqa_tvm_cpu_has(const char* names);

/* Parallel loop, scratch allocation and release of this file, for kernels in other files; and the other
 * way round: this file's kernels use those of another from now on. A process needs one thread pool. */
void gqa_tvm_hooks(void* hooks[3]);
void gqa_tvm_use_hooks(void* const hooks[3]);

#ifdef __cplusplus
}
#endif

#endif
