"""The NumPy reference's q/k norm, 16-bit rounding and infinities on cases worked out by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference_calls import Array, attention, random

from gqa_tvm.reference import rms_norm, rotate

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALF_DTYPES = [np.dtype(np.float16), BFLOAT16]
ONES = np.ones(8, np.float32)


def keys_of(result: Any) -> Array:
    keys: Array = result.present_key.swapaxes(1, 2)
    return keys


# --- q/k norm ---


def test_norm_of_a_known_vector() -> None:
    x = np.array([3, 4, 0, 0], np.float32)
    weight = np.array([1, 2, 5, -1], np.float32)
    # The mean square is 25 / 4, and with epsilon 2.75 it is 9.
    np.testing.assert_allclose(rms_norm(x, weight, 2.75), [1, 8 / 3, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-30), [1.2, 3.2, 0, 0], rtol=1e-6)


def test_norm_rounds_after_each_product() -> None:
    x, weight = random(500, 8), random(8, seed=1)
    squares = np.array([sum(float(v) ** 2 for v in row) for row in x])
    inverse = (1 / np.sqrt(squares / 8 + float(np.float32(1e-6)))).astype(np.float32)
    expected = (x * inverse[:, None]).astype(np.float32) * weight
    assert np.array_equal(rms_norm(x, weight, 1e-6), expected)


def test_norm_epsilon_is_float32() -> None:
    epsilon = 1e-45
    x = np.full(8, 1e-30, np.float32)
    expected = 1e-30 / np.sqrt(float(np.float32(epsilon)))
    np.testing.assert_allclose(rms_norm(x, ONES, epsilon), expected, rtol=1e-6)


def test_norm_survives_the_squares_of_large_and_small_numbers() -> None:
    for size in (1e30, 1e-30):
        x = np.full(8, size, np.float32)
        np.testing.assert_allclose(rms_norm(x, ONES, 1e-38), 1 if size > 1 else size * 1e19, rtol=1e-6)


@pytest.mark.parametrize("do_rotary", [0, 1])
def test_norm_comes_before_the_rotation_and_leaves_values(do_rotary: int) -> None:
    query, key, value = random(1, 3, 4, 8), random(1, 3, 2, 8), random(1, 3, 2, 8, seed=1)
    q_weight, k_weight = random(8), random(8, seed=1)
    rest: dict[str, Any] = {"cos_cache": random(5, 4), "sin_cache": random(5, 4, seed=1), "do_rotary": do_rotary}
    weights = {"q_norm_weight": q_weight, "k_norm_weight": k_weight}
    result = attention(query, key, value, **weights, **rest)
    normed = rms_norm(query, q_weight, 1e-6), rms_norm(key, k_weight, 1e-6)
    expected = attention(*normed, value, **rest)
    assert np.array_equal(result.output, expected.output)
    assert np.array_equal(result.present_key, expected.present_key)
    assert np.array_equal(result.present_value, value.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("epsilons", "q_epsilon", "k_epsilon"),
    [
        ({}, 1e-6, 1e-6),
        ({"qk_norm_epsilon": 0.5}, 0.5, 0.5),
        ({"qk_norm_epsilon": 0.5, "q_norm_epsilon": 2.0}, 2.0, 0.5),
        ({"qk_norm_epsilon": 0.5, "k_norm_epsilon": 2.0}, 0.5, 2.0),
    ],
)
def test_each_side_may_have_its_epsilon(epsilons: dict[str, float], q_epsilon: float, k_epsilon: float) -> None:
    query, key = random(1, 2, 1, 8), random(1, 2, 1, 8, seed=1)
    result = attention(query, key, key, q_norm_weight=ONES, k_norm_weight=ONES, **epsilons)
    expected = attention(rms_norm(query, ONES, q_epsilon), rms_norm(key, ONES, k_epsilon), key)
    assert np.array_equal(result.output, expected.output)


def test_shared_keys_are_not_normed_again() -> None:
    query, past, empty = random(1, 1, 2, 8), random(1, 1, 4, 8), np.zeros((1, 0, 1, 8), np.float32)
    result = attention(query, empty, empty, past, past, total=4, q_norm_weight=ONES, k_norm_weight=2 * ONES)
    expected = attention(rms_norm(query, ONES, 1e-6), empty, empty, past, past, total=4)
    assert np.array_equal(result.output, expected.output)
    assert np.array_equal(result.present_key, past)


# --- 16-bit dtypes ---


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [0, 1])
def test_norm_and_rotation_round_once(dtype: np.dtype[Any], interleaved: int) -> None:
    key, weight = random(1, 40, 1, 8).astype(dtype), random(8, seed=1).astype(dtype)
    cos, sin = (random(40, 3, seed=seed).astype(dtype) for seed in (2, 3))
    rest: dict[str, Any] = {"cos_cache": cos, "sin_cache": sin, "do_rotary": 1, "rotary_interleaved": interleaved}
    result = attention(key, key, key, q_norm_weight=weight, k_norm_weight=weight, **rest)
    normed = rms_norm(key, weight, 1e-6)
    once = rotate(normed, cos, sin, np.arange(40)[None], interleaved == 1).astype(dtype)
    twice = rotate(normed.astype(dtype), cos, sin, np.arange(40)[None], interleaved == 1).astype(dtype)
    assert keys_of(result).dtype == dtype
    assert np.array_equal(keys_of(result), once) and not np.array_equal(once, twice)


@pytest.mark.parametrize("query_dtype", [np.dtype(np.float32), *HALF_DTYPES], ids=str)
@pytest.mark.parametrize("cache_dtype", [np.dtype(np.float32), *HALF_DTYPES], ids=str)
def test_cache_keeps_its_dtype(query_dtype: np.dtype[Any], cache_dtype: np.dtype[Any]) -> None:
    new = random(1, 2, 1, 8).astype(query_dtype)
    cos, sin = (random(5, 4, seed=seed).astype(query_dtype) for seed in (1, 2))
    past = random(1, 1, 3, 8, seed=1).astype(cache_dtype)
    rest: dict[str, Any] = {"cos_cache": cos, "sin_cache": sin, "do_rotary": 1}
    result = attention(new, new, new, past, past, **rest)
    rotated = rotate(new, cos, sin, np.array([[3, 4]]), False).astype(query_dtype).astype(np.float32)
    assert result.present_key.dtype == result.present_value.dtype == cache_dtype
    assert np.array_equal(keys_of(result)[:, 3:], rotated.astype(cache_dtype))
    assert np.array_equal(result.present_key[:, :, :3], past)
    widened = (x.astype(np.float32) for x in (result.present_key, result.present_value))
    empty = np.zeros((1, 0, 1, 8), np.float32)
    for b, (keys, values) in enumerate(zip(*widened, strict=True)):
        last = attention(rotated[:, 1:], empty, empty, keys[None], values[None], total=5)
        np.testing.assert_allclose(result.output[b, 1], last.output[0, 0], rtol=1e-12)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_codes_of_the_rounded_rotation(dtype: np.dtype[Any]) -> None:
    key = random(1, 40, 1, 8).astype(dtype)
    cos, sin = (random(40, 4, seed=seed).astype(dtype) for seed in (1, 2))
    step = np.array([0.001], np.float32)
    rest: dict[str, Any] = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    rest |= {"k_scale": step, "v_scale": step, "cos_cache": 0.1 * cos, "sin_cache": 0.1 * sin, "do_rotary": 1}
    rest |= {name: rest[name].astype(dtype) for name in ("cos_cache", "sin_cache")}
    rotated = rotate(key, rest["cos_cache"], rest["sin_cache"], np.arange(40)[None], False)
    codes = [np.clip(np.rint(x.astype(np.float32) * (1 / step)), -128, 127) for x in (rotated.astype(dtype), rotated)]
    actual = keys_of(attention(key, key, key, **rest))
    assert np.array_equal(actual, codes[0]) and not np.array_equal(*codes)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_nan_and_overflow_of_16_bits(dtype: np.dtype[Any]) -> None:
    new = random(1, 1, 1, 8)
    new[..., :3] = np.nan, 3e38, -3.4e38
    past = np.zeros((1, 1, 0, 8), dtype)
    row = attention(new, new, new, past, past).present_key[0, 0, 0].astype(np.float32)
    assert np.isnan(row[0])
    assert np.isinf(row[1]) == (dtype == np.float16) and row[2] == -np.inf


# --- not finite ---


@pytest.mark.parametrize(("sink", "spoilt"), [(-np.inf, False), (np.inf, True), (np.nan, True)])
def test_sink_that_is_not_finite(sink: float, spoilt: bool) -> None:
    query, key = random(1, 3, 2, 8), random(1, 3, 1, 8)
    output = attention(query, key, key, head_sink=np.array([sink, 0], np.float32)).output.reshape(3, 2, 8)
    assert np.isnan(output[:, 0]).all() == spoilt
    assert np.isfinite(output[:, 1]).all()
    if not spoilt:
        plain = attention(query, key, key).output.reshape(3, 2, 8)
        np.testing.assert_allclose(output[:, 0], plain[:, 0], rtol=1e-14)


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_bias_that_is_not_finite_spoils_the_rows_that_see_it(number: float) -> None:
    query, key = random(1, 4, 1, 8), random(1, 4, 1, 8)
    bias = np.zeros((1, 1, 4, 4), np.float32)
    bias[..., 2] = number
    output = attention(query, key, key, attention_bias=bias, local_window_size=2).output[0]
    assert np.isnan(output).all(axis=1).tolist() == [False, False, True, True]
    bias[0, 0, 3, 2] = 0
    output = attention(query, key, key, attention_bias=bias, local_window_size=2).output[0]
    assert np.isnan(output).any(axis=1).tolist() == [False, False, True, False]
