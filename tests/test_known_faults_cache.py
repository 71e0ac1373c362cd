"""Known faults of growing, shared and sliding caches: each test is the smallest case that showed one."""

from __future__ import annotations

import numpy as np
import pytest
from known_fault_calls import FORMATS, STRATEGIES, checked, coded, operate, stored
from operator_calls import assert_close
from reference_calls import random

from gqa_tvm import GroupQueryAttention, InvalidArgument
from gqa_tvm.sliding_window import can_rewind

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_format = pytest.mark.parametrize("cache", FORMATS)


@each_format
def test_growing_cache(cache):  # B79
    rest = stored(cache, step=0.5)
    steps = [[random(1, 1, 1, 8, seed=3 * step + part) for part in range(3)] for step in range(10)]
    past = coded(cache, random(1, 1, 3, 8), 0.5)
    keys, values = past, past
    for query, key, value in steps:
        before = keys.copy()
        presents = {
            "present_key": np.empty_like(keys, shape=(1, 1, keys.shape[2] + 1, keys.shape[3])),
            "present_value": np.empty_like(keys, shape=(1, 1, keys.shape[2] + 1, keys.shape[3])),
        }
        got = checked(query, key, value, keys, values, **presents, **rest)
        np.testing.assert_array_equal(keys, before)
        assert got.present_key is presents["present_key"]
        keys, values = got.present_key, got.present_value
    assert keys.shape[2] == 13
    np.testing.assert_array_equal(keys[:, :, :3], past)


def test_present_that_overlaps_the_past_is_refused():  # B79
    new, buffer = random(1, 1, 1, 8), random(1, 1, 8, 8)
    for past, present in ((buffer[:, :, :3], buffer[:, :, :4]), (buffer[:, :, :4], buffer[:, :, 1:5])):
        before = buffer.copy()
        with pytest.raises(InvalidArgument, match="overlaps past_key without being the same array"):
            operate(new, new, new, past, past.copy(), total=4, present_key=present)
        np.testing.assert_array_equal(buffer, before)


@each_format
def test_shared_buffer_changes_by_new_rows_alone(cache):  # B80
    rest = stored(cache, step=0.5)
    keys, values = (coded(cache, random(1, 1, 64, 8, seed=seed), 0.5) for seed in range(2))
    for total in range(4, 24):
        query, key, value = (random(1, 1, 1, 8, seed=3 * total + part) for part in range(3))
        before = keys.copy(), values.copy()
        got = checked(query, key, value, keys, values, total=total, present_key=keys, present_value=values, **rest)
        assert got.present_key is keys and got.present_value is values
        for array, old in zip((keys, values), before, strict=True):
            assert np.flatnonzero((array != old).any(axis=(0, 1, 3))).tolist() == [total - 1]


@each_strategy
def test_first_step_over_the_window(strategy):  # B82
    tokens, window = 6, 4
    query, key, value = (random(1, tokens, 1, 8, seed=seed) for seed in range(3))
    whole = checked(query, key, value, local_window_size=window, strategy=strategy).output
    past = [np.full((1, 1, window, 8), np.nan, np.float32) for _ in range(2)]
    done = 0
    for step in (3, 1, 1, 1):
        new = np.s_[:, done : done + step]
        done += step
        rest = {"sliding_window_cache": 1, "local_window_size": window, "total": done, "strategy": strategy}
        result = operate(query[new], key[new], value[new], *past, **rest)
        past = [result.present_key, result.present_value]
        assert_close(result.output, whole[new])


@each_strategy
@each_format
def test_rewound_cache(cache, strategy):  # B83
    rest = stored(cache, step=0.5) | {"strategy": strategy}
    query, key, value = (random(1, 10, 1, 8, seed=seed) for seed in range(3))
    other = [random(1, 1, 1, 8, seed=seed) for seed in (3, 4, 5)]
    full, six = (checked(query[:, :n], key[:, :n], value[:, :n], **rest) for n in (10, 6))
    got = checked(*other, full.present_key, full.present_value, total=7, **rest)
    fresh = checked(*other, six.present_key, six.present_value, **rest)
    np.testing.assert_array_equal(got.output, fresh.output)


def test_rewinding_a_sliding_window():  # B83
    capacity, window = 6, 3
    rest = {"sliding_window_cache": 1, "local_window_size": window}
    query, key, value = (random(1, 12, 1, 8, seed=seed) for seed in range(3))

    def cache_of(tokens):
        past, result = [np.zeros((1, 1, capacity, 8), np.float32)] * 2, None
        for t in range(tokens):
            now = np.s_[:, t : t + 1]
            result = checked(query[now], key[now], value[now], *past, total=t + 1, **rest)
            past = [result.present_key, result.present_value]
        return past

    other = [random(1, 1, 1, 8, seed=seed) for seed in (3, 4, 5)]
    outcomes = set()
    for total in range(1, 13):
        for dropped in range(1, total):
            shorter = total - dropped
            rewound, fresh = (operate(*other, *cache_of(t), total=shorter + 1, **rest) for t in (total, shorter))
            same = np.array_equal(rewound.output, fresh.output)
            outcomes.add(can_rewind(total, dropped, capacity, window))
            assert same == can_rewind(total, dropped, capacity, window)
    assert outcomes == {True, False}


@each_strategy
def test_windows_of_two_layers(strategy):  # B85
    query, key, value = (random(1, 12, 1, 8, seed=seed).reshape(1, 12, 8) for seed in range(3))
    lengths = np.array([11], np.int32), np.array([12], np.int32)
    layers = [
        GroupQueryAttention(num_heads=1, kv_num_heads=1, local_window_size=window, strategy=strategy)
        for window in (4, -1)
    ]
    alone = [layer(query, key, value, None, None, *lengths).output for layer in layers]
    assert np.abs(alone[0][:, 4:] - alone[1][:, 4:]).max() > 0.1
    np.testing.assert_array_equal(alone[0][:, :4], alone[1][:, :4])
    for _ in range(3):
        for layer, wanted in zip(layers, alone, strict=True):
            np.testing.assert_array_equal(layer(query, key, value, None, None, *lengths).output, wanted)


@each_format
@pytest.mark.parametrize("slack", [1, 2, 7])
def test_rows_move_once_every_slack_steps(slack, cache):  # B125
    window, steps = 5, 40
    capacity = window + slack - 1
    rest = stored(cache, step=0.5) | {"sliding_window_cache": 1, "local_window_size": window}
    keys, values = (coded(cache, np.zeros((1, 1, capacity, 8), np.float32)) for _ in range(2))
    moved = []
    for total in range(1, steps + 1):
        query, key, value = (random(1, 1, 1, 8, seed=3 * total + part) for part in range(3))
        before = keys[:, :, 0].copy()
        presents = {"present_key": keys, "present_value": values}
        operate(query, key, value, keys, values, total=total, **presents, **rest)
        if total > 1 and (keys[:, :, 0] != before).any():
            moved.append(total)
    assert moved == list(range(capacity + 1, steps + 1, slack))
