"""Known faults of softcap, bias, sinks and the score output: each test is the smallest case that showed one."""

from __future__ import annotations

import numpy as np
import pytest
from known_fault_calls import FORMATS, STRATEGIES, checked, coded, operate, stored
from operator_calls import assert_close
from reference_calls import attention, random

from gqa_tvm import InvalidArgument

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_format = pytest.mark.parametrize("cache", FORMATS)


@each_strategy
@each_format
@pytest.mark.parametrize("masked", [-1e9, -np.inf])
def test_softcap_comes_before_the_mask(masked, cache, strategy):  # B34
    query, key = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)
    values = np.zeros((1, 1, 3, 8), np.float32)
    values[:, :, 1] = 1000
    past = coded(cache, random(1, 1, 3, 8), 0.5), coded(cache, values, 0.5)
    bias = np.array([0, masked, 0, 0], np.float32).reshape(1, 1, 1, 4)
    rest = stored(cache, step=0.5) | {"strategy": strategy, "softcap": 5.0}
    assert not checked(query, key, 0 * key, *past, attention_bias=bias, **rest).output.any()
    assert checked(query, key, 0 * key, *past, **rest).output.all()


@each_strategy
@each_format
@pytest.mark.parametrize("shape", [(2, 1, 2, 5), (1, 4, 2, 5), (1, 1, 2, 5)])
def test_bias_of_fewer_heads_or_entries(shape, cache, strategy):  # B36
    query, key, value = random(2, 2, 4, 8), random(2, 2, 2, 8), random(2, 2, 2, 8, seed=1)
    past = coded(cache, random(2, 2, 3, 8), 0.5)
    bias = random(*shape)
    whole = np.ascontiguousarray(np.broadcast_to(bias, (2, 4, 2, 5)))
    rest = stored(cache, 2, step=0.5) | {"strategy": strategy, "query_seqlens": np.array([2, 2], np.int32)}
    got = checked(query, key, value, past, past, attention_bias=bias, **rest).output
    np.testing.assert_array_equal(got, operate(query, key, value, past, past, attention_bias=whole, **rest).output)
    assert np.abs(got - operate(query, key, value, past, past, **rest).output).max() > 1e-2


@each_strategy
@each_format
def test_bias_belongs_to_query_heads(cache, strategy):  # B37, B95
    query, key, bias = random(3, 8, 8, 8), random(3, 8, 2, 8), random(3, 8, 8, 8)
    rest = {"strategy": strategy, "attention_bias": bias}
    got = checked(query, key, key, **stored(cache, 2, step=0.5), **rest)
    repeated = np.repeat(key, 4, axis=2)
    assert_close(got.output, operate(query, repeated, repeated, **stored(cache, 8, step=0.5), **rest).output)
    assert np.abs(got.output - operate(query, key, key, **stored(cache, 2, step=0.5)).output).max() > 0.1


@each_strategy
@each_format
@pytest.mark.parametrize("steps", [[1] * 12, [3, 8, 1]], ids=str)
def test_bias_columns_are_positions_after_eviction(steps, cache, strategy):  # B38
    tokens, capacity, window = 12, 6, 4
    query, key, value = (random(1, tokens, 1, 8, seed=seed) for seed in range(3))
    rest = stored(cache, step=0.5) | {"strategy": strategy, "local_window_size": window}
    bias = random(1, 1, tokens, tokens)
    whole = checked(query, key, value, attention_bias=bias, **rest).output
    past, done = [coded(cache, np.zeros((1, 1, capacity, 8), np.float32))] * 2, 0
    for step in steps:
        new = np.s_[:, done : done + step]
        part = np.ascontiguousarray(bias[:, :, done : done + step, : done + step])
        done += step
        call = rest | {"attention_bias": part, "total": done, "sliding_window_cache": 1}
        result = checked(query[new], key[new], value[new], *past, **call)
        past = [result.present_key, result.present_value]
        assert_close(result.output, whole[new])


SINKS = [
    (0.0, 0, 4 / 5),
    (np.log(4), 0, 4 / 8),
    (100.0, 0, 4 * np.exp(-100)),
    (-np.inf, 0, 1.0),
    (-np.inf, -50, 1.0),
    (-50.0, -50, 4 / 5),
    (0.0, -50, 4 * np.exp(-50) / (1 + 4 * np.exp(-50))),
]


