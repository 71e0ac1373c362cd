"""How many tokens each entry of a call has, and how many of them a cache keeps."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Count = TypeVar("Count", int, npt.NDArray[Any])


class Lengths(NamedTuple):
    """All int64 [B]. pasts: position of token 0; counts: tokens that count, the others are padding;
    totals: keys of the entry; cached: keys the cache holds before the step; appended: rows it gains.

    is_prompt: S == T without query_seqlens, whose positions count from 0 (or from one id).
    """

    pasts: Array
    counts: Array
    totals: Array
    cached: Array
    appended: Array
    is_prompt: bool


def call_lengths(
    seqlens_k: Array,
    total: int,
    query_seqlens: Array | None,
    new_tokens: int,
    key_tokens: int,
    sliding_window: bool,
) -> Lengths:
    """Lengths of a call of S = new_tokens; key_tokens is 0 when the cache already holds all keys.

    A ragged prompt appends its padding too. Only a sliding window cache without query_seqlens may
    have entries longer than total. ValueError for lengths that do not fit.
    """
    totals = np.asarray(seqlens_k).reshape(-1).astype(np.int64) + 1
    counts: Array = np.full(len(totals), new_tokens)
    if query_seqlens is not None:
        counts = query_seqlens.astype(np.int64)
    is_prompt = new_tokens == total and query_seqlens is None
    pasts = np.zeros_like(totals) if is_prompt and not sliding_window else totals - counts
    is_bounded = query_seqlens is not None or not sliding_window
    if (
        min(pasts.min(), counts.min()) < 0
        or totals.min() < 1
        or counts.max() > new_tokens
        or (is_bounded and totals.max() > total)
    ):
        raise ValueError(f"{pasts} past and {counts} new tokens do not fit total length {total}")
    if key_tokens == 0:
        return Lengths(pasts, counts, totals, totals, np.zeros_like(counts), is_prompt)
    return Lengths(pasts, counts, totals, pasts, counts, is_prompt)


def retained_length(total: Count, capacity: int, window: int) -> Count:
    """Rows a sliding window cache of `capacity` rows holds after `total` tokens: the newest ones.

    A full cache drops capacity - window + 1 rows at once, so min(total, window) <= rows <=
    min(total, capacity). total may be an int or an integer array.
    """
    group = capacity - window + 1
    excess = (total - capacity) * (total > capacity)
    return total - -(-excess // group) * group
