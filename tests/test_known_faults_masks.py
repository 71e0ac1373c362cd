"""Known faults of causal and window masks: each test is the smallest case that showed one."""

from __future__ import annotations

import numpy as np
import pytest
from known_fault_calls import FORMATS, STRATEGIES, checked, coded, operate, ramp, stored
from reference_calls import random

from gqa_tvm import GroupQueryAttention, InvalidArgument

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_format = pytest.mark.parametrize("cache", FORMATS)


@each_strategy
@each_format
@pytest.mark.parametrize(
    ("window", "rows"), [(1, [0, 1, 2, 3, 4]), (2, [0, 0.5, 1.5, 2.5, 3.5]), (3, [0, 0.5, 1, 2, 3])]
)
def test_window_counts_the_token_itself(window, rows, cache, strategy):  # B01
    numbers = ramp(np.arange(5), 5, cache, local_window_size=window, strategy=strategy)
    np.testing.assert_allclose(numbers, rows, rtol=1e-6)


@each_strategy
@pytest.mark.parametrize("window", [63, 64, 65, 72, 73, 74, 100, 128, 137, 200])
def test_window_drops_single_keys_not_blocks(window, strategy):  # B04
    values = np.arange(201)
    got = ramp(values, 1, local_window_size=window, strategy=strategy)
    np.testing.assert_allclose(got, values[-window:].mean(), rtol=1e-6)
    if window == 100:
        assert got == 150.5


@each_strategy
@pytest.mark.parametrize("cache", FORMATS[1:])
def test_window_drops_single_codes_not_blocks(cache, strategy):  # B04
    values = np.arange(201) % 8
    got = ramp(values, 1, cache, local_window_size=100, strategy=strategy)
    np.testing.assert_allclose(got, values[101:].mean(), rtol=1e-6)


@each_strategy
@each_format
@pytest.mark.parametrize("by", ["window", "bias"])
def test_rows_whose_first_blocks_are_masked(by, cache, strategy):  # B05
    tokens, window = 640, 10
    query, key, value = (random(1, tokens, 1, 8, seed=seed) for seed in range(3))
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    band = {"local_window_size": window}
    if by == "bias":
        band = {"attention_bias": np.where(distance < window, 0, -np.inf).astype(np.float32)[None, None]}
    assert np.isfinite(checked(query, key, value, **band, **stored(cache, step=0.5), strategy=strategy).output).all()


@each_strategy
@each_format
def test_mask_is_aligned_bottom_right(cache, strategy):  # B07
    np.testing.assert_allclose(ramp(np.arange(5), 2, cache, strategy=strategy), [1.5, 2.0], rtol=1e-6)


@each_strategy
@each_format
@pytest.mark.parametrize("past", [63, 64, 65, 128])
def test_later_tokens_of_a_chunk_stay_unseen(past, cache, strategy):  # B08
    query, key, value = (random(1, 5, 2, 8, seed=seed) for seed in range(3))
    old = [coded(cache, random(1, 2, past, 8, seed=seed), 0.5) for seed in (3, 4)]
    rest = stored(cache, 2, step=0.5) | {"strategy": strategy}
    before = checked(query, key, value, *old, **rest).output
    key[:, 1:], value[:, 1:] = -3 * key[:, 1:], 3 + value[:, 1:]
    after = checked(query, key, value, *old, **rest).output
    np.testing.assert_array_equal(before[:, 0], after[:, 0])
    assert (before[:, 1:] != after[:, 1:]).all()


FEATURES = [
    {"local_window_size": 2},
    {"smooth_softmax": 1},
    {"head_sink": np.ones(2, np.float32)},
    {"softcap": 0.5},
    {"scale": 2.0},
    {"causal": 0},
    {"attention_bias": random(1, 1, 4, 6)},
    {"sliding_window_cache": 1, "local_window_size": 2},
    {"q_norm_weight": random(8), "k_norm_weight": random(8, seed=1)},
    {"query_seqlens": np.array([3], np.int32)},
]


@each_strategy
@each_format
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: next(iter(feature)))
def test_no_feature_is_ignored(feature, cache, strategy):  # B10, B95
    query, key, value = (random(1, 4, 2, 8, seed=seed) for seed in range(3))
    old = [coded(cache, random(1, 2, 6, 8, seed=seed), 0.5) for seed in (3, 4)]
    rest = stored(cache, 2, step=0.5) | {"strategy": strategy, "total": 6, "totals": [5]}
    with_it = checked(query, key, value, *old, **feature, **rest).output
    assert np.abs(with_it - operate(query, key, value, *old, **rest).output).max() > 1e-3


@each_strategy
@each_format
@pytest.mark.parametrize("total", [1, 15, 16, 17, 63, 64, 65, 95, 96, 97, 127, 128, 129, 257])
def test_all_keys_and_no_more_without_causal(total, cache, strategy):  # B11
    got = ramp(np.ones(total), 1, cache, causal=0, strategy=strategy)
    # The denominator's reciprocal may cost one bit; a lane too many costs 1 / total.
    assert abs(got[0] - 1) <= (0 if total == 257 else 2.0**-23)


@pytest.mark.parametrize("window", [4, 0, 1])
def test_window_without_causal_is_refused(window):  # B13
    with pytest.raises(InvalidArgument, match="local_window_size must be -1 when causal is 0"):
        GroupQueryAttention(num_heads=1, kv_num_heads=1, causal=0, local_window_size=window)
