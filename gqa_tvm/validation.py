"""What a call means: every rule of ONNX Runtime's validation, in its order, and the result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gqa_tvm.attributes import Attributes
from gqa_tvm.errors import InvalidArgument
from gqa_tvm.validation_shapes import (
    Shapes,
    check_bias_shape,
    check_head_sink_shape,
    check_position_ids_shape,
    check_rotary_columns,
    check_rotary_pair,
    check_scale_sizes,
    read_shapes,
)
from gqa_tvm.validation_types import Inputs, check_cache_dtype, check_dtypes, check_presence

__all__ = ["Inputs", "Phase", "Problem", "validate"]


class Phase(str, Enum):
    """Where the new tokens stand relative to the cache."""

    FIRST_PROMPT = "first_prompt"  # S == T: positions start at 0, past content is ignored
    TOKEN_GENERATION = "token_generation"  # S == 1, T > 1: batch entries may differ in length
    CHUNK = "chunk"  # 1 < S < T, one batch entry


@dataclass(frozen=True, eq=False)
class Problem:
    """A valid call. Arrays are C-contiguous, aligned and share no memory with the inputs."""

    phase: Phase
    batch_size: int  # B
    sequence_length: int  # S
    kv_sequence_length: int  # S, or 0 when the cache already holds the keys (shared KV)
    num_heads: int  # N
    kv_num_heads: int  # N_kv
    head_size: int  # H
    packed_head_size: int  # last dimension of the cache: H, or (H + 1) // 2 for INT4
    past_capacity: int  # C, 0 without past
    present_length: int  # max(T, C)
    total_sequence_length: int  # T
    past_lengths: np.ndarray  # int32 [B]: absolute position of query row 0
    total_lengths: np.ndarray  # int32 [B]: keys an entry may see
    rotary_dim: int  # R, 0 without rotation
    positions: np.ndarray | None  # int64 [B, S], None without rotation
    packed_qkv: bool

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.kv_num_heads


def validate(attributes: Attributes, inputs: Inputs) -> Problem:
    """Check a call and return what it means; the first broken rule in ORT's order wins.

    Reads the values of seqlens_k, total_sequence_length, position_ids and the scales, writes
    nothing. Raises InvalidArgument.
    """
    check_dtypes(inputs)
    check_presence(attributes, inputs)
    shapes = read_shapes(attributes, inputs)
    length = shapes.sequence_length
    total = _read_total(inputs.total_sequence_length, shapes)
    seqlens = np.array(inputs.seqlens_k, order="C").reshape(-1)  # int32 [B]
    lowest, highest = _extremes(seqlens)
    rotary = check_rotary_pair(inputs)
    if rotary is not None:
        _check_rotary_rows(rotary[0], total)
        check_rotary_columns(rotary[1], shapes.head_size)
        if lowest < 0 or highest >= rotary[0]:
            raise InvalidArgument(_seqlens_over_rotary_text(rotary[0], seqlens))
    phase = _read_phase(shapes, total)
    _check_optional_inputs(attributes, inputs, shapes, total)
    if lowest < 0 or highest >= total or (phase is Phase.CHUNK and highest + 1 < length):
        raise InvalidArgument(_seqlens_text(shapes, total, seqlens))
    past_lengths = np.zeros_like(seqlens) if phase is Phase.FIRST_PROMPT else seqlens + (1 - length)
    positions = None
    if attributes.use_rotary:
        positions = _read_positions(inputs.position_ids, rotary, phase, shapes, past_lengths)
    check_cache_dtype(attributes, inputs.past_key)
    return Problem(
        phase=phase,
        batch_size=shapes.batch_size,
        sequence_length=length,
        kv_sequence_length=shapes.kv_sequence_length,
        num_heads=attributes.num_heads,
        kv_num_heads=attributes.kv_num_heads,
        head_size=shapes.head_size,
        packed_head_size=shapes.packed_head_size,
        past_capacity=shapes.past_capacity,
        present_length=max(total, shapes.past_capacity),
        total_sequence_length=total,
        past_lengths=past_lengths,
        total_lengths=seqlens + 1,
        rotary_dim=0 if positions is None or rotary is None else 2 * rotary[1],
        positions=positions,
        packed_qkv=inputs.key is None,
    )


def _check_optional_inputs(attributes: Attributes, inputs: Inputs, shapes: Shapes, total: int) -> None:
    check_position_ids_shape(inputs.position_ids, shapes)
    check_bias_shape(attributes, inputs.attention_bias, shapes)
    _check_bias_columns(inputs.attention_bias, total)
    check_head_sink_shape(attributes, inputs.head_sink)
    if attributes.is_quantized:
        check_scale_sizes(attributes, inputs, shapes.head_size)
        _check_scales_finite(inputs)


def _read_total(total_sequence_length: np.ndarray, shapes: Shapes) -> int:
    """Return T, which the cache's capacity and the new tokens must allow."""
    total = int(total_sequence_length.item())
    kv_length, capacity = shapes.kv_sequence_length, shapes.past_capacity
    if total <= 0:
        raise InvalidArgument(f"total_sequence_length must be positive, got {total}.")
    if total < kv_length:
        raise InvalidArgument(
            "total_sequence_length must be at least kv_sequence_length for a non-sliding cache. "
            f"Got {total} and {kv_length}."
        )
    if total > capacity and total != capacity + kv_length:
        raise InvalidArgument(
            "total_sequence_length must equal past_sequence_length + kv_sequence_length for a "
            "dynamic cache, or be no greater than past_sequence_length for a static cache. Got "
            f"total_sequence_length={total}, past_sequence_length={capacity}, "
            f"kv_sequence_length={kv_length}."
        )
    return total


