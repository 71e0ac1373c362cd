"""Codes of a quantised cache, byte for byte ONNX Runtime's."""

from __future__ import annotations

import numpy as np

from gqa_tvm.reference.lengths import Array


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


def head_scales(scale: Array | None, quant_type: str, kv_num_heads: int, head_size: int) -> Array:
    """Scales to broadcast against [B, N_kv, rows, H]; their number matters, not their shape."""
    if quant_type.upper() == "NONE":
        return np.ones(1, np.float32)
    if scale is None:
        raise ValueError(f"{quant_type} needs k_scale and v_scale")
    per_channel = quant_type.upper() == "PER_CHANNEL"
    return scale.reshape((kv_num_heads, 1, head_size) if per_channel else (1, 1, 1))
