"""Known faults of ragged lengths, padding and chunks: each test is the smallest case that showed one."""

from __future__ import annotations

import numpy as np
import pytest
from known_fault_calls import FORMATS, STRATEGIES, checked, coded, operate, stored
from operator_calls import assert_close
from reference_calls import random

from gqa_tvm import GroupQueryAttention, InvalidArgument

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_format = pytest.mark.parametrize("cache", FORMATS)


def spoil(cache, rows):
    """What no result may depend on: NaN, or the largest codes."""
    rows[...] = np.nan if cache == "f32" else np.iinfo(rows.dtype).max


@each_strategy
@each_format
@pytest.mark.parametrize("causal", [1, 0])
def test_rows_beyond_an_entry_are_never_read(causal, cache, strategy):  # B24
    query, key, value = (random(2, 1, 1, 8, seed=seed) for seed in range(3))
    past = coded(cache, random(2, 1, 5, 8), 0.5)
    spoil(cache, past[1, :, 2:])
    rest = stored(cache, step=0.5) | {"causal": causal, "strategy": strategy}
    result = checked(query, key, value, past, past, totals=[6, 3], **rest)
    assert np.isfinite(result.output).all()
    np.testing.assert_array_equal(result.present_key[1, 0, 2], coded(cache, key[1, 0, 0], 0.5))
    np.testing.assert_array_equal(result.present_key[1, 0, :2], past[1, 0, :2])


@each_strategy
@each_format
def test_padding_of_a_prompt_does_not_leak(cache, strategy):  # B25
    query, key, value = (random(2, 4, 1, 8, seed=seed) for seed in range(3))
    for array in query, key, value:
        array[1, 2:] = np.nan
    rest = stored(cache, step=0.5) | {"strategy": strategy}
    output = operate(query, key, value, totals=[4, 2], **rest).output
    for b, count in enumerate((4, 2)):
        rows = np.s_[b : b + 1, :count]
        alone = checked(query[rows], key[rows], value[rows], **rest).output
        assert np.isfinite(output[rows]).all()
        assert_close(output[rows], alone)


def test_one_past_length_for_several_entries():  # B27
    new, past = random(2, 3, 1, 8), random(2, 1, 4, 8)
    with pytest.raises(
        InvalidArgument, match="batch_size must be 1 when sequence_length > 1 and past context is given"
    ):
        operate(new, new, new, past, past, totals=[7, 5])


@each_strategy
@each_format
def test_chunks_of_several_entries(cache, strategy):  # B27
    query, key, value = (random(2, 3, 1, 8, seed=seed) for seed in range(3))
    past = coded(cache, random(2, 1, 8, 8), 0.5)
    rest = stored(cache, step=0.5) | {"strategy": strategy}
    counts, totals = np.array([3, 1], np.int32), [7, 3]
    result = checked(query, key, value, past, past, totals=totals, total=8, query_seqlens=counts, **rest)
    for b, (count, total) in enumerate(zip(counts, totals, strict=True)):
        new, old = np.s_[b : b + 1, :count], np.s_[b : b + 1, :, : total - count]
        alone = checked(query[new], key[new], value[new], past[old], past[old], **rest)
        assert_close(result.output[b, :count], alone.output[0])
        np.testing.assert_array_equal(result.present_key[b, :, :total], alone.present_key[0])
    assert not result.output[1, 1:].any()


@each_strategy
@each_format
@pytest.mark.parametrize("total", [3, 6])
def test_capacity_is_not_length(total, cache, strategy):  # B29
    query, key, value = (random(1, 1, 1, 8, seed=seed) for seed in range(3))
    past = coded(cache, random(1, 1, 6, 8), 0.5)
    rest = stored(cache, step=0.5) | {"strategy": strategy}
    shared = past.copy()
    result = operate(
        *(query, key, value, shared, shared.copy()),
        **rest | {"totals": [3], "total": total, "present_key": shared},
    )
    alone = checked(query, key, value, past[:, :, :2], past[:, :, :2], **rest)
    assert result.present_key is shared and shared.shape[2] == 6
    assert_close(result.output, alone.output)
    np.testing.assert_array_equal(shared[:, :, 3:], past[:, :, 3:])


@each_strategy
@each_format
def test_prompt_into_a_used_buffer(cache, strategy):  # B30, B50
    query, key, value = (random(1, 4, 1, 8, seed=seed) for seed in range(3))
    keys, values = (coded(cache, np.zeros((1, 1, 16, 8), np.float32)) for _ in range(2))
    spoil(cache, keys)
    spoil(cache, values)
    before = keys.copy()
    rest = stored(cache, step=0.5) | {"strategy": strategy}
    alone = checked(query, key, value, **rest)
    result = operate(query, key, value, keys, values, total=4, present_key=keys, present_value=values, **rest)
    np.testing.assert_array_equal(result.output, alone.output)
    np.testing.assert_array_equal(keys[:, :, :4], alone.present_key)
    np.testing.assert_array_equal(keys[:, :, 4:], before[:, :, 4:])


@each_strategy
@each_format
@pytest.mark.parametrize("tokens", [1, 4])
def test_keys_of_another_layer(tokens, cache, strategy):  # B31
    query, empty = random(1, tokens, 2, 8), np.zeros((1, 0, 1, 8), np.float32)
    past = coded(cache, random(1, 1, 4, 8), 0.5)
    result = checked(query, empty, empty, past, past, total=4, strategy=strategy, **stored(cache, step=0.5))
    np.testing.assert_array_equal(result.present_key, past)
    if cache == "f32":
        # The last token sees all four rows.
        weights = np.exp(query[0, -1] @ past[0, 0].T / np.sqrt(8))
        wanted = weights / weights.sum(axis=1, keepdims=True) @ past[0, 0]
        assert_close(result.output[0, -1].reshape(2, 8), wanted)


def test_arrays_shared_by_layers_stay_as_they_are():  # B33
    query, key, value = (random(2, 1, 2, 8, seed=seed).reshape(2, 1, 16) for seed in range(3))
    past = random(2, 2, 8, 8)
    shared = {
        "seqlens_k": np.array([4, 2], np.int32),
        "total_sequence_length": np.array([5], np.int32),
        "position_ids": np.array([[4], [2]]),
        "cos_cache": random(8, 4),
        "sin_cache": random(8, 4, seed=1),
        "attention_bias": random(2, 1, 1, 5),
    }
    before = {name: array.tobytes() for name, array in shared.items()}
    op = GroupQueryAttention(num_heads=2, kv_num_heads=2, do_rotary=1)
    first, second = (op(query, key, value, past.copy(), past.copy(), **shared) for _ in range(2))
    np.testing.assert_array_equal(first.output, second.output)
    assert {name: array.tobytes() for name, array in shared.items()} == before
