"""The short way of a call gives what the long way gives, to the bit and to the word, and takes every usual call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from call_ways import PRESENTS, Counted, Inputs, assert_same, forgetful, other_presents
from configuration import Configuration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_calls import first_of
from random_configurations import random_configuration

from gqa_tvm.sliding_window import retained_length

CONFIGURATIONS = [
    c
    for c in (random_configuration([0, index]) for index in range(300))
    if c.head_size in (8, 16, 64) and not c.qk_output
]
LENGTHS = ("seqlens_k", "total_sequence_length", "position_ids", "query_seqlens")


@pytest.mark.parametrize("first", first_of(range(0, 200, 20)))
def test_random_calls_run_the_short_way_the_second_time(first: int) -> None:
    for configuration in CONFIGURATIONS[first : first + 20]:
        call = configuration.draw()
        given = {"strategy": configuration.strategy, **call.attributes}
        op, slow = Counted(**given), forgetful(**given)
        presents = "past" if configuration.in_place else "new"
        assert_same(op, slow, call.inputs, presents)
        assert_same(op, slow, call.inputs, presents)
        short = 1
        if other_presents(call.inputs) and not configuration.sliding:
            assert_same(op, slow, call.inputs, "other")
            assert_same(op, slow, call.inputs, "other")
            # The past and others are of one form.
            short += 2 if presents == "past" else 1
        assert op.short == (short if _is_taken(configuration, call.inputs) else 0), configuration


def _is_taken(c: Configuration, inputs: Inputs) -> bool:
    """Whether calls of a form go the short way: not those that move rows of a window, or pad a cache that grows."""
    if c.sliding:
        past, total = c.pasts, np.array(c.totals)
        held, kept = (retained_length(lengths, c.capacity, c.window) for lengths in (past, total))
        staged = (np.maximum(past + 1 - c.window, 0) < total - kept) & (total > past)
        return c.in_place and not staged.any() and bool((held == kept - (total - past)).all())
    return c.counts is None or c.capacity is None or c.capacity >= c.total


def _other_lengths(draw: Any, inputs: Inputs) -> None:
    name = draw(st.sampled_from([name for name in LENGTHS if inputs[name] is not None and inputs[name].size]))
    array = inputs[name] = inputs[name].copy()
    index = draw(st.integers(0, array.size - 1))
    # A padded chunk makes a cache of any T that it is told.
    large = 100 if name == "total_sequence_length" else 2**31 - 1
    step = draw(st.sampled_from([-1, 1, -3, 2, 40, -(2**31), large]))
    array.reshape(-1)[index] = np.clip(int(array.reshape(-1)[index]) + step, -(2**31), 2**31 - 1)


def _shorter(draw: Any, inputs: Inputs) -> None:
    """All lengths by as much, as after a rewind; a bias shrinks with them."""
    if any(inputs[name] is None for name in ("query", "seqlens_k")) or inputs["total_sequence_length"] is None:
        return
    total = int(inputs["total_sequence_length"].sum())
    by = draw(st.integers(-2, max(1, total - inputs["query"].shape[1])))
    for name in ("seqlens_k", "total_sequence_length"):
        inputs[name] = inputs[name] - np.int32(by)
    bias = inputs["attention_bias"]
    if bias is not None and bias.size and total - by < 1000:
        columns = np.arange(max(total - by, 0)) % bias.shape[-1]
        inputs["attention_bias"] = np.ascontiguousarray(bias[..., columns])


def _other_numbers(draw: Any, inputs: Inputs) -> None:
    name = draw(st.sampled_from([name for name, array in inputs.items() if array is not None and array.size]))
    array = inputs[name]
    if array.dtype.kind == "f":
        inputs[name] = array.copy()
        inputs[name].reshape(-1)[draw(st.integers(0, array.size - 1))] = draw(st.sampled_from([0.25, np.nan, np.inf]))


def _other_form(draw: Any, inputs: Inputs) -> None:
    """Memory of an array that is read-only, strided, reversed, misaligned, or has another dtype or shape."""
    name = draw(st.sampled_from([name for name, array in inputs.items() if array is not None and array.ndim]))
    array = inputs[name]
    kind = draw(
        st.sampled_from(["read-only", "rows apart", "columns apart", "reversed", "odd", "dtype", "cut", "rank"])
    )
    if kind == "read-only":
        inputs[name] = array.copy()
        inputs[name].flags.writeable = False
    elif kind == "rows apart":
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + 3), array.dtype)
        inputs[name] = wide[..., : array.shape[-1]]
    elif kind == "columns apart":
        inputs[name] = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
    elif kind == "reversed":
        inputs[name] = array[::-1]
    elif kind == "odd":
        inputs[name] = np.ndarray(array.shape, array.dtype, np.zeros(array.nbytes + 1, np.uint8), 1)
    elif kind == "dtype":
        inputs[name] = array.astype(draw(st.sampled_from(["f4", "f2", "i4", "i8", "i1", "u1"])), casting="unsafe")
    elif kind == "cut":
        inputs[name] = np.ascontiguousarray(array[..., : array.shape[-1] // 2])
    else:
        inputs[name] = array[None]
    if kind in ("rows apart", "columns apart", "odd"):
        inputs[name][...] = array


def _absent(draw: Any, inputs: Inputs) -> None:
    inputs[draw(st.sampled_from(sorted(inputs)))] = None


CHANGES = (_other_lengths, _shorter, _other_numbers, _other_form, _absent)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sequences_of_calls(data: st.DataObject) -> None:
    """Any calls after each other, right and wrong ones: the same results, words, plans and arrays either way."""
    configuration = data.draw(st.sampled_from(CONFIGURATIONS))
    call = configuration.draw()
    given = {"strategy": configuration.strategy, **call.attributes}
    op, slow = Counted(**given), forgetful(**given)
    for _ in range(data.draw(st.integers(2, 5))):
        inputs = dict(call.inputs)
        for change in data.draw(st.lists(st.sampled_from(CHANGES), max_size=2)):
            change(data.draw, inputs)
        assert_same(op, slow, inputs, data.draw(st.sampled_from(PRESENTS)) if inputs["past_key"] is not None else "new")
