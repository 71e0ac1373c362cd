"""Score processing, in ONNX Runtime's order: (scale) -> softcap -> attention_bias -> mask. One expression each."""

from __future__ import annotations

from tvm import tirx

from .exponential import exp_nonpositive


def masked_score():
    """What a masked score is: exp of it is 0, and it never wins a maximum."""
    return tirx.const(float("-inf"), "float32")


def softcap(score, cap):
    """cap * tanh(score / cap), tanh through exp(-2|x|): odd, exact at 0, saturating without overflow."""
    x, decay, magnitude = (tirx.Var(name, "float32") for name in ("x", "decay", "magnitude"))
    one, zero = tirx.const(1.0, "float32"), tirx.const(0.0, "float32")
    capped = cap * tirx.Select(x < zero, zero - magnitude, magnitude)
    capped = tirx.Let(magnitude, (one - decay) / (one + decay), capped)
    exponential = exp_nonpositive(tirx.abs(x) * tirx.const(-2.0, "float32"))
    return tirx.Let(x, score / cap, tirx.Let(decay, exponential, capped))


def add_bias(score, bias):
    """One float32 addition, as ORT does it."""
    return score + bias


def mask(score, key, first_key, end_key):
    """The score where first_key <= key < end_key (the keys the row sees), else a masked score, whatever it held."""
    visible = tirx.all(key >= first_key, key < end_key)
    return tirx.Select(visible, score, masked_score())
