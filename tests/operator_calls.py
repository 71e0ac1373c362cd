"""A small valid call of the operator and its reference, for tests that vary one thing."""

from __future__ import annotations

from typing import Any

import numpy as np

from gqa_tvm.reference import group_query_attention

CACHES: dict[str, dict[str, Any]] = {
    "f32": {},
    "i8": {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8},
    "i8-channel": {
        "k_quant_type": "PER_CHANNEL",
        "v_quant_type": "PER_CHANNEL",
        "kv_cache_bit_width": 8,
    },
    "i4": {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 4},
    "i4-channel": {
        "k_quant_type": "PER_CHANNEL",
        "v_quant_type": "PER_CHANNEL",
        "kv_cache_bit_width": 4,
    },
}


def make_call(
    cache: str,
    *,
    tokens: int = 1,
    total: int = 40,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    batch: int = 1,
    capacity: int | None = None,
    seed: int = 0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(attributes, inputs) of a call with random data and a static cache of `capacity` rows."""
    rng = np.random.default_rng(seed)
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, **CACHES[cache]}
    capacity = capacity or total + 3
    bits = attributes.get("kv_cache_bit_width", 0)
    columns = (head_size + 1) // 2 if bits == 4 else head_size
    shape = (batch, kv_heads, capacity, columns)

    def cache_array() -> np.ndarray:
        if bits == 0:
            return rng.standard_normal(shape).astype(np.float32)
        dtype = np.int8 if bits == 8 else np.uint8
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max + 1, shape).astype(dtype)

    def hidden(n: int) -> np.ndarray:
        return rng.standard_normal((batch, tokens, n * head_size)).astype(np.float32)

    inputs: dict[str, Any] = {
        "query": hidden(heads),
        "key": hidden(kv_heads),
        "value": hidden(kv_heads),
        "past_key": cache_array(),
        "past_value": cache_array(),
        "seqlens_k": np.full(batch, total - 1, np.int32),
        "total_sequence_length": np.array([total], np.int32),
    }
    if bits:
        count = kv_heads * head_size if cache.endswith("channel") else 1
        low, high = (0.01, 0.03) if bits == 8 else (0.1, 0.3)
        for name in ("k_scale", "v_scale"):
            inputs[name] = rng.uniform(low, high, count).astype(np.float32)
    return attributes, inputs


def expected(attributes: dict[str, Any], inputs: dict[str, Any], *, in_place: bool = False) -> Any:
    """The reference's result for the same call."""
    return group_query_attention(**inputs, **attributes, in_place=in_place)


def assert_close(got: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    """|got - wanted| <= tolerance * max(1, |wanted|) everywhere; NaN matches nothing."""
    error = np.abs(got - wanted) / np.maximum(1.0, np.abs(wanted))
    assert (error <= tolerance).all(), f"largest error {np.nanmax(error):.3g}, NaN: {np.isnan(error).any()}"
