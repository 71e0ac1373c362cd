"""16-bit floats: widened to float32 where they are read, rounded to nearest even where they are written.

float16 converts through casts, which CPUs have instructions for (`lower_float16_casts` is for those that do not).
bfloat16 is kept as uint16: it is the upper half of a float32.
"""

from __future__ import annotations

from tvm import tirx

STORAGE_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "uint16"}


def _u32(value: int):
    return tirx.const(value, "uint32")


def widen(element, fmt: str):
    """A stored element as float32, exactly."""
    if fmt == "f32":
        return element
    if fmt == "f16":
        return tirx.Cast("float32", element)
    return tirx.reinterpret("float32", tirx.Cast("uint32", element) << _u32(16))


def narrow(x, fmt: str):
    """float32 as it is stored: rounded to nearest even, NaN to NaN."""
    if fmt == "f32":
        return x
    if fmt == "f16":
        return tirx.Cast("float16", x)
    bits = tirx.Var("bits", "uint32")
    # Adding half a unit of the kept part, less one when that part is even, rounds halves to even.
    rounded = bits + _u32(0x7FFF) + ((bits >> _u32(16)) & _u32(1))
    is_nan = (bits & _u32(0x7FFFFFFF)) > _u32(0x7F800000)
    upper = tirx.Select(is_nan, bits | _u32(0x400000), rounded) >> _u32(16)
    return tirx.Let(bits, tirx.reinterpret("uint32", x), tirx.Cast("uint16", upper))


def magnitude_bits(x):
    """The bits of |x| of a float32 as int32: ordered as the magnitudes, NaN above infinity."""
    return tirx.reinterpret("int32", x) & tirx.const(0x7FFFFFFF, "int32")


def float16_to_float32(bits):
    """float32 of float16 bits (uint16) by integer arithmetic, exactly."""
    h, magnitude = (tirx.Var(name, "uint32") for name in ("h", "magnitude"))
    # The exponent field moved to float32's place is too small by 112; multiplying corrects it, for subnormals too.
    scaled = tirx.reinterpret("uint32", tirx.reinterpret("float32", magnitude) * tirx.const(2.0**112, "float32"))
    special = magnitude | _u32(0x7F800000)
    value = tirx.Select(magnitude >= _u32(0x0F800000), special, scaled)
    result = tirx.reinterpret("float32", value | ((h & _u32(0x8000)) << _u32(16)))
    result = tirx.Let(magnitude, (h & _u32(0x7FFF)) << _u32(13), result)
    return tirx.Let(h, tirx.Cast("uint32", bits), result)


def float32_to_float16(x):
    """float16 bits (uint16) of a float32 by integer arithmetic, rounded to nearest even."""
    bits, magnitude = (tirx.Var(name, "uint32") for name in ("bits", "magnitude"))
    nan_or_infinity = tirx.Select(magnitude > _u32(0x7F800000), _u32(0x7E00), _u32(0x7C00))
    # Adding 0.5 leaves a subnormal result's bits, rounded, at the bottom of the mantissa.
    half = tirx.const(0.5, "float32")
    subnormal = tirx.reinterpret("uint32", tirx.reinterpret("float32", magnitude) + half) - _u32(0x3F000000)
    odd = (magnitude >> _u32(13)) & _u32(1)
    rebased = magnitude - _u32((127 - 15) << 23) + _u32(0xFFF) + odd
    normal = rebased >> _u32(13)
    result = tirx.Select(magnitude < _u32(113 << 23), subnormal, normal)
    result = tirx.Select(magnitude >= _u32((127 + 16) << 23), nan_or_infinity, result)
    result = tirx.Cast("uint16", result | ((bits >> _u32(16)) & _u32(0x8000)))
    result = tirx.Let(magnitude, bits & _u32(0x7FFFFFFF), result)
    return tirx.Let(bits, tirx.reinterpret("uint32", x), result)
