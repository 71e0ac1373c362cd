"""The sliding window cache through the operator: its bytes, its lengths, and the caller's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operator_calls import (
    FLOATS,
    STRATEGIES,
    TOLERANCES,
    add_rotary,
    assert_close,
    assert_same_cache,
    copies,
    expected,
    make_call,
    run,
)

from gqa_tvm import GroupQueryAttention, InvalidArgument
from gqa_tvm.sliding_window import retained_length

Call = tuple[dict[str, Any], dict[str, Any]]
STORED = ("f32", "i8", "i4")
CAPACITY, WINDOW = 24, 17


def sliding_call(
    cache: str,
    totals: tuple[int, ...],
    *,
    tokens: int = 1,
    counts: tuple[int, ...] | None = None,
    capacity: int = CAPACITY,
    window: int = WINDOW,
    dtype: str = "f32",
) -> Call:
    """Entries of these lengths after the step; T is the longest. Rows past the kept ones hold random data too."""
    attributes, inputs = make_call(
        cache, dtype=dtype, tokens=tokens, total=max(totals), batch=len(totals), capacity=capacity
    )
    attributes.update(sliding_window_cache=1, local_window_size=window)
    inputs["seqlens_k"] = np.array(totals, np.int32) - 1
    if counts is not None:
        inputs["query_seqlens"] = np.array(counts, np.int32)
    return attributes, inputs


CALLS: dict[str, dict[str, Any]] = {
    "first token": {"totals": (1,)},
    "before it is full": {"totals": (23,)},
    "full": {"totals": (24,)},
    "moves up": {"totals": (25,)},
    "after it moved": {"totals": (26,)},
    "far on": {"totals": (1000,)},
    "ragged": {"totals": (5, 24, 25, 33, 90)},
    "prompt": {"totals": (20,), "tokens": 20},
    "prompt beyond the capacity": {"totals": (150,), "tokens": 150},
    "chunk": {"totals": (30,), "tokens": 6},
    "chunk that moves rows it still needs": {"totals": (29,), "tokens": 9},
    "chunk beyond the capacity": {"totals": (200,), "tokens": 100},
    "padded": {"totals": (40, 9, 24, 26), "tokens": 8, "counts": (8, 3, 5, 2)},
    "padded beyond the capacity": {"totals": (70, 100), "tokens": 60, "counts": (60, 31)},
    "idle entries": {"totals": (40, 9, 100), "tokens": 4, "counts": (0, 0, 3)},
    "window is the capacity": {"totals": (30, 24, 80), "window": 24},
    "window of one": {"totals": (30, 24, 80), "window": 1},
    "capacity of one": {"totals": (30, 1, 80), "window": 1, "capacity": 1},
}


def kept_rows(attributes: dict[str, Any], inputs: dict[str, Any]) -> np.ndarray:
    capacity, window = inputs["past_key"].shape[2], attributes["local_window_size"]
    return retained_length(inputs["seqlens_k"].astype(np.int64) + 1, capacity, window)


def test_retained_length_by_hand() -> None:
    assert [retained_length(total, 5, 3) for total in range(12)] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("cache", STORED)
def test_new_arrays(cache: str, name: str, strategy: str) -> None:
    attributes, inputs = sliding_call(cache, **CALLS[name])
    add_rotary(attributes, inputs)
    got, wanted = run(attributes, inputs, strategy=strategy), expected(attributes, inputs)
    assert_close(got.output, wanted.output)
    assert_same_cache(got, wanted)
    for b, rows in enumerate(kept_rows(attributes, inputs)):
        assert not got.present_key[b, :, rows:].any() and not got.present_value[b, :, rows:].any()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("cache", STORED)
def test_in_place(cache: str, name: str) -> None:
    """The kept rows are those of new arrays; the rows behind them stay as they are."""
    attributes, inputs = sliding_call(cache, **CALLS[name])
    add_rotary(attributes, inputs)
    wanted = expected(attributes, inputs)
    got = run(attributes, inputs, in_place=True)
    assert_close(got.output, wanted.output)
    assert_same_cache(got, expected(attributes, inputs, in_place=True))
    for b, rows in enumerate(kept_rows(attributes, inputs)):
        np.testing.assert_array_equal(got.present_key[b, :, :rows], wanted.present_key[b, :, :rows])
        np.testing.assert_array_equal(got.present_value[b, :, rows:], inputs["past_value"][b, :, rows:])


@pytest.mark.parametrize("name", CALLS)
def test_given_arrays_are_filled(name: str) -> None:
    attributes, inputs = sliding_call("i8", **CALLS[name])
    wanted = expected(attributes, inputs)
    before = copies(inputs)
    present = [np.full_like(inputs["past_key"], 77) for _ in range(2)]
    got = GroupQueryAttention(**attributes)(**inputs, present_key=present[0], present_value=present[1])
    assert got.present_key is present[0] and got.present_value is present[1]
    assert_same_cache(got, wanted)
    for key, array in before.items():
        np.testing.assert_array_equal(inputs[key], array, err_msg=key)


@pytest.mark.parametrize(
    "name", ["moves up", "chunk that moves rows it still needs", "padded", "prompt beyond the capacity"]
)
@pytest.mark.parametrize(("dtype", "cache"), [("f16", "f16"), ("bf16", "bf16"), ("f16", "i8"), ("f32", "bf16")])
def test_half_precision(dtype: str, cache: str, name: str) -> None:
    attributes, inputs = sliding_call(cache, dtype=dtype, **CALLS[name])
    add_rotary(attributes, inputs)
    for in_place in (False, True):
        got, wanted = run(attributes, inputs, in_place=in_place), expected(attributes, inputs, in_place=in_place)
        assert got.output.dtype == FLOATS[dtype]
        assert_close(got.output, wanted.output, TOLERANCES[dtype])
        assert_same_cache(got, wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CALLS)
def test_bias_columns_are_positions(name: str, strategy: str) -> None:  # B38
    attributes, inputs = sliding_call("f32", **CALLS[name])
    batch, tokens = inputs["query"].shape[:2]
    total = inputs["total_sequence_length"].item()
    rng = np.random.default_rng(4)
    bias = rng.standard_normal((batch, 4, tokens, total)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    inputs["attention_bias"] = bias
    wanted = expected(attributes, inputs)
    counts = inputs.get("query_seqlens", np.full(batch, tokens))
    rows = (inputs["seqlens_k"] + 1 - counts)[:, None, None] + np.arange(tokens)[:, None]
    seen = (np.arange(total) <= rows) & (np.arange(total) > rows - attributes["local_window_size"])
    padding = np.arange(tokens)[:, None] >= counts[:, None, None]
    # Positions that were dropped or are still to come are never read.
    bias[np.broadcast_to((~seen | padding)[:, None], bias.shape)] = np.nan
    got = run(attributes, inputs, strategy=strategy)
    assert_close(got.output, wanted.output)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [name for name in CALLS if "one" not in name])
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_outside_the_windows_are_never_read(in_place: bool, name: str, strategy: str) -> None:
    """NaN behind the kept rows of the past, and in rows before every new token's window."""
    attributes, inputs = sliding_call("f32", **CALLS[name])
    wanted = expected(attributes, inputs).output
    counts = inputs.get("query_seqlens", np.full(len(wanted), wanted.shape[1]))
    for b, (last, count) in enumerate(zip(inputs["seqlens_k"], counts, strict=True)):
        past = int(last) + 1 - int(count)
        held = retained_length(past, CAPACITY, attributes["local_window_size"])
        outside = max(0, held + 1 - attributes["local_window_size"])
        for side in ("past_key", "past_value"):
            inputs[side][b, :, held:] = np.nan
            inputs[side][b, :, :outside] = np.nan
    got = run(attributes, inputs, strategy=strategy, in_place=in_place)
    assert_close(got.output, wanted)


