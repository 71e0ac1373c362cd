"""Calls over packed caches beside the same calls over BNSH ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operator_calls import copies, make_call

from gqa_tvm import GroupQueryAttention, pack_kv_cache
from gqa_tvm.targets import missing_features

TARGET = "x86-avx512-vnni"
needs_vnni = pytest.mark.skipif(bool(missing_features(TARGET)), reason="needs AVX-512 VNNI")


def packed_call(cache: str, total: int, **shape: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`make_call` with room for `total` keys and no more than their last group of 16."""
    return make_call(cache, **{"total": total, "capacity": -(-total // 16) * 16, **shape})


def run_packed(attributes: dict[str, Any], inputs: dict[str, Any], **keywords: Any) -> Any:
    """The result in place over copies of the inputs' caches, packed; the caches that come back are packed, too."""
    inputs = copies(inputs)
    if inputs.get("past_key") is not None:
        past = pack_kv_cache(inputs["past_key"], inputs["past_value"])
        for kind, array in zip(("key", "value"), past, strict=True):
            inputs[f"past_{kind}"] = inputs[f"present_{kind}"] = array
    return GroupQueryAttention(**attributes, target=TARGET, kv_layout="packed", **keywords)(**inputs)


def run_bnsh(attributes: dict[str, Any], inputs: dict[str, Any], **keywords: Any) -> Any:
    """The same over the caches as they are."""
    inputs = copies(inputs)
    inputs.update(present_key=inputs["past_key"], present_value=inputs["past_value"])
    return GroupQueryAttention(**attributes, target=TARGET, **keywords)(**inputs)


def assert_packed_bytes(packed: Any, bnsh: Any) -> None:
    """Both caches are those of the other result, every byte in its place, also those past the last token."""
    wanted = pack_kv_cache(bnsh.present_key, bnsh.present_value)
    for got, cache in zip((packed.present_key, packed.present_value), wanted, strict=True):
        np.testing.assert_array_equal(got, cache)
