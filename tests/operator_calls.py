"""A small valid call of the operator and its reference, for tests that vary one thing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gqa_tvm import GroupQueryAttention
from gqa_tvm.reference import group_query_attention
from gqa_tvm.targets import FALLBACKS, architecture, missing_features

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

FLOATS: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
# What a result may differ from the reference by, relative to max(1, |reference|).
TOLERANCES = {"f32": 1e-5, "f16": 1e-3, "bf16": 8e-3}
STRATEGIES = ("naive", "flash", "flash_decoding")
RUNNABLE_TARGETS = tuple(target for target in FALLBACKS.get(architecture(), ()) if not missing_features(target))


def first_of(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Parameters of a test of which the quick subset runs the first ones."""
    values = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=[pytest.mark.slow] if i >= quick else []) for i, value in enumerate(values)]


# Kernels of all but the best target are compiled for these tests alone.
EVERY_TARGET = tuple(first_of(RUNNABLE_TARGETS))


def make_call(
    cache: str,
    *,
    dtype: str = "f32",
    tokens: int = 1,
    total: int = 40,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    batch: int = 1,
    capacity: int | None = None,
    seed: int = 0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(attributes, inputs) of a call with random data and a static cache of `capacity` rows.

    cache: a name of CACHES or FLOATS; dtype: the query's, a name of FLOATS.
    """
    rng = np.random.default_rng(seed)
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, **CACHES.get(cache, {})}
    capacity = capacity or total + 3
    bits = attributes.get("kv_cache_bit_width", 0)
    columns = (head_size + 1) // 2 if bits == 4 else head_size
    shape = (batch, kv_heads, capacity, columns)

    def cache_array() -> np.ndarray:
        if bits == 0:
            return rng.standard_normal(shape).astype(FLOATS[cache])
        info = np.iinfo(np.int8 if bits == 8 else np.uint8)
        return rng.integers(info.min, info.max + 1, shape).astype(info.dtype)

    def hidden(n: int) -> np.ndarray:
        return rng.standard_normal((batch, tokens, n * head_size)).astype(FLOATS[dtype])

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


def add_rotary(
    attributes: dict[str, Any],
    inputs: dict[str, Any],
    *,
    interleaved: int = 0,
    rotary_dim: int | None = None,
) -> None:
    """Rotation by the usual angles of rotary_dim columns (None = all), at the default positions."""
    rows = int(inputs["total_sequence_length"].item())
    heads = attributes["num_heads"]
    if inputs.get("key") is None:
        heads += 2 * attributes["kv_num_heads"]
    rotary_dim = rotary_dim or inputs["query"].shape[2] // heads
    angles = np.arange(rows)[:, None] * 100.0 ** -np.linspace(0, 1, rotary_dim // 2)
    attributes.update(do_rotary=1, rotary_interleaved=interleaved)
    for name, function in (("cos_cache", np.cos), ("sin_cache", np.sin)):
        inputs[name] = function(angles).astype(inputs["query"].dtype)


def copies(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs in arrays of their own; None stays None."""
    return {name: None if value is None else value.copy() for name, value in inputs.items()}


def run(attributes: dict[str, Any], inputs: dict[str, Any], *, in_place: bool = False, **keywords: Any) -> Any:
    """The operator's result on copies of the inputs; keywords: strategy, target, num_threads."""
    inputs = copies(inputs)
    if in_place:
        inputs.update(present_key=inputs["past_key"], present_value=inputs["past_value"])
    return GroupQueryAttention(**attributes, **keywords)(**inputs)


def expected(attributes: dict[str, Any], inputs: dict[str, Any], *, in_place: bool = False) -> Any:
    """The reference's result for the same call."""
    return group_query_attention(**inputs, **attributes, in_place=in_place)


def assert_close(got: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    """|got - wanted| <= tolerance * max(1, |wanted|) everywhere; NaN matches nothing."""
    error = np.abs(got - wanted) / np.maximum(1.0, np.abs(wanted))
    assert (error <= tolerance).all(), f"largest error {np.nanmax(error):.3g}, NaN: {np.isnan(error).any()}"


def assert_same_values(got: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    """As assert_close, but NaN matches NaN and an infinity itself."""
    got, wanted = (np.asarray(array, np.float64) for array in (got, wanted))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted), err_msg="NaN")
    other = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~other], wanted[~other])
    assert_close(got[other], wanted[other], tolerance)


def assert_same_cache(got: Any, wanted: Any) -> None:
    """present_key and present_value byte for byte, of results of the operator or the reference."""
    for name in ("present_key", "present_value"):
        ours, theirs = (np.ascontiguousarray(getattr(result, name)) for result in (got, wanted))
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8), err_msg=name)
