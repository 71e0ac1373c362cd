"""The exceptions a caller has to know."""

from __future__ import annotations


class InvalidArgument(ValueError):
    """An attribute or input breaks a rule of GroupQueryAttention.

    The text carries ONNX Runtime's wording where it has one, plus what came and what was wanted.
    """


class BuildError(RuntimeError):
    """A kernel is needed that is neither built nor buildable here; the text says what is missing."""
