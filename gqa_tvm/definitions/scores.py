"""Score processing, in ONNX Runtime's order: (scale) -> softcap -> attention_bias -> mask. One expression each."""

from __future__ import annotations

from tvm import tirx

from .exponential import BITS_PER_NAT, exp2_nonpositive


def masked_score():
    """What a masked score is: exp of it is 0, and it never wins a maximum."""
    return tirx.const(float("-inf"), "float32")


# Cephes tanhf: tanh x = x + x^3 P(x^2) for |x| < 0.625.
_TANH_COEFFICIENTS = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_TANH_SMALL = 0.625


def softcap(score, cap):
    """cap * tanh(score / cap): odd, exact at 0, saturating without overflow.

    tanh by a polynomial near 0, where (1 - e) / (1 + e) with e = exp(-2|x|) would cancel, and by that form beyond.
    """
    x, decay, square, magnitude = (tirx.Var(name, "float32") for name in ("x", "decay", "square", "magnitude"))
    one, zero = tirx.const(1.0, "float32"), tirx.const(0.0, "float32")
    polynomial = tirx.const(_TANH_COEFFICIENTS[0], "float32")
    for coefficient in _TANH_COEFFICIENTS[1:]:
        polynomial = polynomial * square + tirx.const(coefficient, "float32")
    small = x + x * square * polynomial
    large = tirx.Select(x < zero, zero - magnitude, magnitude)
    is_small = tirx.abs(x) < tirx.const(_TANH_SMALL, "float32")
    capped = cap * tirx.Select(is_small, small, large)
    capped = tirx.Let(magnitude, (one - decay) / (one + decay), capped)
    exponential = exp2_nonpositive(tirx.abs(x) * tirx.const(-2.0 * BITS_PER_NAT, "float32"))
    capped = tirx.Let(square, x * x, tirx.Let(decay, exponential, capped))
    return tirx.Let(x, score / cap, capped)


def add_bias(score, bias):
    """One float32 addition, as ORT does it."""
    return score + bias


def mask(score, key, first_key, end_key):
    """The score where first_key <= key < end_key (the keys the row sees), else a masked score, whatever it held."""
    visible = tirx.all(key >= first_key, key < end_key)
    return tirx.Select(visible, score, masked_score())
