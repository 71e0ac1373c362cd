"""Known faults of NaN, infinity and 16-bit range: each test is the smallest case that showed one."""

from __future__ import annotations

import numpy as np
import pytest
from known_fault_calls import FORMATS, STRATEGIES, checked, coded, operate, stored
from operator_calls import assert_close
from reference_calls import random

from gqa_tvm.targets import FALLBACKS, architecture, missing_features

RUNNABLE = [target for target in FALLBACKS.get(architecture(), ("generic",)) if not missing_features(target)]

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_format = pytest.mark.parametrize("cache", FORMATS)


@each_strategy
@each_format
@pytest.mark.parametrize("rest", [{}, {"softcap": 1.0}, {"smooth_softmax": 1}, {"head_sink": np.ones(1, np.float32)}])
def test_fully_masked_row_is_zero(rest, cache, strategy):  # B44
    new, past = random(1, 1, 1, 8), coded(cache, random(1, 1, 3, 8), 0.5)
    bias = np.full((1, 1, 1, 4), -np.inf, np.float32)
    rest = rest | stored(cache, step=0.5) | {"strategy": strategy}
    assert not checked(new, new, new, past, past, attention_bias=bias, **rest).output.any()
    assert operate(new, new, new, past, past, **rest).output.any()


@each_strategy
@pytest.mark.parametrize("entry", [0, 1])
def test_nan_stays_in_its_head_and_rows(entry, strategy):  # B46
    query, key, value = random(2, 3, 4, 8), random(2, 3, 2, 8), random(2, 3, 2, 8, seed=1)
    clean = operate(query, key, value, strategy=strategy).output.reshape(2, 3, 4, 8)
    key[entry, 1, 0, 0] = np.nan
    got = operate(query, key, value, strategy=strategy).output.reshape(2, 3, 4, 8)
    sees_it = np.zeros((2, 3, 4), bool)
    sees_it[entry, 1:, :2] = True
    assert np.isnan(got[sees_it]).all()
    np.testing.assert_array_equal(got[~sees_it], clean[~sees_it])


@pytest.mark.slow
@each_strategy
@pytest.mark.parametrize(("head_size", "number"), [(512, 16), (8, 300)])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_scores_beyond_float16(head_size, number, scale, strategy):  # B47
    new = np.full((1, 1, 1, head_size), number, np.float16)
    past = np.full((1, 1, 3, head_size), number, np.float16)
    past[:, :, 1] = 0
    values = np.array([1, 2, 3], np.float16)[None, None, :, None] * np.ones(head_size, np.float16)
    got = operate(new, new, 0 * new + 4, past, values, scale=scale, strategy=strategy).output
    # Equal scores of tokens 0, 2 and 3; the one of token 1 is lower by tens of thousands.
    assert got.dtype == np.float16
    np.testing.assert_allclose(got.astype(np.float64), (1 + 3 + 4) / 3, rtol=1e-3)


@pytest.mark.slow
@each_strategy
def test_accumulators_beyond_float16(strategy):  # B48
    total = 40_000
    new, past = np.zeros((1, 1, 1, 8), np.float16), np.zeros((1, 1, total - 1, 8), np.float16)
    big = np.float16(60_000)
    got = operate(new, new, new + big, past, past + big, strategy=strategy).output
    np.testing.assert_array_equal(got, np.full((1, 1, 8), big))


@each_strategy
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [1, 3])
def test_garbage_behind_the_rows(tokens, garbage, strategy):  # B50
    total, capacity = 6, 16
    query, key, value = (random(1, tokens, 1, 8, seed=seed) for seed in range(3))
    keys, values = random(1, 1, capacity, 8, seed=3), random(1, 1, capacity, 8, seed=4)
    wanted = checked(query, key, value, keys, values, total=total, strategy=strategy).output
    # The slots about to be written too.
    keys[:, :, total - tokens :], values[:, :, total - tokens :] = garbage, garbage
    presents = {"present_key": keys, "present_value": values}
    got = operate(query, key, value, keys, values, total=total, strategy=strategy, **presents).output
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
@each_strategy
@pytest.mark.parametrize("target", RUNNABLE)
def test_float16_equals_float32_within_its_rounding(target, strategy):  # B130
    for tokens, past in ((1, 70), (40, 0), (7, 130)):
        query, key, value = (random(1, tokens, 1, 8, seed=seed).astype(np.float16) for seed in range(3))
        old = [random(1, 1, past, 8, seed=seed).astype(np.float16) for seed in (3, 4)]
        rest = {"strategy": strategy, "target": target}
        got = operate(query, key, value, *old, **rest)
        wide = operate(*(x.astype(np.float32) for x in (query, key, value, *old)), **rest)
        assert_close(got.output.astype(np.float32), wide.output, 2.0**-11)
        np.testing.assert_array_equal(got.present_key, wide.present_key.astype(np.float16))


@pytest.mark.slow
@pytest.mark.parametrize("target", RUNNABLE)
def test_float16_rounding_of_the_cache(target):  # B130
    # Halves of the last bit on both sides, subnormals, the largest, and what overflows.
    edges = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 3 * 2.0**-25, 65519.9, 65520, -70000, 2.0**-14]
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(16 * 8 - 8) * 2.0 ** rng.integers(-26, 17, 16 * 8 - 8)
    key = np.concatenate([edges, spread]).astype(np.float32).reshape(1, 16, 1, 8)
    past = np.zeros((1, 1, 0, 8), np.float16)
    got = operate(0 * key, key, key, past, past, strategy="naive", target=target).present_key
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got[0, 0], key[0, :, 0].astype(np.float16))
