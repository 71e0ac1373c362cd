"""exp as a polynomial that vectorises (LLVM would call expf lane by lane)."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx import op as tirx_op

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
# Below this 2^n would leave the normal range: the result is flushed to zero.
_SMALLEST = -87.336544
_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23


def exp_nonpositive(x):
    """e^x for float32 x <= 0, at most 2 ulp off; 0 below -87.3 (and for -inf), NaN for NaN."""
    f32 = lambda value: tirx.const(value, "float32")  # noqa: E731 - a typed literal
    score, clamped, n, r = (tirx.Var(name, "float32") for name in ("score", "clamped", "n", "r"))
    polynomial = f32(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        polynomial = polynomial * r + f32(coefficient)
    mantissa = polynomial * (r * r) + (r + f32(1.0))
    exponent = tirx.Cast("int32", n) + tirx.const(_EXPONENT_BIAS, "int32")
    power = tirx.reinterpret("float32", exponent << tirx.const(_MANTISSA_BITS, "int32"))
    result = tirx.Select(score < f32(_SMALLEST), f32(0.0), mantissa * power)
    # Bound by name: passes walk expressions as trees, and a shared node would be walked once per use.
    result = tirx.Let(r, clamped - n * f32(_LN2_HIGH) - n * f32(_LN2_LOW), result)
    result = tirx.Let(n, tirx_op.round(clamped * f32(_LOG2_E)), result)
    # The comparison is false for NaN, which therefore survives the clamp.
    result = tirx.Let(clamped, tirx.Select(score < f32(_SMALLEST), f32(_SMALLEST), score), result)
    return tirx.Let(score, x, result)