def test_idle_entries_keep_their_rows_and_give_zeros() -> None:
    attributes, inputs = sliding_call("i8", **CALLS["idle entries"])
    got = run(attributes, inputs, in_place=True)
    np.testing.assert_array_equal(got.present_key[:2], inputs["past_key"][:2])
    assert not got.output[:2].any() and not got.output[2, 3:].any() and got.output[2, :3].any()


@pytest.mark.parametrize("name", ["moves up", "chunk", "chunk that moves rows it still needs", "padded"])
@pytest.mark.parametrize(("dtype", "cache"), [("f32", "f32"), ("f32", "i4"), ("f16", "f16"), ("bf16", "bf16")])
def test_misaligned_and_strided_caches_are_written_in_place(dtype: str, cache: str, name: str) -> None:
    attributes, inputs = sliding_call(cache, dtype=dtype, **CALLS[name])
    wanted = expected(attributes, inputs, in_place=True)
    raw = np.zeros(inputs["past_key"].nbytes + 1, np.uint8)
    odd = raw[1:].view(inputs["past_key"].dtype).reshape(inputs["past_key"].shape)
    batch, heads, rows, columns = odd.shape
    wide = np.zeros((batch, rows, heads, 2 * columns), odd.dtype)
    strided = wide[..., ::2].transpose(0, 2, 1, 3)
    for array, side in ((odd, "past_key"), (strided, "past_value")):
        array[...] = inputs[side]
        inputs[side] = array
    got = GroupQueryAttention(**attributes)(**inputs, present_key=odd, present_value=strided)
    assert got.present_key is odd and got.present_value is strided
    assert_close(got.output, wanted.output, TOLERANCES[dtype])
    assert_same_cache(got, wanted)
    assert not wide[..., 1::2].any() and raw[0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqlens_k": np.array([-1], np.int32)}, "out of range"),
        ({"total_sequence_length": np.array([0], np.int32)}, "must be positive"),
        ({"k_scale": np.array([np.nan], np.float32)}, "must be finite"),
        ({"attention_bias": np.zeros((1, 1, 1, 7), np.float32)}, "attention_bias"),
        ({"present_value": np.zeros((1, 2, 3, 64), np.int8)}, "present_value"),
    ],
    ids=["length", "total", "scale", "bias", "present"],
)
def test_a_call_that_raises_leaves_the_cache_alone(change: dict[str, Any], message: str) -> None:
    attributes, inputs = sliding_call("i8", (25,))
    before = copies(inputs)
    call = {"present_key": inputs["past_key"], "present_value": inputs["past_value"], **inputs, **change}
    with pytest.raises(InvalidArgument, match=message):
        GroupQueryAttention(**attributes)(**call)
    for name, array in before.items():
        np.testing.assert_array_equal(inputs[name], array, err_msg=name)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("cache", STORED)
