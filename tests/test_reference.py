"""The NumPy reference on masks, rotation and scores small enough to be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference_calls import Array, attention, ramp, random

from gqa_tvm.reference import rotate, visible_keys

# --- masks ---


@pytest.mark.parametrize(
    ("window", "rows"),
    [(1, [0, 1, 2, 3, 4]), (2, [0, 0.5, 1.5, 2.5, 3.5]), (3, [0, 0.5, 1, 2, 3])],
)
def test_window_counts_the_token_itself(window: int, rows: list[float]) -> None:  # B01
    np.testing.assert_allclose(ramp(5, local_window_size=window), rows)


def test_window_drops_single_keys() -> None:  # B04
    np.testing.assert_allclose(ramp(1, past=200, local_window_size=100), [150.5])


def test_band_by_window_and_by_bias_agree() -> None:  # B05
    tokens, window = 640, 10
    query, key, value = (random(1, tokens, 1, 8, seed=seed) for seed in range(3))
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    bias = np.where(distance < window, 0, -np.inf).astype(np.float32)[None, None]
    by_window = attention(query, key, value, local_window_size=window).output
    by_bias = attention(query, key, value, attention_bias=bias).output
    np.testing.assert_allclose(by_window, by_bias, atol=1e-14)


def test_mask_is_aligned_bottom_right() -> None:  # B07
    np.testing.assert_allclose(ramp(2, past=3), [1.5, 2.0])


@pytest.mark.parametrize("past", [63, 64, 65, 128])
def test_later_tokens_of_a_chunk_stay_unseen(past: int) -> None:  # B08
    query, key, value = (random(1, 5, 2, 8, seed=seed) for seed in range(3))
    old = random(1, 2, past, 8, seed=3), random(1, 2, past, 8, seed=4)
    before = attention(query, key, value, *old).output
    key[:, 1:], value[:, 1:] = np.nan, np.inf
    after = attention(query, key, value, *old).output
    assert np.array_equal(before[:, 0], after[:, 0])


@pytest.mark.parametrize(
    "rest",
    [
        {"local_window_size": 2},
        {"smooth_softmax": 1},
        {"head_sink": np.ones(2, np.float32)},
        {"softcap": 0.5},
        {"scale": 2.0},
        {"causal": 0},
    ],
    ids=lambda rest: next(iter(rest)),
)
def test_no_attribute_is_ignored(rest: dict[str, Any]) -> None:  # B10
    query, key, value = (random(1, 4, 2, 8, seed=seed) for seed in range(3))
    changed = attention(query, key, value, **rest).output
    assert np.abs(changed - attention(query, key, value).output).max() > 1e-3


def test_all_keys_without_causal() -> None:  # B11
    ones = np.ones((1, 1, 257, 8), np.float32)
    new = ones[:, :, :1]
    output = attention(0 * new, new, new, ones[:, :, 1:], ones[:, :, 1:], causal=0).output
    np.testing.assert_allclose(output, 1.0, rtol=1e-14)
    np.testing.assert_allclose(ramp(3, causal=0), [1, 1, 1])


@pytest.mark.parametrize(("window", "causal"), [(4, False), (0, True), (-2, True)])  # B13
def test_impossible_window_is_refused(window: int, causal: bool) -> None:
    with pytest.raises(ValueError, match="local_window_size"):
        visible_keys(0, 0, 1, causal, window)


# --- rotary ---


def rotated_key(key: Array, half: int, **rest: Any) -> tuple[Array, Array, Array]:
    cos, sin = random(16, half, seed=5), random(16, half, seed=6)
    result = attention(key, key, key, cos_cache=cos, sin_cache=sin, do_rotary=1, **rest)
    return result.present_key.swapaxes(1, 2), cos, sin


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("head_size", "half"), [(16, 8), (80, 16), (16, 2), (24, 3), (7, 3)])
def test_rotation_pairs(interleaved: int, head_size: int, half: int) -> None:  # B14, B15, B22
    key = random(1, 2, 1, head_size)
    actual, cos, sin = rotated_key(key, half, rotary_interleaved=interleaved)
    for s in range(2):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            turned = (key[0, s, 0, a] + 1j * key[0, s, 0, b]) * (cos[s, i] + 1j * sin[s, i])
            expected = [turned.real, turned.imag]
            np.testing.assert_allclose(actual[0, s, 0, [a, b]], expected, atol=1e-6)
    assert np.array_equal(actual[..., 2 * half :], key[..., 2 * half :])


def test_rotation_rounds_once() -> None:
    # The exact sum lies just below the middle of two float32 numbers, float64 rounds it to there.
    a, b = np.float32(1 - 2.0**-18), np.float32(-(1 + 2.0**-23))
    cos = np.array([[2.0**-24 * (1 + 2.0**-18)]], np.float32)
    x = np.array([a, b]).reshape(1, 1, 1, 2)
    positions = np.zeros((1, 1), np.int64)
    assert rotate(x, cos, np.ones_like(cos), positions, False)[0, 0, 0, 0] == 1 + 2.0**-23


def test_position_ids_are_used_per_token() -> None:  # B21
    key, past = random(2, 3, 1, 8), random(2, 1, 4, 8)
    cos, sin = random(16, 4, seed=5), random(16, 4, seed=6)
    ids = np.array([[4, 7, 5, 99], [1, 0, 2, 99]])
    tables: dict[str, Any] = {
        "cos_cache": cos,
        "sin_cache": sin,
        "position_ids": ids,
        "do_rotary": 1,
    }
    result = attention(key, key, key, past, past, **tables)
    expected = rotate(key, cos, sin, ids[:, :3], False)
    assert np.array_equal(result.present_key[:, :, 4:].swapaxes(1, 2), expected)


def test_first_prompt_counts_from_the_first_id() -> None:
    key = random(2, 3, 1, 8)
    actual, cos, sin = rotated_key(key, 4, position_ids=np.array([[5, 0, 0], [9, 9, 9]]))
    expected = rotate(key, cos, sin, np.array([[5, 6, 7]] * 2), False)
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("position", [-1, 16, 2**40])
def test_position_outside_the_table_is_refused(position: int) -> None:  # B18
    with pytest.raises(ValueError, match="positions must be in"):
        rotated_key(random(1, 1, 1, 8), 4, position_ids=np.array([[position]]))


# --- scores ---


@pytest.mark.parametrize("masked", [-1e9, -np.inf])
def test_softcap_comes_before_the_bias(masked: float) -> None:  # B34
    query, key = random(1, 1, 1, 8), random(1, 1, 1, 8)
    past_key, past_value = random(1, 1, 3, 8), np.zeros((1, 1, 3, 8), np.float32)
    past_value[:, :, 1] = 1000
    bias = np.array([0, masked, 0, 0], np.float32).reshape(1, 1, 1, 4)
    rest: dict[str, Any] = {"softcap": 5.0, "attention_bias": bias}
    assert not attention(query, key, 0 * key, past_key, past_value, **rest).output.any()


@pytest.mark.parametrize("shape", [(2, 1, 2, 5), (1, 4, 2, 5), (1, 1, 2, 5)])
def test_bias_broadcasts(shape: tuple[int, ...]) -> None:  # B36
    query, key, past = random(2, 2, 4, 8), random(2, 2, 2, 8), random(2, 2, 3, 8)
    bias = random(*shape)
    whole = np.ascontiguousarray(np.broadcast_to(bias, (2, 4, 2, 5)))
    output = attention(query, key, key, past, past, attention_bias=bias).output
    expected = attention(query, key, key, past, past, attention_bias=whole).output
    assert np.array_equal(output, expected)


def test_bias_belongs_to_query_heads() -> None:  # B37
    query, key, bias = random(3, 8, 8, 8), random(3, 8, 2, 8), random(3, 8, 8, 8)
    repeated = np.repeat(key, 4, axis=2)
    output = attention(query, key, key, attention_bias=bias).output
    expected = attention(query, repeated, repeated, attention_bias=bias).output
    np.testing.assert_allclose(output, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("sink", "score", "expected"),
    [
        (0.0, 0, 4 / 5),
        (np.log(4), 0, 4 / 8),
        (100.0, 0, 4 * np.exp(-100)),
        (-np.inf, 0, 1.0),
        (-np.inf, -50, 1.0),
        (-50.0, -50, 4 / 5),
    ],
)
def test_sink_joins_the_denominator(sink: float, score: float, expected: float) -> None:  # B39
    ones = np.ones((1, 1, 4, 8), np.float32)
    new, old = ones[:, :, :1], ones[:, :, 1:]
    rest: dict[str, Any] = {
        "attention_bias": np.full((1, 1, 1, 4), score, np.float32),
        "head_sink": np.array([sink], np.float32),
        "smooth_softmax": 1,
    }
    output = attention(0 * new, new, new, old, old, **rest).output
    np.testing.assert_allclose(output, expected, rtol=1e-6)


def test_sink_joins_once() -> None:  # B40
    ones = np.ones((1, 1, 4096, 8), np.float32)
    new, old = ones[:, :, :1], ones[:, :, 1:]
    sink = np.array([np.log(4096)], np.float32)
    output = attention(0 * new, new, new, old, old, head_sink=sink).output
    np.testing.assert_allclose(output, 0.5, rtol=1e-6)


def test_output_qk() -> None:  # B42
    query, key, past = random(1, 2, 1, 8), random(1, 2, 1, 8), random(1, 1, 2, 8)
    keys = np.concatenate([past[0, 0], key[0, :, 0]]).astype(np.float64)
    rest: dict[str, Any] = {"softcap": 2.0, "attention_bias": np.ones((1, 1, 2, 4), np.float32)}
    raw = query[0, :, 0] @ keys.T / np.sqrt(8)
    expected = np.where(np.tri(2, 4, 2), 2 * np.tanh(raw / 2) + 1, 0)
    before = attention(query, key, key, past, past, qk_output=1, **rest).output_qk
    after = attention(query, key, key, past, past, qk_output=2, **rest).output_qk
    assert before is not None and after is not None
    np.testing.assert_allclose(before[0, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(after.sum(axis=-1), 1, rtol=1e-14)
    assert after[0, 0, 0, 3] == 0
    assert attention(query, key, key).output_qk is None


@pytest.mark.parametrize("rest", [{}, {"softcap": 1.0}, {"smooth_softmax": 1}, {"head_sink": np.ones(1, np.float32)}])
def test_fully_masked_row_is_zero(rest: dict[str, Any]) -> None:  # B44
    new, past = random(1, 1, 1, 8), random(1, 1, 3, 8)
    bias = np.full((1, 1, 1, 4), -np.inf, np.float32)
    result = attention(new, new, new, past, past, attention_bias=bias, qk_output=2, **rest)
    assert result.output_qk is not None
    assert not result.output.any() and not result.output_qk.any()


@pytest.mark.parametrize("value", [-3.4e38, -1e30])
def test_finite_mask_is_a_number(value: float) -> None:
    numbers = ramp(1, past=3, attention_bias=np.full((1, 1, 1, 4), value, np.float32))
    np.testing.assert_allclose(numbers, [1.5])


def test_nan_stays_in_its_head_and_rows() -> None:  # B46
    query, key, value = random(2, 3, 4, 8), random(2, 3, 2, 8), random(2, 3, 2, 8)
    key[0, 1, 0, 0] = np.nan
    output = attention(query, key, value).output.reshape(2, 3, 4, 8)
    spoilt = np.asarray(np.isnan(output).any(axis=-1))
    assert spoilt[0, 1:, :2].all()
    assert spoilt.sum() == 4
