"""float16 and bfloat16 queries over every cache: close to the reference, rounded where it rounds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from operator_calls import (
    EVERY_TARGET,
    FLOATS,
    RUNNABLE_TARGETS,
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

from gqa_tvm import GroupQueryAttention

HALVES = ("f16", "bf16")
PAIRS = [(dtype, cache or dtype) for cache in ("", "i8-channel", "f32", "i4") for dtype in HALVES]
PHASES = {"prompt": (80, 80), "decode": (1, 90), "chunk": (20, 140)}


def full_call(dtype: str, cache: str, phase: str, **sizes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A rotated call with bias and sink, all of the query's dtype."""
    tokens, total = PHASES[phase]
    attributes, inputs = make_call(cache, dtype=dtype, tokens=tokens, total=total, **sizes)
    add_rotary(attributes, inputs)
    rng = np.random.default_rng(3)
    inputs["attention_bias"] = rng.standard_normal((1, 1, tokens, total)).astype(FLOATS[dtype])
    inputs["head_sink"] = rng.standard_normal(attributes["num_heads"]).astype(FLOATS[dtype])
    return attributes, inputs


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("dtype", "cache"), first_of(PAIRS, 2))
def test_every_cache_and_phase(dtype: str, cache: str, phase: str, strategy: str) -> None:
    attributes, inputs = full_call(dtype, cache, phase)
    wanted = expected(attributes, inputs)
    got = run(attributes, inputs, strategy=strategy)
    assert got.output.dtype == FLOATS[dtype]
    assert_close(got.output, wanted.output, TOLERANCES[dtype])
    assert_same_cache(got, wanted)


