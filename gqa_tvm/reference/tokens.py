"""From the operator's token inputs to heads: split, RMS norm, rotary embedding."""

from __future__ import annotations

import numpy as np

from gqa_tvm.reference.lengths import Array, Lengths


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


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """RMS norm of each head of x [B, S, n, H] by weight [H], to float32.

    The mean of the squares is float64, the two products are float32. epsilon counts as a float32
    number, which is what ONNX stores of an attribute.
    """
    squares = np.square(x, dtype=np.float64).sum(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt(squares / x.shape[-1] + float(np.float32(epsilon)))
    normed: Array = x.astype(np.float32) * inverse.astype(np.float32) * weight.astype(np.float32)
    return normed


def rotary_positions(position_ids: Array | None, lengths: Lengths, new_tokens: int) -> Array:
    """The rotary position of each new token, int64 [B, S].

    S == T without query_seqlens counts up from 0 or from one id, also where a sliding window cache
    already holds tokens.
    """
    steps = np.arange(new_tokens)[None]
    if lengths.is_prompt:
        base = 0 if position_ids is None else position_ids[0, 0]
        positions = base + np.repeat(steps, len(lengths.pasts), axis=0)
    elif position_ids is None:
        positions = lengths.pasts[:, None] + steps
    else:
        positions = position_ids[:, :new_tokens]
    # Query padding may carry any id; nothing reads what it is rotated to.
    return np.where(steps < lengths.counts[:, None], positions, 0)


def rotate(x: Array, cos: Array, sin: Array, positions: Array, interleaved: bool) -> Array:
    """Rotary embedding of x [B, S, n, H] by cos/sin [M, R/2] at positions [B, S], to float32; columns
    from R on pass through. Float32 arithmetic, bit for bit ONNX Runtime's. ValueError for a position
    outside [0, M)."""
    if positions.size and not 0 <= positions.min() <= positions.max() < len(cos):
        raise ValueError(f"positions must be in [0, {len(cos)}), got {positions}")
    half = cos.shape[1]
    even, odd = slice(0, half), slice(half, 2 * half)
    if interleaved:
        even, odd = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    rotated = x.astype(np.float32)
    a, b = rotated[..., even], rotated[..., odd]
    c, s = (table.astype(np.float32)[positions][:, :, None] for table in (cos, sin))
    real, imaginary = _fused_multiply_add(a, c, -(b * s)), _fused_multiply_add(a, s, b * c)
    rotated[..., even], rotated[..., odd] = real, imaginary
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
