"""Rotary positions: the defaults, or position_ids checked against the tables' rows."""

from __future__ import annotations

import numpy as np

from gqa_tvm.errors import InvalidArgument
from gqa_tvm.validation_lengths import Phase, extremes


def read_positions(
    position_ids: np.ndarray | None,
    rotary: tuple[int, int] | None,
    phase: Phase,
    length: int,
    past_lengths: np.ndarray,
    query_lengths: np.ndarray,
) -> np.ndarray | None:
    """Return int64 [B, S] positions, 0 for rows of padding; None when the tables have no columns.

    position_ids: int64 [B, at least S]; rotary: [M, R / 2] of the tables. Raises InvalidArgument.
    """
    if rotary is None:
        raise InvalidArgument("cos_cache and sin_cache must be provided when do_rotary is true")
    rows, columns = rotary
    if phase is Phase.FIRST_PROMPT:
        positions = _prompt_positions(position_ids, rows, len(past_lengths), length)
    elif position_ids is None:
        positions = past_lengths[:, None] + np.arange(length, dtype=np.int64)
    else:
        positions = np.array(position_ids[:, :length], order="C")
    if phase is Phase.PADDED_CHUNK:
        positions[np.arange(length) >= query_lengths[:, None]] = 0
    if position_ids is not None and phase is not Phase.FIRST_PROMPT:
        _check_positions(positions, rows, phase)
    return positions if columns else None


def _prompt_positions(position_ids: np.ndarray | None, rows: int, batch: int, length: int) -> np.ndarray:
    """Consecutive positions, the same for every entry: from the very first of position_ids on, or from 0."""
    base = 0 if position_ids is None else int(position_ids[0, 0])
    if base < 0 or base + length > rows:
        raise InvalidArgument(
            f"position_ids base value {base} with sequence_length {length} exceeds cos/sin cache range [0, {rows})"
        )
    return np.tile(np.arange(base, base + length, dtype=np.int64), (batch, 1))


def _check_positions(positions: np.ndarray, rows: int, phase: Phase) -> None:
    lowest, highest = extremes(positions)
    if lowest >= 0 and highest < rows:
        return
    flat = positions.reshape(-1)
    index = int(np.argmax((flat < 0) | (flat >= rows)))
    text = f"position_ids value {flat[index]} at index"
    if phase is Phase.PADDED_CHUNK:
        entry, row = divmod(index, positions.shape[1])
        raise InvalidArgument(f"{text} {row} is out of range [0, {rows}) in batch entry {entry}")
    raise InvalidArgument(f"{text} {index} is out of range [0, {rows})")
