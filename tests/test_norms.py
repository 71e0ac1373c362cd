"""RMS norm of query and key heads: as the reference does it, and as done by hand before a call without norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operator_calls import (
    EVERY_TARGET,
    FLOATS,
    STRATEGIES,
    TOLERANCES,
    add_rotary,
    assert_close,
    assert_same_cache,
    assert_same_values,
    copies,
    expected,
    first_of,
    make_call,
    run,
)

Call = tuple[dict[str, Any], dict[str, Any]]
EPSILONS: list[dict[str, float]] = [
    {},
    {"qk_norm_epsilon": 0.3},
    {"q_norm_epsilon": 0.7},
    {"k_norm_epsilon": 0.7},
    {"qk_norm_epsilon": 0.3, "q_norm_epsilon": 2.0},
    {"q_norm_epsilon": 1e-3, "k_norm_epsilon": 0.05, "qk_norm_epsilon": 9.0},
]
ROTARY: dict[str, dict[str, Any]] = {
    "none": {},
    "half": {"interleaved": 0},
    "interleaved": {"interleaved": 1},
    "partial": {"interleaved": 0, "rotary_dim": 32},
    "partial interleaved": {"interleaved": 1, "rotary_dim": 48},
}
PHASES: dict[str, dict[str, Any]] = {
    "prompt": {"tokens": 70, "total": 70},
    "decode": {"tokens": 1, "total": 90, "batch": 2},
    "chunk": {"tokens": 20, "total": 100},
    "shared": {"tokens": 3, "total": 90},
    "padded chunk": {"tokens": 12, "total": 90, "batch": 2, "capacity": 100},
    "sliding": {"tokens": 12, "total": 90, "capacity": 50},
}


def norm_call(phase: str, cache: str, dtype: str = "f32", rotary: str = "none", **rest: Any) -> Call:
    """Heads of mean squares from 1e-4 to 10, so that the epsilons matter and differ."""
    attributes, inputs = make_call(cache, dtype=dtype, **{**PHASES[phase], **rest})
    rng = np.random.default_rng(5)
    head_size = inputs["query"].shape[2] // attributes["num_heads"]
    for name in ("query", "key"):
        heads = inputs[name].reshape(*inputs[name].shape[:2], -1, head_size)
        heads *= 10 ** rng.uniform(-2, 0.5, (*heads.shape[:3], 1)).astype(FLOATS[dtype])
    for name in ("q_norm_weight", "k_norm_weight"):
        inputs[name] = rng.standard_normal(head_size).astype(FLOATS[dtype])
    if phase == "shared":
        inputs["key"], inputs["value"] = inputs["key"][:, :0], inputs["value"][:, :0]
    if phase == "padded chunk":
        inputs["query_seqlens"] = np.array([12, 7], np.int32)
    if phase == "sliding":
        attributes.update(sliding_window_cache=1, local_window_size=40)
    if rotary != "none":
        add_rotary(attributes, inputs, **ROTARY[rotary])
    return attributes, inputs


def by_hand(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """Float32 norm of the heads of x [B, S, heads * H]."""
    heads = x.astype(np.float32).reshape(*x.shape[:2], x.shape[2] // len(weight), len(weight))
    mean = np.square(heads.astype(np.float64)).mean(axis=-1, keepdims=True)
    inverse = (1 / np.sqrt(mean + np.float64(np.float32(epsilon)))).astype(np.float32)
    return ((heads * inverse) * weight.astype(np.float32)).reshape(x.shape)


def normed_by_hand(attributes: dict[str, Any], inputs: dict[str, Any]) -> Call:
    """The call in float32 without norm, on query and key normed before."""
    attributes, inputs = dict(attributes), copies(inputs)
    both = attributes.pop("qk_norm_epsilon", 1e-6)
    for side in ("query", "key"):
        epsilon = attributes.pop(f"{side[0]}_norm_epsilon", both)
        inputs[side] = by_hand(inputs[side], inputs.pop(f"{side[0]}_norm_weight"), epsilon)
    for name in ("value", "cos_cache", "sin_cache"):
        if name in inputs:
            inputs[name] = inputs[name].astype(np.float32)
    return attributes, inputs


@pytest.mark.parametrize("epsilons", EPSILONS, ids=str)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("cache", ["f32", "i8"])
def test_epsilons(cache: str, phase: str, epsilons: dict[str, float]) -> None:
    attributes, inputs = norm_call(phase, cache, rotary="half")
    attributes.update(epsilons)
    got = run(attributes, inputs)
    wanted = expected(attributes, inputs)
    assert_close(got.output, wanted.output)
    assert_same_cache(got, wanted)
    hand = run(*normed_by_hand(attributes, inputs))
    np.testing.assert_array_equal(got.output, hand.output)
    assert_same_cache(got, hand)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize(
    ("dtype", "cache"), first_of([("f32", "f32"), ("bf16", "i4"), ("f16", "f16"), ("bf16", "bf16"), ("f16", "i8")], 2)
)
def test_dtypes_and_rotations(dtype: str, cache: str, rotary: str, strategy: str) -> None:
    for phase in ("prompt", "decode", "chunk", "shared"):
        attributes, inputs = norm_call(phase, cache, dtype, rotary)
        got = run(attributes, inputs, strategy=strategy)
        wanted = expected(attributes, inputs)
        assert_close(got.output, wanted.output, TOLERANCES[dtype])
        assert_same_cache(got, wanted)


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_keys_are_rounded_once_after_norm_and_rotation(dtype: str, rotary: str) -> None:
    attributes, inputs = norm_call("chunk", dtype, dtype, rotary)
    got = run(attributes, inputs)
    # A float32 call rounds where it stores: once.
    hand_attributes, hand = normed_by_hand(attributes, inputs)
    assert_same_cache(got, run(hand_attributes, hand, strategy="naive"))
    if rotary != "none":
        hand["key"] = hand["key"].astype(FLOATS[dtype]).astype(np.float32)
        twice = run(hand_attributes, hand, strategy="naive")
        assert (got.present_key != twice.present_key).any(), "a second rounding shows in these keys"


@pytest.mark.parametrize("target", EVERY_TARGET)
@pytest.mark.parametrize("dtype", FLOATS)
def test_bytes_on_every_target(dtype: str, target: str) -> None:
    attributes, inputs = norm_call("chunk", "i8-channel", dtype, "interleaved")
    got = run(attributes, inputs, target=target, strategy="naive")
    wanted = expected(attributes, inputs)
    assert_same_cache(got, wanted)
    assert_close(got.output, wanted.output, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_are_never_normed(dtype: str) -> None:
    attributes, inputs = norm_call("chunk", dtype, dtype)
    got = run(attributes, inputs)
    stored = got.present_value[0, :, 80:100].swapaxes(0, 1).reshape(20, -1)
    np.testing.assert_array_equal(stored, inputs["value"][0])


def test_shared_keys_are_not_normed_again() -> None:
    attributes, inputs = norm_call("shared", "f32")
    wanted = run(attributes, inputs)
    np.testing.assert_array_equal(wanted.present_key[:, :, :90], inputs["past_key"][:, :, :90])
    inputs["k_norm_weight"] = inputs["k_norm_weight"] * 100
    np.testing.assert_array_equal(run(attributes, inputs).output, wanted.output)
    inputs["q_norm_weight"] = inputs["q_norm_weight"] * 100
    assert (run(attributes, inputs).output != wanted.output).any()


@pytest.mark.parametrize("cache", ["f32", "i8"])
def test_packed_query_key_value(cache: str) -> None:
    attributes, inputs = norm_call("chunk", cache, rotary="half")
    wanted = run(attributes, inputs)
    packed = copies(inputs)
    packed["query"] = np.concatenate([packed.pop(name) for name in ("query", "key", "value")], axis=2)
    got = run(attributes, packed)
    np.testing.assert_array_equal(got.output, wanted.output)
    assert_same_cache(got, wanted)


@pytest.mark.parametrize("head_size", [1, 5, 8, 40])
def test_head_sizes(head_size: int) -> None:
    attributes, inputs = norm_call("chunk", "f32", head_size=head_size)
    got = run(attributes, inputs, strategy="naive")
    wanted = expected(attributes, inputs)
    assert_close(got.output, wanted.output)
    assert_same_cache(got, wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("epsilon", [1e-6, 1e-12, 1e-40])
def test_heads_at_the_edges(epsilon: float, strategy: str) -> None:
    """Zero, tiny, huge and single-number heads; NaN and infinity stay in their head."""
    attributes, inputs = norm_call("chunk", "f32")
    attributes["qk_norm_epsilon"] = epsilon
    for name in ("query", "key"):
        heads = inputs[name].reshape(1, 20, -1, 64)
        heads[0, 0, 0], heads[0, 1, 1], heads[0, 2, 0] = 0, 1e-30, 1e20
        heads[0, 3, 0], heads[0, 3, 0, 9] = 0, 3e38
        heads[0, 4, 0] *= np.float32(1e-41)
    inputs["query"].reshape(20, 4, 64)[7, 1, 5] = np.nan
    inputs["query"].reshape(20, 4, 64)[8, 2, 5] = np.inf
    inputs["key"].reshape(20, 2, 64)[18, 0, 5] = np.inf
    got = run(attributes, inputs, strategy=strategy)
    wanted = expected(attributes, inputs)
    assert_same_values(got.output, wanted.output)
    assert_same_values(got.present_key, wanted.present_key, 0)
    assert not got.present_key[0, 0, 80].any()
    assert np.isnan(got.output[0, 7, 64:128]).all() and np.isnan(got.output[0, 18:, :128]).all()
    assert np.isfinite(got.output[0, :7]).all()
