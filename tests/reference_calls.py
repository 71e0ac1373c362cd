"""Short calls of the NumPy reference for cases worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from gqa_tvm.reference import ReferenceResult, group_query_attention

Array = np.ndarray


def attention(
    query: Array,
    key: Array,
    value: Array,
    past_key: Array | None = None,
    past_value: Array | None = None,
    *,
    totals: list[int] | None = None,
    total: int | None = None,
    **rest: Any,
) -> ReferenceResult:
    """query, key, value as [B, S, heads, H]; a growing cache where no lengths are given."""
    batch, new_tokens, num_heads, _ = query.shape
    past = 0 if past_key is None else past_key.shape[2]
    total = past + key.shape[1] if total is None else total
    lengths = np.full(batch, total) if totals is None else np.array(totals)
    return group_query_attention(
        query.reshape(batch, new_tokens, -1),
        key.reshape(batch, key.shape[1], key.shape[2] * key.shape[3]),
        value.reshape(batch, key.shape[1], key.shape[2] * key.shape[3]),
        past_key,
        past_value,
        (lengths - 1).astype(np.int32),
        np.array([total], np.int32),
        num_heads=num_heads,
        kv_num_heads=key.shape[2],
        **rest,
    )


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def ramp(tokens: int, past: int = 0, head_size: int = 8, **rest: Any) -> Array:
    """Output rows, one number each, of a zero query over values of which row j holds j."""
    numbers = np.arange(past + tokens, dtype=np.float32)
    values = np.tile(numbers[None, None, :, None], (1, 1, 1, head_size))
    zeros, old = np.zeros_like(values), slice(0, past)
    new = np.s_[:, :, past:]
    query, key, value = zeros[new], zeros[new], values[new]
    result = attention(
        query.swapaxes(1, 2),
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        zeros[:, :, old],
        values[:, :, old],
        **rest,
    )
    rows: Array = result.output[0, :, 0]
    return rows
