"""The whole operator from ONNX Runtime's arguments to its results."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gqa_tvm.reference.attention import ScoreRules, attend
from gqa_tvm.reference.cache import CacheLayout, History, cache_layout, write_cache
from gqa_tvm.reference.lengths import Array, Lengths, call_lengths
from gqa_tvm.reference.quantization import dequantize, head_scales, quantize
from gqa_tvm.reference.tokens import rms_norm, rotary_positions, rotate, split_heads


class ReferenceResult(NamedTuple):
    """output float64 [B, S, N*H]; present_* [B, N_kv, max(T, C), HP] in the cache's dtype, C rows for
    a sliding window cache; output_qk float64 [B, N, S, T], None when qk_output is 0."""

    output: Array
    present_key: Array
    present_value: Array
    output_qk: Array | None


class _Rotation(NamedTuple):
    """cos and sin [M, R/2], positions [B, S]."""

    cos: Array
    sin: Array
    positions: Array
    interleaved: bool


# Infinities and NaN are ordinary inputs.
@np.errstate(all="ignore")
def group_query_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    seqlens_k: Array,
    total_sequence_length: Array | int,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    attention_bias: Array | None = None,
    head_sink: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    query_seqlens: Array | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    local_window_size: int = -1,
    smooth_softmax: int = -1,
    sliding_window_cache: int = 0,
    causal: int = 1,
    qk_output: int = 0,
    k_quant_type: str = "NONE",
    v_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    q_norm_epsilon: float | None = None,
    k_norm_epsilon: float | None = None,
    qk_norm_epsilon: float = 1e-6,
    in_place: bool = False,
) -> ReferenceResult:
    """The whole operator; arguments are ONNX Runtime's, in its order, and are never written.

    Floating point arrays are float32, float16 or bfloat16 (from ml_dtypes); the cache's dtype is
    past's, else the query's. Normed and rotated q and k are rounded to the query's dtype, then k and
    v to the cache's; nothing else is rounded, output and output_qk neither. Attention reads the
    cache as it was just written, dequantised in float32, and computes in float64.

    present_* are new arrays that hold zeros beyond the valid rows; `in_place` starts them as copies
    of past instead, which is what a buffer shared by past and present would hold.
    Raises ValueError for lengths that do not fit. Other faults of the arguments are not looked for.
    """
    queries, keys, values = split_heads(query, key, value, num_heads, kv_num_heads)
    batch, new_tokens, _, head_size = queries.shape
    total = int(np.asarray(total_sequence_length).reshape(()))
    is_sliding = sliding_window_cache == 1
    lengths = call_lengths(seqlens_k, total, query_seqlens, new_tokens, keys.shape[1], is_sliding)
    needs_columns = attention_bias is not None or qk_output != 0
    if needs_columns and lengths.totals.max() > total:
        raise ValueError(f"{lengths.totals} keys have no column in attention_bias or output_qk of {total}")
    rotation = None
    if do_rotary == 1:
        if cos_cache is None or sin_cache is None:
            raise ValueError("do_rotary needs cos_cache and sin_cache")
        positions = rotary_positions(position_ids, lengths, new_tokens)
        rotation = _Rotation(cos_cache, sin_cache, positions, rotary_interleaved == 1)
    q_epsilon = qk_norm_epsilon if q_norm_epsilon is None else q_norm_epsilon
    k_epsilon = qk_norm_epsilon if k_norm_epsilon is None else k_norm_epsilon
    queries = _norm_and_rotate(queries, q_norm_weight, q_epsilon, rotation)
    keys = _norm_and_rotate(keys, k_norm_weight, k_epsilon, rotation)

    bits = kv_cache_bit_width if k_quant_type.upper() != "NONE" else 0
    k_steps = head_scales(k_scale, k_quant_type, kv_num_heads, head_size)
    v_steps = head_scales(v_scale, v_quant_type, kv_num_heads, head_size)
    layout = cache_layout(past_key, total, is_sliding, local_window_size)
    present_key, key_history = _append(past_key, keys, k_steps, bits, lengths, layout, in_place)
    present_value, value_history = _append(past_value, values, v_steps, bits, lengths, layout, in_place)

    bias_shape = (batch, num_heads, new_tokens, total)
    smooth = np.zeros(num_heads) if smooth_softmax == 1 else None
    rules = ScoreRules(
        # ONNX stores float attributes as float32.
        scale=float(np.float32(scale)) or head_size**-0.5,
        softcap=float(np.float32(softcap)),
        causal=causal == 1,
        window=local_window_size,
        bias=None if attention_bias is None else np.broadcast_to(attention_bias, bias_shape),
        sink=smooth if head_sink is None else head_sink.astype(np.float64),
    )
    output, output_qk = attend(queries, key_history, value_history, lengths, total, rules, qk_output)
    return ReferenceResult(output, present_key, present_value, output_qk)


def _norm_and_rotate(x: Array, weight: Array | None, epsilon: float, rotation: _Rotation | None) -> Array:
    """x [B, S, n, H], or without tokens [B, 0, n, H]; float32 in between, one rounding to x's dtype."""
    result = x.astype(np.float32)
    if weight is not None:
        result = rms_norm(x, weight, epsilon)
    if rotation is not None:
        positions = rotation.positions[:, : x.shape[1]]
        result = rotate(result, rotation.cos, rotation.sin, positions, rotation.interleaved)
    return result.astype(x.dtype)


def _append(
    past: Array | None,
    new: Array,
    scale: Array,
    bits: int,
    lengths: Lengths,
    layout: CacheLayout,
    in_place: bool,
) -> tuple[Array, list[History]]:
    """present, and each entry's history as attention reads it, float; new is [B, S or 0, N_kv, H]."""
    head_size = new.shape[3]
    rows = new.swapaxes(1, 2)
    if bits:
        rows = quantize(rows, scale, bits)
    elif past is not None:
        rows = rows.astype(np.float32).astype(past.dtype)
    present, histories = write_cache(past, rows, lengths, layout, in_place)
    read = [History(first, dequantize(codes, scale, bits, head_size)) for first, codes in histories]
    return present, read
