"""Known faults of strides, alignment, empty arrays and absent inputs: each test is the smallest case of one."""

from __future__ import annotations

import numpy as np
import pytest
from known_fault_calls import FORMATS, STRATEGIES, checked, coded, operate, stored
from operator_calls import assert_close, expected, first_of, make_call
from reference_calls import random

from gqa_tvm import GroupQueryAttention


def spread(array):
    """The same numbers, every other element of the last axis."""
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), 77, array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def backwards(array):
    return np.ascontiguousarray(array[..., ::-1])[..., ::-1]


def transposed(array):
    axes = (*range(array.ndim)[:-2], array.ndim - 1, array.ndim - 2) if array.ndim > 1 else (0,)
    return np.ascontiguousarray(array.transpose(axes)).transpose(axes)


def between_others(array):
    """A slice of a wider array, as a part of packed QKV is."""
    wide = np.full((*array.shape[:-1], array.shape[-1] + 11), 77, array.dtype)
    wide[..., 3:-8] = array
    return wide[..., 3:-8]


def unaligned(array):
    raw = np.full(array.nbytes + 1, 77, np.uint8)
    moved = raw[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def one_element_off(array):
    """At the boundary of its own elements and no other, such as buf[1:33]."""
    raw = np.full(array.nbytes + 64 + array.itemsize, 77, np.uint8)
    start = -raw.ctypes.data % 64 + array.itemsize
    moved = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def full_call(cache, *, rotary=True):
    """A call that has every input a float32 query may have, save query_seqlens."""
    attributes, inputs = make_call(cache, tokens=3, total=20, head_size=8)
    inputs |= {"attention_bias": random(1, 4, 3, 20), "head_sink": random(4)}
    inputs |= {"q_norm_weight": random(8), "k_norm_weight": random(8, seed=1)}
    if rotary:
        inputs |= {"cos_cache": random(24, 4), "sin_cache": random(24, 4, seed=1)}
        inputs["position_ids"] = np.array([[17, 20, 18]])
    return attributes | {"do_rotary": int(rotary)}, inputs


LAYOUTS = [spread, backwards, transposed, between_others, unaligned, one_element_off]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("cache", first_of(FORMATS, 2))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inputs_of_any_layout(strategy, cache, layout):  # B99, B101
    attributes, inputs = full_call(cache)
    wanted = expected(attributes, inputs)
    op = GroupQueryAttention(**attributes, strategy=strategy)
    plain = op(**inputs)
    assert_close(plain.output, wanted.output)
    for name, array in inputs.items():
        got = op(**inputs | {name: layout(array)})
        np.testing.assert_array_equal(got.output, plain.output, err_msg=name)
        np.testing.assert_array_equal(got.present_key, wanted.present_key, err_msg=name)
    got = op(**{name: layout(array) for name, array in inputs.items()})
    np.testing.assert_array_equal(got.output, plain.output)
    np.testing.assert_array_equal(got.present_value, wanted.present_value)


@pytest.mark.parametrize("name", ["cos_cache", "sin_cache"])
def test_rotary_tables_cut_from_wider_ones(name):  # B99
    attributes, inputs = full_call("f32")
    plain = GroupQueryAttention(**attributes)(**inputs)
    got = GroupQueryAttention(**attributes)(**inputs | {name: between_others(inputs[name])})
    np.testing.assert_array_equal(got.output, plain.output)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("in_place", [False, True])
def test_outputs_of_any_layout(in_place, cache, layout):  # B99, B101
    attributes, inputs = full_call(cache)
    wanted = expected(attributes, inputs, in_place=in_place)
    presents = {name: layout(inputs[name.replace("present", "past")]) for name in ("present_key", "present_value")}
    if in_place:
        inputs |= {"past_key": presents["present_key"], "past_value": presents["present_value"]}
    got = GroupQueryAttention(**attributes)(**inputs, **presents)
    assert got.present_key is presents["present_key"]
    for name, array in presents.items():
        np.testing.assert_array_equal(array, getattr(wanted, name))
        around = array
        while around.base is not None:
            around = around.base
        gaps = {
            spread: np.s_[..., 1::2],
            between_others: np.s_[..., :3],
            unaligned: np.s_[:1],
            one_element_off: np.s_[:1],
        }
        if layout in gaps:
            assert (around[gaps[layout]] == 77).all()


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_empty_past(strategy, cache):  # B103, B105
    query, key, value = (random(1, 3, 1, 8, seed=seed) for seed in range(3))
    rest = stored(cache, step=0.5) | {"strategy": strategy}
    empty = coded(cache, np.zeros((1, 1, 0, 8), np.float32))
    absent, present = (checked(query, key, value, past, past, **rest) for past in (None, empty))
    np.testing.assert_array_equal(absent.output, present.output)
    np.testing.assert_array_equal(absent.present_key, present.present_key)


@pytest.mark.parametrize("cache", FORMATS)
def test_present_without_past(cache):  # B105
    query, key, value = (random(1, 3, 1, 8, seed=seed) for seed in range(3))
    presents = {name: coded(cache, np.ones((1, 1, 3, 8), np.float32)) for name in ("present_key", "present_value")}
    got = checked(query, key, value, **stored(cache, step=0.5), **presents)
    assert got.present_key is presents["present_key"] and got.present_value is presents["present_value"]
    np.testing.assert_array_equal(got.output, operate(query, key, value, **stored(cache, step=0.5)).output)