def test_bytes_are_those_of_onnxruntime(cache: str, name: str) -> None:
    oracle = pytest.importorskip("oracle")
    attributes, inputs = sliding_call(cache, **CALLS[name])
    theirs = oracle.run_onnxruntime(attributes, inputs)
    got = run(attributes, inputs)
    counts = inputs.get("query_seqlens", np.full(len(got.output), got.output.shape[1]))
    for b, (rows, count) in enumerate(zip(kept_rows(attributes, inputs), counts, strict=True)):
        # onnxruntime leaves the rows of padding as they were allocated.
        assert_close(got.output[b, :count], theirs.output[b, :count])
        for side in ("present_key", "present_value"):
            np.testing.assert_array_equal(getattr(got, side)[b, :, :rows], getattr(theirs, side)[b, :, :rows])


@pytest.mark.parametrize("last", [2**31 - 3, 2**31 - 2])
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_longest_sequences(tokens: int, last: int) -> None:
    attributes, inputs = sliding_call("i8", (100,), tokens=tokens)
    inputs["seqlens_k"][:] = last
    wanted = expected(attributes, inputs)
    for strategy in STRATEGIES:
        got = run(attributes, inputs, strategy=strategy)
        assert_close(got.output, wanted.output)
        assert_same_cache(got, wanted)
