"""Powers of two as a polynomial that vectorises (LLVM would call exp2f lane by lane).

Scores of the flash kernels are in bits: times log2 e, which their query rows carry, so that the softmax takes powers of
two and the exponent splits into whole and rest without a rounding. Scores as users know them are in nats.
"""

from __future__ import annotations

import math

from tvm import tirx

BITS_PER_NAT = 1.4426950408889634
# Of float32, and what is less than it in bits.
_LARGEST_BITS, _LARGEST_NATS = 3.4028234663852886e38, 2.35e38
# 2^f for |f| <= 1/2 without the leading 1: the least relative error, 2e-9, below what float32 adds.
_COEFFICIENTS = (
    1.5353361959569156e-4,
    1.3398873852565885e-3,
    9.61843691766262e-3,
    5.5503323674201965e-2,
    2.4022647738456726e-1,
    6.931471824645996e-1,
)
# Below this the nearest integer is -127, whose exponent field is that of zero.
_SMALLEST = -126.99
# Added to a number of small magnitude: rounds it to an integer, which the lowest bits of the sum hold plus the bias of
# exponents.
_ROUNDING = 1.5 * 2.0**23 + 127.0
_MANTISSA_BITS = 23


def exp2_nonpositive(x):
    """2^x for float32 x <= 0, at most 1.2 ulp off, 1 with fused multiply-adds; 0 below -126.5, NaN for NaN.

    Results below 2^-126 have the accuracy of subnormal numbers.
    """
    f32 = lambda value: tirx.const(value, "float32")  # noqa: E731 - a typed literal
    exponent, clamped, f = (tirx.Var(name, "float32") for name in ("exponent", "clamped", "f"))
    # As an integer, so that no simplifier takes it for the float that was added to.
    rounded = tirx.Var("rounded", "int32")
    polynomial = f32(_COEFFICIENTS[0])
    for coefficient in (*_COEFFICIENTS[1:], 1.0):
        polynomial = polynomial * f + f32(coefficient)
    power = tirx.reinterpret("float32", rounded << tirx.const(_MANTISSA_BITS, "int32"))
    # Bound by name: passes walk expressions as trees, and a shared node would be walked once per use.
    whole = tirx.reinterpret("float32", rounded) - f32(_ROUNDING)
    result = tirx.Let(f, clamped - whole, polynomial * power)
    result = tirx.Let(rounded, tirx.reinterpret("int32", clamped + f32(_ROUNDING)), result)
    # The comparison is false for NaN, which therefore survives the clamp.
    result = tirx.Let(clamped, tirx.Select(exponent < f32(_SMALLEST), f32(_SMALLEST), exponent), result)
    return tirx.Let(exponent, x, result)


def in_bits(score):
    """A score in nats as one in bits; finite ones that have none become the largest that there is."""
    nats = tirx.Var("nats", "float32")
    infinity, limit, largest = (tirx.const(value, "float32") for value in (math.inf, _LARGEST_NATS, _LARGEST_BITS))
    zero = tirx.const(0.0, "float32")
    large = tirx.Select(nats > zero, largest, zero - largest)
    large = tirx.Select(tirx.abs(nats) == infinity, nats, large)
    bits = tirx.Select(tirx.abs(nats) > limit, large, nats * tirx.const(BITS_PER_NAT, "float32"))
    return tirx.Let(nats, score, bits)
