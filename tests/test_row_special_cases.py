"""Rows with special masks, sinks and values that are not finite: one behaviour on every path and cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operator_calls import (
    RUNNABLE_TARGETS,
    STRATEGIES,
    assert_close,
    assert_same_cache,
    assert_same_values,
    copies,
    expected,
    make_call,
    run,
)

STORED = ("f32", "f16", "bf16", "i8", "i4")
FLOAT_STORED = STORED[:3]
Call = tuple[dict[str, Any], dict[str, Any]]


def equal_weights(cache: str, *, tokens: int = 1, total: int = 70) -> Call:
    """A call with query 0, so that a row's output is the mean of the values its bias leaves."""
    attributes, inputs = make_call(cache, tokens=tokens, total=total)
    inputs["query"][:] = 0
    return attributes, inputs


def bias_of(attributes: dict[str, Any], inputs: dict[str, Any]) -> np.ndarray:
    shape = (1, attributes["num_heads"], inputs["query"].shape[1], inputs["total_sequence_length"].item())
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


# --- masks ---


@pytest.mark.parametrize(
    "rest", [{}, {"softcap": 2.0}, {"smooth_softmax": 1}, {"softcap": 2.0, "head_sink": 1}], ids=str
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", STORED)
def test_fully_masked_rows_are_zeros(cache: str, strategy: str, rest: dict[str, Any]) -> None:  # B44
    """Of five rows one sees nothing, others only the first or the last block of 64 keys, or one key."""
    attributes, inputs = make_call(cache, tokens=5, total=140)
    attributes.update({name: value for name, value in rest.items() if name != "head_sink"})
    if "head_sink" in rest:
        inputs["head_sink"] = np.array([0, 1, -2, 30], np.float32)
    bias = bias_of(attributes, inputs)
    bias[:, :, 1] = bias[:, :, 2, :128] = bias[:, :, 3, 64:] = bias[:, :, 4, 1:] = -np.inf
    bias[:, 2, 0] = -np.inf
    inputs["attention_bias"] = bias
    got = run(attributes, inputs, strategy=strategy).output
    assert not got[0, 1].any() and not got[0, 0, 128:192].any()
    assert got[0, 2:].any(axis=1).all()
    assert_close(got, expected(attributes, inputs).output)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize("mask", [-1e9, -1e30, -3.4e38, np.finfo(np.float32).min])
def test_finite_masks_are_ordinary_numbers(mask: float, cache: str, strategy: str) -> None:
    attributes, inputs = equal_weights(cache, tokens=3)
    bias = np.zeros((1, 1, 3, 70), np.float32)
    bias[:, :, 0] = mask
    bias[:, :, 1, 10:] = mask
    bias[:, :, 2, :66] = -np.inf
    bias[:, :, 2, 66:] = mask
    inputs["attention_bias"] = bias
    same = copies(inputs) | {"attention_bias": np.zeros_like(bias)}
    same["attention_bias"][:, :, 1, 10:] = same["attention_bias"][:, :, 2, :66] = -np.inf
    assert_close(run(attributes, inputs, strategy=strategy).output, expected(attributes, same).output)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("column", [0, 63, 64, 130])
def test_bias_that_makes_nan_makes_it_in_its_row_alone(column: int, value: float, cache: str, strategy: str) -> None:
    attributes, inputs = make_call(cache, tokens=4, total=140)
    inputs["attention_bias"] = bias_of(attributes, inputs)
    inputs["attention_bias"][0, 1, 2, column] = value
    got = run(attributes, inputs, strategy=strategy).output
    assert np.isnan(got[0, 2, 64:128]).all() and np.isnan(got).sum() == 64
    assert_same_values(got, expected(attributes, inputs).output)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("window", [-1, 20])
def test_masked_bias_columns_are_never_read(window: int, value: float, cache: str, strategy: str) -> None:
    """Later keys, keys before the window, and columns at or beyond the entry's length."""
    attributes, inputs = make_call(cache, tokens=6, total=140)
    attributes["local_window_size"] = window
    inputs["seqlens_k"][0] = 132
    inputs["attention_bias"] = bias_of(attributes, inputs)
    wanted = expected(attributes, inputs).output
    rows, columns = np.arange(6)[:, None] + 127, np.arange(140)
    seen = (columns <= rows) & ((columns > rows - window) | (window < 0))
    inputs["attention_bias"][:, :, ~seen] = value
    assert_close(run(attributes, inputs, strategy=strategy).output, wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("softcap", [0.5, 30.0, 300.0, 1e4, 1e30])
def test_softcap_of_any_size(softcap: float, strategy: str) -> None:
    attributes, inputs = make_call("f32", tokens=3, total=140)
    attributes["softcap"] = softcap
    assert_close(run(attributes, inputs, strategy=strategy).output, expected(attributes, inputs).output)


# --- sinks ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", STORED)
def test_sinks_by_formula(cache: str, strategy: str) -> None:  # B39
    """Equal scores c and values 1: n exp(c) / (n exp(c) + exp(sink))."""
    attributes, inputs = equal_weights(cache)
    new = np.ones_like(inputs["value"])
    inputs["value"] = new
    if cache in FLOAT_STORED:
        inputs["past_value"][:] = 1
    else:
        inputs["v_scale"][:] = 1
        inputs["past_value"][:] = 1 if cache == "i8" else 0x99
    sinks = np.array([0, np.log(4), -np.inf, 100], np.float32)
    for score in (0.0, -50.0, 30.0):
        inputs["attention_bias"] = np.full((1, 1, 1, 70), score, np.float32)
        inputs["head_sink"] = sinks
        got = run(attributes, inputs, strategy=strategy).output.reshape(4, 64)
        top = np.maximum(sinks, score).astype(np.float64)
        keys = 70 * np.exp(score - top)
        wanted = keys / (keys + np.exp(sinks - top))
        np.testing.assert_allclose(got, np.repeat(wanted[:, None], 64, axis=1), rtol=1e-5, atol=1e-40)
    for sink in (np.inf, np.nan):
        inputs["head_sink"] = np.array([0, sink, 0, 0], np.float32)
        got = run(attributes, inputs, strategy=strategy).output.reshape(4, 64)
        assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2, 3]]).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sink", [np.nan, np.inf])
