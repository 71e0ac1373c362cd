"""Masks, scores, softmax: attention over the rows of each entry, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gqa_tvm.reference.cache import History
from gqa_tvm.reference.lengths import Array, Lengths


class ScoreRules(NamedTuple):
    """What turns dot products into scores; bias [B, N, S, T] and sink [N] may be absent."""

    scale: float
    softcap: float
    causal: bool
    window: int
    bias: Array | None
    sink: Array | None


def attend(
    queries: Array,
    keys: Sequence[History],
    values: Sequence[History],
    lengths: Lengths,
    total: int,
    rules: ScoreRules,
    qk_output: int = 0,
) -> tuple[Array, Array | None]:
    """Attention of queries [B, S, N, H] over each entry's keys and values [N_kv, n, H], in float64.

    Returns output [B, S, N*H] and output_qk [B, N, S, T]: scores (1), weights (2) or None (0), whose
    columns are positions. Keys a row does not see are not read and are 0 in output_qk; a row that
    sees no key, or only keys of score -inf, has output 0, and so has padding. NaN and infinite
    values a row does see make NaN even with weight 0, unless all its weights are 0.
    """
    batch, new_tokens, heads, head_size = queries.shape
    kv_heads = keys[0].rows.shape[0]
    queries = queries.astype(np.float64).reshape(batch, new_tokens, kv_heads, -1, head_size)
    output = np.zeros(queries.shape)
    output_qk = np.zeros((batch, heads, new_tokens, total)) if qk_output else None
    for b in range(batch):
        entry_keys, entry_values = (side[b].rows.astype(np.float64) for side in (keys, values))
        for s in range(lengths.counts[b]):
            seen = visible_keys(s, int(lengths.pasts[b]), int(lengths.totals[b]), rules.causal, rules.window)
            if seen.start == seen.stop:
                continue
            rows = slice(seen.start - keys[b].first, seen.stop - keys[b].first)
            dots = queries[b, s] @ entry_keys[:, rows].swapaxes(1, 2)
            bias = 0.0 if rules.bias is None else rules.bias[b, :, s, seen].astype(np.float64)
            scores = process_scores(dots.reshape(heads, -1), rules, bias)
            weights = softmax(scores, rules.sink)
            weights[np.isneginf(scores).all(axis=-1)] = 0.0
            weighted = weights.reshape(dots.shape)
            has_weight = weighted.any(axis=-1, keepdims=True)
            output[b, s] = np.where(has_weight, weighted @ entry_values[:, rows], 0.0)
            if output_qk is not None:
                output_qk[b, :, s, seen] = scores if qk_output == 1 else weights
    return output.reshape(batch, new_tokens, heads * head_size), output_qk


def visible_keys(row: int, past: int, total: int, causal: bool, window: int) -> slice:
    """The keys token `row` sees; prompt padding (past + row >= total) sees what the entry holds.

    Raises ValueError for a window of 0, below -1, or without causal.
    """
    if window == 0 or window < -1 or (window > 0 and not causal):
        raise ValueError(f"local_window_size {window} with causal {causal}")
    end = min(past + row + 1, total) if causal else total
    start = past + row + 1 - window if window > 0 else 0
    return slice(min(max(start, 0), end), end)


def process_scores(dots: Array, rules: ScoreRules, bias: Array | float) -> Array:
    """Scale, softcap, bias, in this order, on dot products of any shape."""
    scores = dots * rules.scale
    if rules.softcap > 0:
        scores = rules.softcap * np.tanh(scores / rules.softcap)
    return scores + bias


def softmax(scores: Array, sink: Array | None = None) -> Array:
    """Softmax over the last axis of scores [..., keys]; sink [...] joins the denominator.

    Rows of -inf alone and rows without keys give zeros.
    """
    top = scores.max(axis=-1, initial=-np.inf, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink[..., None])
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(scores - top)
    denominator: Array = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        denominator = denominator + np.exp(sink[..., None] - top)
    result: Array = weights / np.where(denominator == 0, 1.0, denominator)
    return result
