"""Known faults of head sizes, groups and layouts: each test is the smallest case that showed one."""

from __future__ import annotations

import numpy as np
import pytest
from known_fault_calls import FORMATS, STRATEGIES, checked, coded, operate, stored
from operator_calls import assert_close, expected, make_call
from reference_calls import random

from gqa_tvm import GroupQueryAttention, InvalidArgument

# Decoding kernels are dear to compile: of the sizes that test_operator.test_head_sizes leaves out, one format each.
DECODED = {46: "f32", 72: "i8-channel", 88: "i4-channel", 100: "i8-channel", 104: "f32", 112: "i4-channel"}


def compare(cache, strategy, head_size, heads=1, kv_heads=1, total=131):
    for tokens in (1, 3):
        attributes, inputs = make_call(
            cache, tokens=tokens, total=total, heads=heads, kv_heads=kv_heads, head_size=head_size
        )
        wanted = expected(attributes, inputs)
        got = GroupQueryAttention(**attributes, strategy=strategy)(**inputs)
        assert_close(got.output, wanted.output)
        np.testing.assert_array_equal(got.present_key, wanted.present_key)
        np.testing.assert_array_equal(got.present_value, wanted.present_value)


@pytest.mark.slow
@pytest.mark.parametrize("head_size", DECODED)
def test_head_sizes_that_fill_no_vector(head_size):  # B71
    for cache in FORMATS:
        compare(cache, "naive", head_size)
    compare(DECODED[head_size], "auto", head_size)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["f32", "i8-channel"])
@pytest.mark.parametrize("head_size", [512, 576])
@pytest.mark.parametrize("strategy", ["naive", "auto"])
def test_large_heads(head_size, cache, strategy):  # B72
    compare(cache, strategy, head_size)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (12, 2), (24, 8), (7, 1), (6, 6)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_that_are_no_power_of_two(heads, kv_heads, strategy):  # B73
    for tokens, total in ((5, 5), (5, 90)):
        attributes, inputs = make_call("f32", tokens=tokens, total=total, heads=heads, kv_heads=kv_heads)
        got = GroupQueryAttention(**attributes, strategy=strategy)(**inputs)
        assert_close(got.output, expected(attributes, inputs).output)


def test_heads_that_do_not_divide():  # B75
    with pytest.raises(InvalidArgument, match=r"num_heads must be a multiple of kv_num_heads.* \(3 and 2\)"):
        GroupQueryAttention(num_heads=3, kv_num_heads=2)


def test_keys_and_values_of_different_width():  # B76
    new = random(1, 1, 1, 16)
    with pytest.raises(InvalidArgument, match="same hidden size as key") as caught:
        operate(new, new, random(1, 1, 1, 32))
    assert "16" in str(caught.value) and "32" in str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("rotary", [False, True])
def test_packed_query_key_value(rotary, cache, strategy):  # B77
    query, key, value = random(2, 3, 4, 8), random(2, 3, 2, 8), random(2, 3, 2, 8, seed=1)
    rest = stored(cache, 2, step=0.5)
    if rotary:
        rest |= {"do_rotary": 1, "cos_cache": random(4, 4), "sin_cache": random(4, 4, seed=1)}
    wanted = checked(query, key, value, totals=[3, 2], **rest, strategy=strategy)
    packed = np.concatenate([query, key, value], axis=2).reshape(2, 3, -1)
    arrays = {name: array for name, array in rest.items() if isinstance(array, np.ndarray)}
    attributes = {name: rest[name] for name in rest.keys() - arrays.keys()}
    op = GroupQueryAttention(num_heads=4, kv_num_heads=2, strategy=strategy, **attributes)
    lengths = np.array([2, 1], np.int32), np.array([3], np.int32)
    got = op(packed, None, None, None, None, *lengths, **arrays)
    for one, other in zip(got[:3], wanted[:3], strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_kind_of_heads_in_turn():  # B106
    """Multi-head, grouped, multi-query and packed calls one after the other, K and V told apart by their values."""
    for cache in FORMATS:
        for heads, kv_heads in ((2, 2), (2, 1), (4, 2), (2, 2)):
            query, key = random(1, 2, heads, 8), random(1, 2, kv_heads, 8, seed=1)
            value = np.full((1, 2, kv_heads, 8), 3.0, np.float32)
            past = coded(cache, np.full((1, kv_heads, 4, 8), 3.0, np.float32))
            keys = coded(cache, random(1, kv_heads, 4, 8))
            got = checked(query, key, value, keys, past, **stored(cache, kv_heads)).output
            np.testing.assert_allclose(got, 3, rtol=1e-6)
            packed = np.concatenate([query, key, value], axis=2).reshape(1, 2, -1)
            rest = stored(cache, kv_heads)
            arrays = {name: rest.pop(name) for name in ("k_scale", "v_scale") if name in rest}
            op = GroupQueryAttention(num_heads=heads, kv_num_heads=kv_heads, **rest)
            lengths = np.array([5], np.int32), np.array([6], np.int32)
            np.testing.assert_array_equal(op(packed, None, None, keys, past, *lengths, **arrays).output, got)