@pytest.mark.parametrize("rest", ["padding of a chunk", "padding of a windowed prompt"])
def test_rows_without_keys_are_zeros_whatever_the_sink(rest: str, sink: float, strategy: str) -> None:
    attributes, inputs = make_call("f32", tokens=8, total=8)
    inputs["head_sink"] = np.full(4, sink, np.float32)
    inputs["seqlens_k"][0] = 2
    if rest == "padding of a chunk":
        inputs["query_seqlens"] = np.array([3], np.int32)
    else:
        attributes["local_window_size"] = 1
    got = run(attributes, inputs, strategy=strategy).output
    assert np.isnan(got[0, :3]).all() and not got[0, 3:].any()


# --- NaN and infinities in K, V and Q ---


def special_call(phase: str, cache: str) -> Call:
    """Calls of two KV heads whose rows see different keys, over three blocks of 64."""
    if phase == "ragged decode":
        attributes, inputs = make_call(cache, total=180, batch=3)
        inputs["seqlens_k"][:] = [179, 64, 127]
    elif phase == "shared":
        attributes, inputs = make_call(cache, tokens=30, total=150)
        for name in ("key", "value"):
            inputs[name] = inputs[name][:, :0]
    elif phase == "padded chunk":
        attributes, inputs = make_call(cache, tokens=40, total=180, batch=2)
        inputs["seqlens_k"][:] = [179, 99]
        inputs["query_seqlens"] = np.array([40, 33], np.int32)
    else:
        tokens = {"prompt": 150, "window": 150, "chunk": 70}[phase]
        attributes, inputs = make_call(cache, tokens=tokens, total=150)
        attributes["local_window_size"] = 30 if phase == "window" else -1
    return attributes, inputs


def put(inputs: dict[str, Any], side: str, j: int, value: float) -> bool:
    """Channel 5 of KV head 0 of row j of K or V, wherever the call holds it; False where it holds none."""
    tokens = inputs["query"].shape[1]
    counts = inputs.get("query_seqlens")
    placed = False
    for b, last in enumerate(inputs["seqlens_k"]):
        count = tokens if counts is None else int(counts[b])
        first_new = last + 1 - count if inputs["key"].shape[1] else last + 1
        if j <= last:
            if j >= first_new:
                inputs[side][b, j - first_new, 5] = value
            else:
                inputs[f"past_{side}"][b, 0, j, 5] = value
            placed = True
    return placed


@pytest.mark.parametrize("cache", FLOAT_STORED)
@pytest.mark.parametrize("phase", ["prompt", "window", "chunk", "ragged decode", "shared", "padded chunk"])
@pytest.mark.parametrize("j", [0, 40, 63, 64, 100, 127, 128, 149])
def test_values_that_are_not_finite_reach_only_rows_that_see_them(phase: str, j: int, cache: str) -> None:
    check_spread(phase, j, cache)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prompt", "window", "padded chunk"])
