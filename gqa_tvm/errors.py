"""The one exception a caller of the operator has to know."""

from __future__ import annotations


class InvalidArgument(ValueError):
    """An attribute or input breaks a rule of GroupQueryAttention.

    The text carries ONNX Runtime's wording where it has one, plus what came and what was wanted.
    """
