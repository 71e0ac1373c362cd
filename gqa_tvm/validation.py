"""What a call means: every rule of ONNX Runtime's validation, in its order, and the result."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gqa_tvm.attributes import Attributes
from gqa_tvm.errors import InvalidArgument
from gqa_tvm.validation_lengths import (
    Phase,
    check_result_sizes,
    check_seqlens_range,
    extremes,
    read_phase,
    read_query_lengths,
    read_total,
)
from gqa_tvm.validation_positions import read_positions
from gqa_tvm.validation_shapes import (
    Shapes,
    check_bias_shape,
    check_head_sink_shape,
    check_norm_weight_shapes,
    check_position_ids_shape,
    check_rotary_columns,
    check_rotary_pair,
    check_scale_sizes,
    read_shapes,
)
from gqa_tvm.validation_types import Inputs, check_dtypes, check_presence, read_cache_dtype

__all__ = ["Inputs", "Phase", "Problem", "validate"]


class Problem(NamedTuple):
    """A valid call. Arrays are C-contiguous, aligned and share no memory with the inputs."""

    phase: Phase
    batch_size: int  # B
    sequence_length: int  # S
    kv_sequence_length: int  # S, or 0 when the cache already holds the keys (shared KV)
    num_heads: int  # N
    kv_num_heads: int  # N_kv
    head_size: int  # H
    packed_head_size: int  # last dimension of the cache: H, or (H + 1) // 2 for INT4
    query_dtype: np.dtype  # float32, float16 or bfloat16: of every float input but the scales, and of the output
    cache_dtype: np.dtype  # of past and present
    sliding_window: bool  # the cache holds the last keys of the sequence, from row 0 on
    past_capacity: int  # C, 0 without past
    present_length: int  # max(T, C), C with a sliding window
    query_lengths: np.ndarray  # int32 [B]: tokens that are no padding
    rotary_dim: int  # R, 0 without rotation
    packed_qkv: bool
    total_sequence_length: int  # T
    past_lengths: np.ndarray  # int32 [B]: absolute position of query row 0
    total_lengths: np.ndarray  # int32 [B]: keys of the sequence after the step, T_b
    positions: np.ndarray | None  # int64 [B, S], None without rotation; 0 for rows of padding

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.kv_num_heads


def validate(attributes: Attributes, inputs: Inputs) -> Problem:
    """Check a call and return what it means; the first broken rule in ORT's order wins.

    Reads the values of seqlens_k, total_sequence_length, query_seqlens, position_ids and the scales, writes
    nothing. Raises InvalidArgument.
    """
    check_dtypes(inputs)
    check_presence(attributes, inputs)
    shapes = read_shapes(attributes, inputs)
    length, windowed = shapes.sequence_length, attributes.use_sliding_window
    total = read_total(attributes, inputs, shapes)
    seqlens = np.array(inputs.seqlens_k, order="C").reshape(-1)  # int32 [B]
    span = extremes(seqlens)
    rotary = check_rotary_pair(inputs)
    if rotary is not None:
        _check_rotary_rows(rotary[0], total)
        check_rotary_columns(rotary[1], shapes.head_size)
        if span[0] < 0 or span[1] >= rotary[0]:
            raise InvalidArgument(_seqlens_over_rotary_text(rotary[0], seqlens))
    query_lengths = read_query_lengths(attributes, inputs, shapes, total, seqlens)
    phase = read_phase(inputs, shapes, total)
    _check_optional_inputs(attributes, inputs, shapes, total)
    check_seqlens_range(attributes, inputs, shapes, total, phase, seqlens, span)
    total_lengths = seqlens + 1
    past_lengths = _past_lengths(phase, windowed, total_lengths, query_lengths)
    positions = None
    if attributes.use_rotary:
        positions = read_positions(inputs.position_ids, rotary, phase, length, past_lengths, query_lengths)
    cache_dtype = read_cache_dtype(attributes, inputs)
    present_length = shapes.past_capacity if windowed else max(total, shapes.past_capacity)
    check_result_sizes(attributes, inputs, shapes, total, present_length, cache_dtype.itemsize)
    return Problem(
        phase=phase,
        batch_size=shapes.batch_size,
        sequence_length=length,
        kv_sequence_length=shapes.kv_sequence_length,
        num_heads=attributes.num_heads,
        kv_num_heads=attributes.kv_num_heads,
        head_size=shapes.head_size,
        packed_head_size=shapes.packed_head_size,
        query_dtype=inputs.query.dtype,
        cache_dtype=cache_dtype,
        sliding_window=windowed,
        past_capacity=shapes.past_capacity,
        present_length=present_length,
        query_lengths=query_lengths,
        rotary_dim=0 if positions is None or rotary is None else 2 * rotary[1],
        packed_qkv=inputs.key is None,
        total_sequence_length=total,
        past_lengths=past_lengths,
        total_lengths=total_lengths,
        positions=positions,
    )


def _past_lengths(phase: Phase, windowed: bool, total_lengths: np.ndarray, query_lengths: np.ndarray) -> np.ndarray:
    # A ragged first prompt starts at 0 too: its padding is to the right.
    if phase is Phase.FIRST_PROMPT and not windowed:
        return np.zeros_like(total_lengths)
    return total_lengths - query_lengths


def _check_optional_inputs(attributes: Attributes, inputs: Inputs, shapes: Shapes, total: int) -> None:
    check_position_ids_shape(inputs.position_ids, shapes)
    check_bias_shape(attributes, inputs.attention_bias, shapes)
    _check_bias_columns(inputs.attention_bias, total)
    check_head_sink_shape(attributes, inputs.head_sink)
    if inputs.q_norm_weight is not None:
        check_norm_weight_shapes(inputs, shapes.head_size)
    if attributes.is_quantized:
        check_scale_sizes(attributes, inputs, shapes.head_size)
        _check_scales_finite(inputs)


def _check_rotary_rows(rows: int, total: int) -> None:
    if rows < total:
        raise InvalidArgument(
            f"cos_cache dimension 0 shall not be less than total_sequence_length. Got {rows} and {total}."
        )


def _seqlens_over_rotary_text(rows: int, seqlens: np.ndarray) -> str:
    index = int(np.argmax((seqlens < 0) | (seqlens >= rows)))
    return f"seqlens_k[{index}] = {seqlens[index]} is out of range for rotary cache dimension 0 ({rows})"


def _check_bias_columns(bias: np.ndarray | None, total: int) -> None:
    if bias is not None and bias.shape[3] != total:
        raise InvalidArgument(
            "attention_bias dimension 3 must be equal to total_sequence_length, got "
            f"{bias.shape[3]} with total_sequence_length {total}."
        )


def _check_scales_finite(inputs: Inputs) -> None:
    for name, scale in (("k_scale", inputs.k_scale), ("v_scale", inputs.v_scale)):
        if scale is None:
            continue
        finite = math.isfinite(scale.item()) if scale.size == 1 else np.isfinite(scale).all()
        if not finite:
            flat = np.asarray(scale).reshape(-1)
            index = int(np.flatnonzero(~np.isfinite(flat))[0])
            raise InvalidArgument(f"{name} must be finite, got {flat[index]} at index {index}.")