@each_strategy
@each_format
@pytest.mark.parametrize(("sink", "score", "wanted"), SINKS)
def test_sink_joins_the_maximum(sink, score, wanted, cache, strategy):  # B39
    ones = np.ones((1, 1, 4, 8), np.float32)
    new, past = ones[:, :, :1], coded(cache, ones[:, :, 1:])
    rest = {
        "attention_bias": np.full((1, 1, 1, 4), score, np.float32),
        "head_sink": np.array([sink], np.float32),
        "strategy": strategy,
    }
    output = checked(0 * new, new, new, past, past, **rest, **stored(cache)).output
    # 4 exp(-100) is no normal float32; zero is as good. A score in bits is rounded: 72.1 by up to 4e-6.
    np.testing.assert_allclose(output, wanted, rtol=3e-6, atol=1e-37)


@each_format
@pytest.mark.parametrize("total", [4096, 1024, 1025, 8193, 17 * 1024])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sink_joins_once_for_any_split(total, threads, cache):  # B40
    ones = np.ones((1, 1, total, 8), np.float32)
    new, past = ones[:, :, :1], coded(cache, ones[:, :, 1:])
    sink = np.array([np.log(total)], np.float32)
    for strategy in STRATEGIES:
        rest = stored(cache) | {"head_sink": sink, "strategy": strategy, "num_threads": threads}
        output = operate(0 * new, new, new, past, past, **rest).output
        np.testing.assert_allclose(output, 0.5, rtol=2e-6)


@each_format
def test_score_output(cache):  # B42
    query, key, value = random(1, 2, 2, 8), random(1, 2, 1, 8, seed=1), random(1, 2, 1, 8, seed=2)
    past = coded(cache, random(1, 1, 2, 8), 0.5)
    rest = stored(cache, step=0.5) | {"softcap": 2.0, "attention_bias": np.ones((1, 1, 2, 4), np.float32)}
    before, after = (checked(query, key, value, past, past, qk_output=mode, **rest).output_qk for mode in (1, 2))
    assert before.shape == after.shape == (1, 2, 2, 4)
    if cache == "f32":
        keys = np.concatenate([past[0, 0], key[0, :, 0]]).astype(np.float64)
        capped = 2 * np.tanh(query[0].swapaxes(0, 1) @ keys.T / np.sqrt(8) / 2) + 1
        assert_close(before[0], np.where(np.tri(2, 4, 2), capped, 0))
    for mode, got in ((1, before), (2, after)):
        assert_close(got, attention(query, key, value, past, past, qk_output=mode, **rest).output_qk)
        assert not got[:, :, 0, 3].any()
    assert_close(after.sum(axis=-1), np.ones((1, 2, 2)), 1e-6)
    assert operate(query, key, value, past, past, **rest).output_qk is None


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((2, 4, 2, 4), "f4", "dimension 3 must be equal to total_sequence_length, got 4"),
        ((2, 4, 2, 10), "f4", "dimension 3 must be equal to total_sequence_length, got 10"),
        ((2, 2, 2, 5), "f4", "dimension 1 must be equal to the num heads or 1, got 2"),
        ((3, 4, 2, 5), "f4", "dimension 0 must be equal to the batch size or 1, got 3"),
        ((2, 4, 1, 5), "f4", "dimension 2 must be equal to the sequence length, got 1"),
        ((4, 2, 5), "f4", "must be a 4D tensor, got 3"),
        ((2, 4, 2, 5), "f8", "must be float32, the type of 'query', got float64"),
    ],
)
def test_bias_of_other_shapes_is_refused(shape, dtype, words):  # B95
    query, key, past = random(2, 2, 4, 8), random(2, 2, 2, 8), random(2, 2, 3, 8)
    rest = {"query_seqlens": np.array([2, 2], np.int32), "attention_bias": np.zeros(shape, dtype)}
    with pytest.raises(InvalidArgument, match=words):
        operate(query, key, key, past, past, **rest)
