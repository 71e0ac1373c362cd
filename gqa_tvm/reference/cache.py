"""Which positions a cache holds, and what one step writes to it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gqa_tvm.reference.lengths import Array, Lengths, retained_length


class CacheLayout(NamedTuple):
    """capacity rows of present; window is None for a cache that keeps every position."""

    capacity: int
    window: int | None = None

    def first_position(self, total: int) -> int:
        """The position in row 0 after `total` tokens; the later ones up to total - 1 follow it."""
        if self.window is None:
            return 0
        return total - retained_length(total, self.capacity, self.window)


class History(NamedTuple):
    """What the queries of one entry may read: rows [N_kv, n, HP] of positions first, first + 1, ...

    The rows kept before the step and then its own, also those the step drops from the cache.
    """

    first: int
    rows: Array


def cache_layout(past: Array | None, total: int, sliding_window: bool, window: int) -> CacheLayout:
    """Raises ValueError for a sliding window cache without past or of fewer rows than its window."""
    capacity = 0 if past is None else past.shape[2]
    if not sliding_window:
        return CacheLayout(max(total, capacity))
    if not 1 <= window <= capacity:
        raise ValueError(f"a sliding window cache of {capacity} rows for local_window_size {window}")
    return CacheLayout(capacity, window)


def write_cache(
    past: Array | None, new: Array, lengths: Lengths, layout: CacheLayout, in_place: bool
) -> tuple[Array, list[History]]:
    """present [B, N_kv, layout.capacity, HP] after the rows of new [B, N_kv, S or 0, HP], and each
    entry's history.

    new has the cache's dtype. past holds what the layout says of lengths.cached tokens. Rows of
    present without a position are 0, or keep past's bytes with in_place. ValueError where past has
    fewer rows, or in place another shape.
    """
    batch, kv_heads, _, columns = new.shape
    if past is None:
        past = np.zeros((batch, kv_heads, 0, columns), new.dtype)
    present = np.zeros((batch, kv_heads, layout.capacity, columns), past.dtype)
    if in_place:
        if past.shape != present.shape:
            raise ValueError(f"in place needs past of shape {present.shape}, got {past.shape}")
        present[...] = past
    histories = []
    for b, (cached, appended) in enumerate(zip(lengths.cached, lengths.appended, strict=True)):
        first = layout.first_position(int(cached))
        if cached - first > past.shape[2]:
            raise ValueError(f"past must hold {cached - first} rows of entry {b}, got {past.shape[2]}")
        rows = np.concatenate([past[b, :, : cached - first], new[b, :, :appended]], axis=1)
        kept = rows[:, layout.first_position(int(cached + appended)) - first :]
        present[b, :, : kept.shape[1]] = kept
        histories.append(History(first, rows))
    return present, histories
