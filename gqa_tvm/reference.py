"""GroupQueryAttention in NumPy, clear and slow: what kernels and operator are tested against.

B batch, S new tokens, N query heads, N_kv key/value heads, G = N / N_kv, H head size, C cache
capacity, P past tokens of an entry, T total_sequence_length, HP = H or (H + 1) // 2 for INT4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class ReferenceResult(NamedTuple):
    """output float64 [B, S, N*H]; present_* [B, N_kv, max(T, C), HP] in the cache's dtype;
    output_qk float64 [B, N, S, T], None when qk_output is 0."""

    output: Array
    present_key: Array
    present_value: Array
    output_qk: Array | None


class Lengths(NamedTuple):
    """pasts [B]: position of token 0; counts [B]: tokens that count, the others are padding;
    totals [B]: keys of the entry; total: T."""

    pasts: Array
    counts: Array
    totals: Array
    total: int


class ScoreRules(NamedTuple):
    """What turns dot products into scores; bias [B, N, S, T] and sink [N] may be absent."""

    scale: float
    softcap: float
    causal: bool
    window: int
    bias: Array | None
    sink: Array | None


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
    q_norm_epsilon: float = 1e-6,
    k_norm_epsilon: float = 1e-6,
    qk_norm_epsilon: float = 1e-6,
    in_place: bool = False,
) -> ReferenceResult:
    """The whole operator; arguments are ONNX Runtime's, in its order, and are never written.

    Attention reads the cache as it was just written, dequantised in float32, and computes in
    float64. present_* are new arrays that hold zeros beyond the valid rows; `in_place` starts them
    as copies of past instead, which is what a buffer shared by past and present would hold.
    Raises ValueError for lengths that do not fit, NotImplementedError for a sliding window cache
    and for q/k norm. Other faults of the arguments are not looked for.
    """
    if sliding_window_cache == 1 or q_norm_weight is not None or k_norm_weight is not None:
        raise NotImplementedError("the reference has no sliding window cache and no q/k norm")
    queries, keys, values = split_heads(query, key, value, num_heads, kv_num_heads)
    batch, new_tokens, _, head_size = queries.shape
    lengths = _lengths(seqlens_k, total_sequence_length, query_seqlens, new_tokens)
    total = lengths.total
    if do_rotary == 1:
        if cos_cache is None or sin_cache is None:
            raise ValueError("do_rotary needs cos_cache and sin_cache")
        is_prompt = new_tokens == total and query_seqlens is None
        positions = rotary_positions(position_ids, lengths, new_tokens, is_prompt)
        table, interleaved = (cos_cache, sin_cache), rotary_interleaved == 1
        queries = rotate(queries, *table, positions, interleaved)
        keys = rotate(keys, *table, positions[:, : keys.shape[1]], interleaved)

    bits = kv_cache_bit_width if k_quant_type.upper() != "NONE" else 0
    k_steps = _head_scales(k_scale, k_quant_type, kv_num_heads, head_size)
    v_steps = _head_scales(v_scale, v_quant_type, kv_num_heads, head_size)
    present_key = _append(past_key, keys, k_steps, bits, lengths, in_place)
    present_value = _append(past_value, values, v_steps, bits, lengths, in_place)
    read_keys = dequantize(present_key[:, :, :total], k_steps, bits, head_size)
    read_values = dequantize(present_value[:, :, :total], v_steps, bits, head_size)

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
    output, output_qk = attend(queries, read_keys, read_values, lengths, rules, qk_output)
    return ReferenceResult(output, present_key, present_value, output_qk)


def _lengths(seqlens_k: Array, total_length: Array | int, query_seqlens: Array | None, new_tokens: int) -> Lengths:
    total = int(np.asarray(total_length).reshape(()))
    totals = np.asarray(seqlens_k).reshape(-1).astype(np.int64) + 1
    counts: Array = np.full(len(totals), new_tokens)
    if query_seqlens is not None:
        counts = query_seqlens.astype(np.int64)
    is_prompt = new_tokens == total and query_seqlens is None
    pasts = np.zeros_like(totals) if is_prompt else totals - counts
    if pasts.min() < 0 or totals.min() < 1 or totals.max() > total or counts.max() > new_tokens:
        raise ValueError(f"{pasts} past and {counts} new tokens do not fit total length {total}")
    return Lengths(pasts, counts, totals, total)


def split_heads(
    query: Array, key: Array | None, value: Array | None, num_heads: int, kv_num_heads: int
) -> tuple[Array, Array, Array]:
    """[B, S, heads*H] each, or packed [B, S, (N + 2 N_kv)*H], to three BSNH arrays."""
    batch, new_tokens, hidden = query.shape
    if key is None or value is None:
        packed_heads = num_heads + 2 * kv_num_heads
        packed = query.reshape(batch, new_tokens, packed_heads, hidden // packed_heads)
        queries, keys, values = np.split(packed, [num_heads, num_heads + kv_num_heads], axis=2)
        return queries, keys, values
    head_size = hidden // num_heads
    kv_shape = (batch, key.shape[1], kv_num_heads, head_size)
    heads = query.reshape(batch, new_tokens, num_heads, head_size)
    return heads, key.reshape(kv_shape), value.reshape(kv_shape)


def rotary_positions(position_ids: Array | None, lengths: Lengths, new_tokens: int, is_prompt: bool) -> Array:
    """The rotary position of each new token, int64 [B, S]; a first prompt counts up from one id."""
    steps = np.arange(new_tokens)[None]
    if position_ids is None:
        positions = lengths.pasts[:, None] + steps
    elif is_prompt:
        positions = position_ids[0, 0] + np.repeat(steps, len(lengths.pasts), axis=0)
    else:
        positions = position_ids[:, :new_tokens]
    # Query padding may carry any id; nothing reads what it is rotated to.
    return np.where(steps < lengths.counts[:, None], positions, 0)


def rotate(x: Array, cos: Array, sin: Array, positions: Array, interleaved: bool) -> Array:
    """Rotary embedding of x [B, S, n, H] by cos/sin [M, R/2] at positions [B, S]; columns from R on
    pass through. Float32 arithmetic, bit for bit ONNX Runtime's. ValueError for a position outside
    [0, M)."""
    if positions.size and not 0 <= positions.min() <= positions.max() < len(cos):
        raise ValueError(f"positions must be in [0, {len(cos)}), got {positions}")
    half = cos.shape[1]
    even, odd = slice(0, half), slice(half, 2 * half)
    if interleaved:
        even, odd = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., even].astype(np.float32), x[..., odd].astype(np.float32)
    c, s = (table.astype(np.float32)[positions][:, :, None] for table in (cos, sin))
    rotated = x.copy()
    rotated[..., even] = _fused_multiply_add(a, c, -(b * s))
    rotated[..., odd] = _fused_multiply_add(a, s, b * c)
    return rotated


def _fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 arrays, rounded once to float32.

    The product is exact in float64. The sum is rounded to odd there, which keeps the second
    rounding from meeting a tie that the first one made.
    """
    product = a.astype(np.float64) * b
    total = product + c
    other = total - product
    error = (product - (total - other)) + (c - other)
    inexact_even = (np.abs(error) > 0) & (total.view(np.int64) % 2 == 0)
    odd = np.nextafter(total, np.copysign(np.inf, error))
    return np.where(inexact_even, odd, total).astype(np.float32)


