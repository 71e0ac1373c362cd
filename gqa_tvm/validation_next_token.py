"""The short way through validation for a decode loop: only what changes between steps of one signature is checked."""

from __future__ import annotations

import math

import numpy as np

from gqa_tvm.attributes import Attributes
from gqa_tvm.validation import Phase, Problem
from gqa_tvm.validation_types import Inputs


def next_token(attributes: Attributes, inputs: Inputs, known: Problem) -> Problem | None:
    """The problem of a call with the signature of the valid call `known`; None where `validate` has to decide.

    Two calls of one signature have the same arrays present, with equal shapes and dtypes. Covers token generation in a
    cache of fixed capacity, at default rotary positions; whatever is wrong with a call is left for `validate` to say.
    """
    if known.phase is not Phase.TOKEN_GENERATION or known.sliding_window or inputs.position_ids is not None:
        return None
    total = inputs.total_sequence_length.item()
    if not 1 < total <= known.past_capacity:
        return None
    cos_cache, bias = inputs.cos_cache, inputs.attention_bias
    if (cos_cache is not None and cos_cache.shape[0] < total) or (bias is not None and bias.shape[3] != total):
        return None
    past_lengths = np.array(inputs.seqlens_k, order="C").reshape(-1)
    for past in past_lengths.tolist():
        if not 0 <= past < total:
            return None
    if attributes.is_quantized and not (_is_finite(inputs.k_scale) and _is_finite(inputs.v_scale)):
        return None
    positions = None if known.positions is None else past_lengths.astype(np.int64).reshape(-1, 1)
    return Problem._make((*known[:_FIRST_CHANGING], total, past_lengths, past_lengths + 1, positions))


_FIRST_CHANGING = Problem._fields.index("total_sequence_length")


def _is_finite(scale: np.ndarray | None) -> bool:
    """Whether a scale is finite for certain; one large enough to overflow when squared may be called infinite."""
    if scale is None:
        return False
    if scale.size == 1:
        return math.isfinite(scale.item())
    flat = scale.reshape(-1)
    return math.isfinite(flat.dot(flat))
