"""Rotary position embedding of one pair, bit for bit as ONNX Runtime computes it."""

from __future__ import annotations

from tvm import tirx


def _fma(a, b, c):
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", a, b, c)


def rotate_pair(first, second, cos, sin):
    """(first + i second) * (cos + i sin) in float32 with one rounding per fused step.

    re = fma(first, cos, -(second * sin)), im = fma(first, sin, second * cos). The fused multiply-adds are spelled out:
    cache bytes must not depend on how a compiler contracts the expression.
    """
    return _fma(first, cos, -(second * sin)), _fma(first, sin, second * cos)