def quantize(x: Array, scale: Array, bits: int) -> Array:
    """x [..., H] to int8 codes [..., H], or for 4 bits to bytes uint8 [..., (H + 1) // 2].

    scale is float32, of any shape that broadcasts against x. A byte holds the even column in its
    low nibble, each code plus 8; an odd last column is joined by code 0.
    """
    low, high = (-128, 127) if bits == 8 else (-8, 7)
    scale = np.asarray(scale, np.float32)
    with np.errstate(all="ignore"):
        inverse = np.where(scale == 0, np.float32(1), np.float32(1) / scale)
        rounded = np.rint(x.astype(np.float32) * inverse)
    codes = np.where(np.isnan(rounded), high, np.clip(rounded, low, high)).astype(np.int8)
    if bits == 8:
        return codes
    if x.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    nibbles = (codes + 8).astype(np.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def dequantize(codes: Array, scale: Array, bits: int, head_size: int) -> Array:
    """Codes as `quantize` makes them to float32 [..., head_size]; bits 0 passes floats through."""
    if bits == 0:
        return codes
    if bits == 4:
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).astype(np.int8) - np.int8(8)
        codes = nibbles.reshape(*codes.shape[:-1], -1)[..., :head_size]
    with np.errstate(all="ignore"):
        return codes.astype(np.float32) * np.asarray(scale, np.float32)


