"""exp as a polynomial that vectorises (LLVM would call expf lane by lane)."""

from __future__ import annotations

from tvm import tirx

# Cephes expf: e^x = 2^n * e^r with n = round(x / ln 2), |r| <= ln 2 / 2; ln 2 in two parts so that x - n ln 2 is exact.
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# Below this n is -127, whose exponent field is that of zero.
_SMALLEST = -88.02
# Added to a number of small magnitude: rounds it to an integer, which the lowest bits of the sum hold plus the bias of
# exponents.
_ROUNDING = 1.5 * 2.0**23 + 127.0
_MANTISSA_BITS = 23


def exp_nonpositive(x):
    """e^x for float32 x <= 0, at most 2 ulp off; 0 below -87.7 (and for -inf), NaN for NaN.

    Results below 2^-126 have the accuracy of subnormal numbers.
    """
    f32 = lambda value: tirx.const(value, "float32")  # noqa: E731 - a typed literal
    score, clamped, rounded, n, r = (tirx.Var(name, "float32") for name in ("score", "clamped", "rounded", "n", "r"))
    polynomial = f32(_COEFFICIENTS[0])
    for coefficient in (*_COEFFICIENTS[1:], 1.0, 1.0):
        polynomial = polynomial * r + f32(coefficient)
    power = tirx.reinterpret("float32", tirx.reinterpret("int32", rounded) << tirx.const(_MANTISSA_BITS, "int32"))
    # Bound by name: passes walk expressions as trees, and a shared node would be walked once per use.
    result = tirx.Let(r, clamped - n * f32(_LN2_HIGH) - n * f32(_LN2_LOW), polynomial * power)
    result = tirx.Let(n, rounded - f32(_ROUNDING), result)
    result = tirx.Let(rounded, clamped * f32(_LOG2_E) + f32(_ROUNDING), result)
    # The comparison is false for NaN, which therefore survives the clamp.
    result = tirx.Let(clamped, tirx.Select(score < f32(_SMALLEST), f32(_SMALLEST), score), result)
    return tirx.Let(score, x, result)
