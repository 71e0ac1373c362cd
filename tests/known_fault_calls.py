"""Short calls of the operator for the smallest cases of known faults, each compared with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_calls import CACHES, assert_close
from reference_calls import Array, attention

from gqa_tvm import GroupQueryAttention, GroupQueryAttentionResult
from gqa_tvm.attributes import Attributes
from gqa_tvm.reference import quantize

STRATEGIES = ("naive", "flash", "flash_decoding")
# One kernel serves both kinds of scale, so these reach every kernel of a float32 query but the 16-bit caches.
FORMATS = ("f32", "i8-channel", "i4-channel")


def stored(cache: str, kv_heads: int = 1, head_size: int = 8, step: float = 1.0) -> dict[str, Any]:
    """Attributes and scales, all of them `step`, of a cache named as in operator_calls.CACHES."""
    rest = dict(CACHES[cache])
    if rest:
        count = kv_heads * head_size if cache.endswith("channel") else 1
        rest |= {name: np.full(count, step, np.float32) for name in ("k_scale", "v_scale")}
    return rest


def coded(cache: str, rows: Array, step: float = 1.0) -> Array:
    """Cache rows [B, N_kv, P, H] float32 as the cache of that name holds them."""
    bits = CACHES[cache].get("kv_cache_bit_width", 0)
    return quantize(rows, np.array([step], np.float32), bits) if bits else rows


def operate(
    query: Array,
    key: Array,
    value: Array,
    past_key: Array | None = None,
    past_value: Array | None = None,
    *,
    totals: list[int] | None = None,
    total: int | None = None,
    strategy: str = "auto",
    num_threads: int | None = None,
    target: str | None = None,
    **rest: Any,
) -> GroupQueryAttentionResult:
    """The operator's result for query, key, value [B, S, heads, H]; a growing cache where no lengths are given.

    rest: attributes, further inputs by name, present_key and present_value.
    """
    past = 0 if past_key is None else past_key.shape[2]
    total = past + key.shape[1] if total is None else total
    lengths = np.full(len(query), total) if totals is None else np.array(totals)
    attributes = {name: rest.pop(name) for name in Attributes.__dataclass_fields__ if name in rest}
    attributes |= {"num_heads": query.shape[2], "kv_num_heads": key.shape[2]}
    op = GroupQueryAttention(**attributes, strategy=strategy, num_threads=num_threads, target=target)
    return op(
        *(x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]) for x in (query, key, value)),
        past_key,
        past_value,
        (lengths - 1).astype(np.int32),
        np.array([total], np.int32),
        **rest,
    )


def checked(*arrays: Array | None, tolerance: float = 1e-5, **rest: Any) -> GroupQueryAttentionResult:
    """`operate`, compared with the reference: cache bytes equal, output within the tolerance."""
    ours = {name: rest[name] for name in ("strategy", "num_threads", "target") if name in rest}
    presents = {name: rest[name] for name in ("present_key", "present_value") if name in rest}
    plain = {name: value for name, value in rest.items() if name not in ours | presents}
    in_place = bool(presents) and len(arrays) > 3 and presents["present_key"] is arrays[3]
    wanted = attention(*arrays, in_place=in_place, **plain)  # type: ignore[arg-type]
    got = operate(*arrays, **plain, **ours, **presents)  # type: ignore[arg-type]
    assert_close(got.output, wanted.output, tolerance)
    np.testing.assert_array_equal(got.present_key, wanted.present_key)
    np.testing.assert_array_equal(got.present_value, wanted.present_value)
    return got


def ramp(values: Array, new_tokens: int, cache: str = "f32", **rest: Any) -> Array:
    """Output rows [S], one number each, of a zero query over rows of which value row j holds values[j]."""
    rows = np.tile(np.asarray(values, np.float32)[None, None, :, None], (1, 1, 1, 8))
    zeros, past = np.zeros_like(rows), len(values) - new_tokens
    new = np.s_[:, :, past:]
    result = checked(
        zeros[new].swapaxes(1, 2),
        zeros[new].swapaxes(1, 2),
        rows[new].swapaxes(1, 2),
        coded(cache, zeros[:, :, :past]),
        coded(cache, rows[:, :, :past]),
        **stored(cache),
        **rest,
    )
    output = result.output[0]
    assert (output == output[:, :1]).all()
    numbers: Array = output[:, 0]
    return numbers