def _head_scales(scale: Array | None, quant_type: str, kv_num_heads: int, head_size: int) -> Array:
    """Scales to broadcast against [B, N_kv, rows, H]; their number matters, not their shape."""
    if quant_type.upper() == "NONE":
        return np.ones(1, np.float32)
    if scale is None:
        raise ValueError(f"{quant_type} needs k_scale and v_scale")
    per_channel = quant_type.upper() == "PER_CHANNEL"
    return scale.reshape((kv_num_heads, 1, head_size) if per_channel else (1, 1, 1))


def _append(past: Array | None, new: Array, scale: Array, bits: int, lengths: Lengths, in_place: bool) -> Array:
    """present [B, N_kv, max(T, C), HP]: past followed by the rows of new [B, S or 0, N_kv, H]."""
    rows = new.swapaxes(1, 2)
    codes = quantize(rows, scale, bits) if bits else rows
    batch, kv_heads, new_rows, packed_size = codes.shape
    if past is None:
        past = np.zeros((batch, kv_heads, 0, packed_size), codes.dtype)
    capacity = max(lengths.total, past.shape[2])
    present = np.zeros((batch, kv_heads, capacity, packed_size), past.dtype)
    if in_place:
        if past.shape != present.shape:
            raise ValueError(f"in place needs past of shape {present.shape}, got {past.shape}")
        present[...] = past
    for b, (start, count, total) in enumerate(zip(*lengths[:3], strict=True)):
        kept = start if new_rows else total
        present[b, :, :kept] = past[b, :, :kept]
        appended = min(count, new_rows)
        present[b, :, start : start + appended] = codes[b, :, :appended]
    return present


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    lengths: Lengths,
    rules: ScoreRules,
    qk_output: int = 0,
) -> tuple[Array, Array | None]:
    """Attention of queries [B, S, N, H] over keys and values [B, N_kv, T, H], all float64 inside.

    Returns output [B, S, N*H] and output_qk [B, N, S, T]: scores (1), weights (2) or None (0).
    Keys a row does not see are not read and are 0 in output_qk; a row that sees no key, or only
    keys of score -inf, has output 0, and so has padding.
    """
    batch, new_tokens, heads, head_size = queries.shape
    grouped = (batch, new_tokens, keys.shape[1], heads // keys.shape[1], head_size)
    queries = queries.astype(np.float64).reshape(grouped)
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    output = np.zeros(grouped)
    output_qk = np.zeros((batch, heads, new_tokens, lengths.total)) if qk_output else None
    with np.errstate(all="ignore"):
        for b, s in np.ndindex(batch, new_tokens):
            past, count, total = (int(length[b]) for length in lengths[:3])
            seen = visible_keys(s, past, total, rules.causal, rules.window)
            if s >= count or seen.start == seen.stop:
                continue
            dots = queries[b, s] @ keys[b, :, seen].swapaxes(1, 2)
            bias = 0.0 if rules.bias is None else rules.bias[b, :, s, seen].astype(np.float64)
            scores = process_scores(dots.reshape(heads, -1), rules, bias)
            weights = softmax(scores, rules.sink)
            output[b, s] = weights.reshape(dots.shape) @ values[b, :, seen]
            if output_qk is not None:
                output_qk[b, :, s, seen] = scores if qk_output == 1 else weights
    return output.reshape(batch, new_tokens, heads * head_size), output_qk


def visible_keys(row: int, past: int, total: int, causal: bool, window: int) -> slice:
    """The keys token `row` sees; prompt padding (past + row >= total) sees what the entry holds.

    Raises ValueError for a window of 0, below -1, or without causal.
    """
    if window == 0 or window < -1 or (window > 0 and not causal):
        raise ValueError(f"local_window_size {window} with causal {causal}")
    end = min(past + row + 1, total) if causal else total
    start = past + row + 1 - window if window > 0 else 0
    return slice(min(max(start, 0), end), end)


def process_scores(dots: Array, rules: ScoreRules, bias: Array | float) -> Array:
    """Scale, softcap, bias, in this order, on dot products of any shape."""
    scores = dots * rules.scale
    if rules.softcap > 0:
        scores = rules.softcap * np.tanh(scores / rules.softcap)
    return scores + bias


def softmax(scores: Array, sink: Array | None = None) -> Array:
    """Softmax over the last axis of scores [..., keys]; sink [...] joins the denominator.

    Rows of -inf alone and rows without keys give zeros.
    """
    top = scores.max(axis=-1, initial=-np.inf, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink[..., None])
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(scores - top)
    denominator: Array = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        denominator = denominator + np.exp(sink[..., None] - top)
    result: Array = weights / np.where(denominator == 0, 1.0, denominator)
    return result