def _read_phase(shapes: Shapes, total: int) -> Phase:
    length = shapes.sequence_length
    if length == total:
        return Phase.FIRST_PROMPT
    if length == 1:
        return Phase.TOKEN_GENERATION
    if length == 0:
        raise InvalidArgument("sequence_length shall be 1 when it is not prompt. Got 0.")
    if shapes.batch_size != 1:
        raise InvalidArgument(
            "batch_size must be 1 when sequence_length > 1 and past context is given. "
            f"Got batch_size={shapes.batch_size}, sequence_length={length}."
        )
    return Phase.CHUNK


def _check_rotary_rows(rows: int, total: int) -> None:
    if rows < total:
        raise InvalidArgument(
            f"cos_cache dimension 0 shall not be less than total_sequence_length. Got {rows} and {total}."
        )


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


def _seqlens_over_rotary_text(rows: int, seqlens: np.ndarray) -> str:
    index = _first_outside(seqlens, rows)
    return f"seqlens_k[{index}] = {seqlens[index]} is out of range for rotary cache dimension 0 ({rows})"


def _seqlens_text(shapes: Shapes, total: int, seqlens: np.ndarray) -> str:
    """Name the rule that is broken: inside the present buffer, at least S, at most T."""
    present = max(total, shapes.past_capacity)
    index = _first_outside(seqlens, present)
    if index < seqlens.size:
        return f"seqlens_k[{index}] = {seqlens[index]} is out of range [0, {present})"
    index = _first_outside(seqlens, total)
    if index < seqlens.size:
        came = int(seqlens[index]) + 1
        return f"seqlens_k[{index}] + 1 = {came} exceeds total_sequence_length ({total})."
    length = shapes.sequence_length
    return f"seqlens_k[0] = {seqlens[0]} is too small for sequence_length {length}"


def _read_positions(
    position_ids: np.ndarray | None,
    rotary: tuple[int, int] | None,
    phase: Phase,
    shapes: Shapes,
    past_lengths: np.ndarray,
) -> np.ndarray | None:
    """Return the int64 [B, S] rotary positions, None when the tables have no columns."""
    if rotary is None:
        raise InvalidArgument("cos_cache and sin_cache must be provided when do_rotary is true")
    rows, columns = rotary
    batch, length = shapes.batch_size, shapes.sequence_length
    if position_ids is None:
        positions = past_lengths[:, None] + np.arange(length, dtype=np.int64)
    elif phase is Phase.FIRST_PROMPT:
        base = int(position_ids[0, 0])
        if base < 0 or base + length > rows:
            raise InvalidArgument(
                f"position_ids base value {base} with sequence_length {length} exceeds cos/sin cache range [0, {rows})"
            )
        positions = np.tile(np.arange(base, base + length, dtype=np.int64), (batch, 1))
    else:
        positions = np.array(position_ids[:, :length], order="C")
        lowest, highest = _extremes(positions)
        if lowest < 0 or highest >= rows:
            flat = positions.reshape(-1)
            index = _first_outside(flat, rows)
            raise InvalidArgument(f"position_ids value {flat[index]} at index {index} is out of range [0, {rows})")
    return positions if columns else None


def _extremes(values: np.ndarray) -> tuple[int, int]:
    if values.size == 1:
        value = int(values.item())
        return value, value
    return int(values.min()), int(values.max())


def _first_outside(values: np.ndarray, bound: int) -> int:
    """Return the index of the first value outside [0, bound), values.size when all are inside."""
    inside = np.append((values >= 0) & (values < bound), False)
    return int(np.argmin(inside))
