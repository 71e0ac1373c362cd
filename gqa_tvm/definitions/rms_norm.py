"""Per-head RMS norm of query and key: x / sqrt(mean(x^2) + epsilon) * weight."""

from __future__ import annotations

from tvm import tirx


def square(x):
    """x^2 of a float32 in float64, where it is exact: the sum over a head does not depend on its order."""
    wide = tirx.Cast("float64", x)
    return wide * wide


def inverse_rms(sum_of_squares, head_size: int, epsilon):
    """float32 of 1 / sqrt(sum / H + epsilon), computed in float64."""
    mean = sum_of_squares / tirx.const(float(head_size), "float64")
    root = tirx.call_llvm_pure_intrin("float64", "llvm.sqrt", mean + tirx.Cast("float64", epsilon))
    return tirx.Cast("float32", tirx.const(1.0, "float64") / root)


def normalise(x, inverse, weight):
    """x * inverse * weight, two float32 products in this order."""
    return (x * inverse) * weight
