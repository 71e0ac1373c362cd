"""Encoding and decoding of cache elements.

A cache row is stored as C elements of E planes each: float and int8 rows have one plane, an int4 row packs the even
channels in the low nibbles (plane 0) and the odd ones in the high nibbles (plane 1) of its bytes. Kernels keep the two
planes apart, [.., plane, column], so that a vector of bytes decodes into two vectors without a shuffle.
"""

from __future__ import annotations

from tvm import te, tirx
from tvm.tirx import op as tirx_op

from .half import STORAGE_DTYPES, widen

CACHE_DTYPES = {**STORAGE_DTYPES, "i8": "int8", "i4": "uint8"}
CACHE_PLANES = {"f32": 1, "f16": 1, "bf16": 1, "i8": 1, "i4": 2}
_CODE_RANGE = {"i8": (-128.0, 127.0), "i4": (-8.0, 7.0)}
_NIBBLE_OFFSET = 8
# 2^23 as float32 bits: an integer below 2^23 put into the mantissa reads as 2^23 + itself.
_TWO_POW_23_BITS = 0x4B000000
_TWO_POW_23 = 8388608.0


def inverse_scale(scale):
    """1 / scale in float32, 1 where the scale is 0 (ORT multiplies by the reciprocal, it does not divide)."""
    one = tirx.const(1.0, "float32")
    return tirx.Select(scale == tirx.const(0.0, "float32"), one, one / scale)


def encode(x, inverse, cache: str):
    """clamp(rint(x * inverse)) as int32; rint rounds halves to even; NaN becomes the largest code."""
    low, high = (tirx.const(bound, "float32") for bound in _CODE_RANGE[cache])
    rounded = tirx_op.round(x * inverse)
    # Both comparisons are false for NaN, which ends at `high`.
    at_least_low = tirx.Select(rounded < low, low, rounded)
    return tirx.Cast("int32", tirx.Select(at_least_low < high, at_least_low, high))


def pack_nibbles(even, odd):
    """The byte of two int4 codes (int32): even channel low, each stored as code + 8."""
    offset = tirx.const(_NIBBLE_OFFSET, "int32")
    four = tirx.const(4, "int32")
    return tirx.Cast("uint8", (even + offset) | ((odd + offset) << four))


def decode(element, plane, cache: str):
    """A stored element's value in `plane`, without its scale, as float32."""
    if cache in STORAGE_DTYPES:
        return widen(element, cache)
    if cache == "i8":
        return tirx.Cast("float32", element)
    shift = tirx.Cast("int32", plane) * tirx.const(4, "int32")
    nibble = (tirx.Cast("int32", element) >> shift) & tirx.const(15, "int32")
    # Exact, and one instruction less than converting the integer and subtracting 8.
    biased = tirx.reinterpret("float32", nibble | tirx.const(_TWO_POW_23_BITS, "int32"))
    return biased - tirx.const(_TWO_POW_23 + _NIBBLE_OFFSET, "float32")


def kv_dequantize(cache_rows, last_row, columns: int, cache: str, name: str):
    """Rows of a cache as float32 codes; rows past the last valid one repeat it, padding columns are 0.

    cache_rows: [T_block, C] of the cache's dtype; last_row: int32, index of the last row that may be read.
    Returns [T_block, E, columns] float32, columns >= C.
    """
    rows, stored = cache_rows.shape

    def value(t, plane, column):
        row = tirx.min(tirx.Cast("int64", t), tirx.Cast("int64", last_row))
        if columns == int(stored):
            return decode(cache_rows[row, column], plane, cache)
        inside = decode(cache_rows[row, tirx.min(column, int(stored) - 1)], plane, cache)
        # Not a Select of the loaded value: TVM would find the clamp superfluous there, and yet load without it.
        mask = tirx.Select(column < int(stored), tirx.const(-1, "int32"), tirx.const(0, "int32"))
        return tirx.reinterpret("float32", tirx.reinterpret("int32", inside) & mask)

    return te.compute((rows, CACHE_PLANES[cache], columns), value, name=name)