@pytest.mark.parametrize("target", RUNNABLE_TARGETS)
def test_values_that_are_not_finite_on_every_target(target: str, phase: str) -> None:
    """Blocks of other sizes: 95 is the last key of one, 96 the first of the next."""
    for j in (0, 63, 95, 96, 130):
        check_spread(phase, j, "f32", target=target)


def check_spread(phase: str, j: int, cache: str, **keywords: Any) -> None:
    clean_attributes, clean = special_call(phase, cache)
    clean_output = expected(clean_attributes, clean).output
    for side, value in (("key", np.nan), ("value", np.nan), ("value", np.inf), ("value", -np.inf), ("key", np.inf)):
        attributes, inputs = special_call(phase, cache)
        if not put(inputs, side, j, value):
            continue
        wanted = expected(attributes, inputs).output
        touched = wanted != clean_output
        assert touched.any() and not touched.all(), "every call has rows that see row j and rows that do not"
        for strategy in STRATEGIES:
            got = run(attributes, inputs, strategy=strategy, **keywords).output
            assert_same_values(got, wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", FLOAT_STORED)
@pytest.mark.parametrize("step", ["plain", "window", "shared"])
def test_values_that_are_not_finite_in_the_last_block_of_a_step(step: str, cache: str, strategy: str) -> None:
    """All rows of a step see the same keys, to the last one of a block that is not whole, or none before a window."""
    reached = []
    for j in (0, 118, 119, 120, 121, 127, 128, 148, 149):
        attributes, inputs = make_call(cache, total=150)
        attributes["local_window_size"] = 30 if step == "window" else -1
        if step == "shared":
            inputs["key"], inputs["value"] = inputs["key"][:, :0], inputs["value"][:, :0]
        assert put(inputs, "value", j, np.nan)
        wanted = expected(attributes, inputs).output
        assert_same_values(run(attributes, inputs, strategy=strategy).output, wanted)
        reached.append(bool(np.isnan(wanted).any()))
    assert reached == [step != "window"] * 3 + [True] * 6


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", STORED)
def test_nan_in_the_query_stays_in_its_row_and_head(cache: str, strategy: str) -> None:
    attributes, inputs = make_call(cache, tokens=9, total=150)
    inputs["query"][0, 4, 64 + 9] = np.nan
    got = run(attributes, inputs, strategy=strategy).output
    assert np.isnan(got[0, 4, 64:128]).all() and np.isnan(got).sum() == 64
    assert_same_values(got, expected(attributes, inputs).output)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", FLOAT_STORED)
def test_nan_in_one_new_key_stays_in_its_head_and_entry(cache: str, strategy: str) -> None:  # B46
    attributes, inputs = make_call(cache, total=100, batch=2)
    clean = run(attributes, inputs, strategy=strategy)
    inputs["key"][0, 0, 3] = np.nan
    got = run(attributes, inputs, strategy=strategy)
    assert np.isnan(got.output[0, 0, :128]).all()
    np.testing.assert_array_equal(got.output[0, 0, 128:], clean.output[0, 0, 128:])
    np.testing.assert_array_equal(got.output[1], clean.output[1])
    assert np.isnan(got.present_key.astype(np.float32)).sum() == 1


# --- garbage beyond the valid length ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize("phase", ["ragged decode", "padded chunk", "prompt"])
@pytest.mark.parametrize("in_place", [False, True])
def test_garbage_beyond_the_valid_length_is_never_read(phase: str, cache: str, strategy: str, in_place: bool) -> None:
    attributes, inputs = special_call(phase, cache)
    tokens, total = inputs["query"].shape[1], inputs["total_sequence_length"].item()
    batch = len(inputs["seqlens_k"])
    counts = inputs.get("query_seqlens", np.full(batch, tokens))
    inputs["attention_bias"] = np.zeros((batch, 1, tokens, total), np.float32)
    attributes["do_rotary"] = 1
    inputs["cos_cache"] = inputs["sin_cache"] = np.full((total, 32), 0.7, np.float32)
    lengths = inputs["seqlens_k"] + 1
    inputs["position_ids"] = np.minimum(lengths[:, None] - counts[:, None] + np.arange(tokens), total - 1)
    wanted = expected(attributes, inputs)
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for name in ("past_key", "past_value"):
            garbage = np.nan if cache in FLOAT_STORED else 127
            inputs[name][b, :, length - count :] = garbage
        inputs["attention_bias"][b, ..., length:] = np.nan
        inputs["position_ids"][b, count:] = -(2**60)
        for name in ("query", "key", "value"):
            inputs[name][b, count:] = np.nan
    got = run(attributes, inputs, strategy=strategy, in_place=in_place)
    assert_close(got.output, wanted.output)
    if not in_place:
        assert_same_cache(got, wanted)
