"""The layout of a sliding window cache (sliding_window_cache=1): what it holds after a number of tokens.

After T tokens of an entry, rows [0, L) of a cache of capacity C and window W hold the last L positions in order:
L(T) = T for T <= C, else T - G ceil((T - C) / G) with G = C - W + 1. A full cache drops G positions at once, so that
rows move once every G tokens. L depends on T alone, not on how the tokens came.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

Lengths = TypeVar("Lengths", int, np.ndarray)


def retained_length(total: Lengths, capacity: int, window: int) -> Lengths:
    """L: positions that a cache of `capacity` rows holds after `total` tokens, of which the last `window` always.

    total: one length or an integer array of lengths.
    """
    dropped_at_once = capacity - window + 1
    over = np.maximum(total - capacity, 0) if isinstance(total, np.ndarray) else max(total - capacity, 0)
    return total - dropped_at_once * -(-over // dropped_at_once)


def can_rewind(total: int, dropped: int, capacity: int, window: int) -> bool:
    """Whether the last `dropped` of `total` tokens can be taken back by calling with the smaller length.

    True when the shorter sequence's layout is what the cache holds without its last rows; otherwise positions that the
    shorter layout needs are gone, and the window has to be computed again.
    """
    shorter = retained_length(total - dropped, capacity, window)
    return shorter == retained_length(total, capacity, window) - dropped