@pytest.mark.parametrize("cache", HALVES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_other_pairs_of_query_and_cache(dtype: str, cache: str) -> None:
    attributes, inputs = full_call(dtype, cache, "chunk")
    wanted = expected(attributes, inputs)
    got = run(attributes, inputs, strategy="naive")
    assert_close(got.output, wanted.output, TOLERANCES[dtype])
    assert_same_cache(got, wanted)


@pytest.mark.parametrize("dtype", HALVES)
def test_without_past_the_cache_has_the_query_dtype(dtype: str) -> None:
    attributes, inputs = full_call(dtype, dtype, "prompt")
    inputs["past_key"] = inputs["past_value"] = None
    got = run(attributes, inputs)
    assert got.present_key.dtype == got.present_value.dtype == FLOATS[dtype]
    assert_same_cache(got, expected(attributes, inputs))


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("dtype", HALVES)
def test_output_qk(dtype: str, mode: int) -> None:
    attributes, inputs = full_call(dtype, dtype, "chunk")
    attributes["qk_output"] = mode
    got, wanted = run(attributes, inputs), expected(attributes, inputs)
    assert got.output_qk.dtype == FLOATS[dtype]
    assert_close(got.output_qk, wanted.output_qk, TOLERANCES[dtype])


# --- where it rounds ---


@pytest.mark.parametrize("cache", ["f32", "i8-channel"])
@pytest.mark.parametrize("dtype", HALVES)
def test_rotated_keys_are_rounded_before_they_are_stored(dtype: str, cache: str) -> None:
    attributes, inputs = full_call(dtype, cache, "chunk")
    if cache == "i8-channel":
        inputs["k_scale"] *= np.float32(0.3)
    got = run(attributes, inputs).present_key
    wide = {name: value.astype(np.float32) if value.dtype == FLOATS[dtype] else value for name, value in inputs.items()}
    unrounded = expected(attributes, wide).present_key
    assert (got != unrounded).any(), "rounding shows in these keys"
    np.testing.assert_array_equal(got, expected(attributes, inputs).present_key)
    if cache == "f32":
        new = got[:, :, 120:140]
        np.testing.assert_array_equal(new, new.astype(FLOATS[dtype]).astype(np.float32))


@pytest.mark.parametrize("target", EVERY_TARGET)
@pytest.mark.parametrize("cache", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_stored_values_are_rounded_to_the_nearest_even(dtype: str, cache: str, target: str) -> None:
    """Ties, subnormals, the largest numbers, overflow, signed zeros and infinities, cast as NumPy does."""
    tie = 2.0**-8 if cache == "bf16" else 2.0**-11
    numbers = [
        1 + tie,
        1 + 3 * tie,
        1 - tie / 2,
        -1 - tie,
        65504,
        65519,
        65520,
        -65520,
        3.4e38,
        3.39e38,
        np.inf,
        -np.inf,
    ]
    numbers += [0.0, -0.0, 6e-8, 3e-8, 2.98e-8, 6.1e-5, 6.09e-5, 1e-40, 1e-45, 2.0**-25, 3 * 2.0**-26, 1e-38]
    with np.errstate(over="ignore"):
        row = np.resize(np.array(numbers, np.float32), 2 * 64).astype(FLOATS[dtype])
    attributes, inputs = make_call(cache, dtype=dtype, total=4)
    inputs["key"][...] = row
    inputs["value"][...] = row[::-1]
    wanted = expected(attributes, inputs)
    assert_same_cache(run(attributes, inputs, target=target, strategy="naive"), wanted)


@pytest.mark.parametrize("target", EVERY_TARGET)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("direction", ["widen", "narrow"])
def test_conversions(direction: str, half: str, target: str) -> None:
    """All 65536 numbers of 16 bits to float32, and as many float32 numbers of random bits to 16 bits."""
    dtype, cache = (half, "f32") if direction == "widen" else ("f32", half)
    attributes, inputs = make_call(cache, dtype=dtype, tokens=512, total=512, capacity=512)
    bits = np.random.default_rng(8).integers(0, 2**32, (2, 65536), np.uint32).view(np.float32)
    if direction == "widen":
        bits = np.tile(np.arange(65536, dtype=np.uint16), (2, 1)).view(FLOATS[half])
    inputs["key"], inputs["value"] = (side.reshape(inputs["key"].shape) for side in bits)
    got = run(attributes, inputs, target=target, strategy="naive")
    with np.errstate(over="ignore", invalid="ignore"):
        for present, name in ((got.present_key, "key"), (got.present_value, "value")):
            stored = present[0].swapaxes(0, 1).reshape(inputs[name].shape[1:])
            assert_same_values(stored, inputs[name][0].astype(np.float32).astype(FLOATS[cache]), 0)
            np.testing.assert_array_equal(np.signbit(stored), np.signbit(inputs[name][0]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", HALVES)
def test_special_rows(dtype: str, strategy: str) -> None:
    """Masks and sinks of 16 bits: rows that see nothing, a finite mask, NaN, infinite sinks."""
    attributes, inputs = full_call(dtype, dtype, "chunk")
    bias = inputs["attention_bias"]
    lowest = ml_dtypes.finfo(FLOATS[dtype]).min
    bias[:, :, 0], bias[:, :, 1], bias[:, :, 2, :100], bias[:, :, 3, 5] = -np.inf, lowest, -np.inf, np.nan
    inputs["head_sink"] = np.array([0, -np.inf, 3, np.nan], FLOATS[dtype])
    inputs["query"][:, 1] = 0
    got, wanted = run(attributes, inputs, strategy=strategy), expected(attributes, inputs)
    assert_same_values(got.output, wanted.output, TOLERANCES[dtype])
    # A fully masked row is zeros, also with the sink that makes other rows of its head NaN.
    assert not got.output[0, 0].any() and np.isnan(got.output[0, 3]).all()
    assert got.output[0, 1, 64:128].any() and np.isnan(got.output[0, 1:, 192:]).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", HALVES)
def test_nan_stays_nan(dtype: str, strategy: str) -> None:
    attributes, inputs = full_call(dtype, dtype, "chunk")
    inputs["value"][0, 7, 3] = np.nan
    got = run(attributes, inputs, strategy=strategy)
    assert_same_values(got.output, expected(attributes, inputs).output, TOLERANCES[dtype])
    assert np.isnan(got.present_value[0, 0, 127, 3])


# --- ranges ---


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("head_size", "number"), [(512, 16), (8, 300)])
def test_scores_beyond_float16(head_size: int, number: int, strategy: str) -> None:  # B47
    attributes, inputs = make_call(
        "f16", dtype="f16", tokens=2, total=2, heads=1, kv_heads=1, head_size=head_size, capacity=2
    )
    # Before the scale is applied the scores are 131072 and 720000.
    inputs["query"][:] = inputs["key"][:] = number
    got = run(attributes, inputs, strategy=strategy)
    assert np.isfinite(got.output).all()
    assert_close(got.output, expected(attributes, inputs).output, TOLERANCES["f16"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_long_sums_of_large_values(tokens: int, strategy: str) -> None:  # B48
    attributes, inputs = make_call("f16", dtype="f16", tokens=tokens, total=40000, heads=1, kv_heads=1, head_size=8)
    inputs["query"][:] = 0
    inputs["value"][:] = inputs["past_value"][:] = 60000
    got = run(attributes, inputs, strategy=strategy)
    np.testing.assert_allclose(got.output.astype(np.float64), 60000, rtol=2.0**-11)


# --- tensors and targets ---


@pytest.mark.parametrize("cache", ["bf16", "i8-channel"])
def test_bfloat16_tensors_are_read_and_written_in_place(cache: str) -> None:
    tvm = pytest.importorskip("tvm")
    attributes, inputs = full_call("bf16", cache, "chunk")
    wanted = expected(attributes, inputs, in_place=True)
    tensors = {name: tvm.runtime.tensor(value) for name, value in inputs.items()}
    past = tensors["past_key"], tensors["past_value"]
    got = GroupQueryAttention(**attributes)(**tensors, present_key=past[0], present_value=past[1])
    assert got.output.dtype == ml_dtypes.bfloat16
    assert_close(got.output, wanted.output, TOLERANCES["bf16"])
    for tensor, array in zip(past, (wanted.present_key, wanted.present_value), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_strided_and_misaligned_bfloat16_inputs() -> None:
    attributes, inputs = full_call("bf16", "bf16", "chunk")
    wanted = run(attributes, inputs)
    odd = copies(inputs)
    for name, value in inputs.items():
        raw = np.zeros(value.nbytes + 1, np.uint8)
        odd[name] = raw[1:].view(value.dtype).reshape(value.shape)
        odd[name][...] = value
    wide = np.zeros((*inputs["query"].shape[:2], 2 * inputs["query"].shape[2]), ml_dtypes.bfloat16)
    wide[..., ::2] = inputs["query"]
    odd["query"] = wide[..., ::2]
    got = GroupQueryAttention(**attributes)(**odd, present_key=odd["past_key"], present_value=odd["past_value"])
    assert got.present_key is odd["past_key"]
    np.testing.assert_array_equal(got.output, wanted.output)
    np.testing.assert_array_equal(got.present_key[:, :, :140], wanted.present_key[:, :, :140])


@pytest.mark.slow
@pytest.mark.parametrize("target", RUNNABLE_TARGETS)
@pytest.mark.parametrize(("dtype", "cache"), [("f16", "f16"), ("bf16", "bf16"), ("f16", "i8-channel")])
def test_targets_agree(dtype: str, cache: str, target: str) -> None:  # B130
    for phase in PHASES:
        for strategy in ("naive", "auto"):
            attributes, inputs = full_call(dtype, cache, phase)
            wanted = expected(attributes, inputs)
            got = run(attributes, inputs, target=target, strategy=strategy)
            assert_same_cache(got, wanted)
            # One rounding of the exact result may fall to either side; nothing may be farther off.
            unit = np.spacing(np.abs(got.output.astype(np.float32)).astype(FLOATS[dtype])).astype(np.float64)
            assert (np.abs(got.output.astype(np.float64) - wanted.output) <= 0.51 * unit + 1e-5).all()
