"""The short way of a call gives what the long way gives, to the bit and to the word, and takes every usual call."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from configuration import Configuration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_calls import CACHES, add_rotary, copies, make_call
from random_configurations import random_configuration

from gqa_tvm import GroupQueryAttention, InvalidArgument, KVCache
from gqa_tvm.remembered_calls import arrays_are_readable
from gqa_tvm.sliding_window import retained_length

Inputs = dict[str, Any]
CONFIGURATIONS = [
    c
    for c in (random_configuration([0, index]) for index in range(300))
    if c.head_size in (8, 16, 64) and not c.qk_output
]
LENGTHS = ("seqlens_k", "total_sequence_length", "position_ids", "query_seqlens")


def forgetful(**attributes: Any) -> GroupQueryAttention:
    """An operator whose calls all go the long way."""
    op = GroupQueryAttention(**attributes)
    op._remembered.start = lambda num_threads: None  # type: ignore[method-assign]
    return op


class Counted:
    """An operator that counts the calls which went the short way."""

    def __init__(self, **attributes: Any) -> None:
        self.op, self.short = GroupQueryAttention(**attributes), 0

    def __call__(self, **inputs: Any) -> Any:
        run = self.op._remembered.run

        def counted(*given: Any) -> Any:
            done = run(*given)
            self.short += done is not None
            return done

        self.op._remembered.run = counted
        try:
            return self.op(**inputs)
        finally:
            if self.op._remembered.run is counted:
                self.op._remembered.run = run


def in_place(inputs: Inputs) -> Inputs:
    return inputs | {"present_key": inputs["past_key"], "present_value": inputs["past_value"]}


def outcome(op: Callable[..., Any], inputs: Inputs, *, is_in_place: bool) -> Any:
    """What a call gives, or says; and what it leaves in its arrays."""
    own = {name: array if array is None else _like(array) for name, array in inputs.items()}
    try:
        result = op(**(in_place(own) if is_in_place else own))
    except InvalidArgument as error:
        return str(error), [_bytes(array) for array in own.values()]
    assert result._fields == ("output", "present_key", "present_value", "output_qk") and result.output_qk is None
    assert all(type(array) is np.ndarray for array in result[:3])
    assert result.output.__array_interface__["data"][0] % 64 == 0 and result.output.flags.carray
    if is_in_place:
        assert result.present_key is own["past_key"] and result.present_value is own["past_value"]
    else:
        assert result.present_key.__array_interface__["data"][0] % 64 == 0 and result.present_key.flags.carray
    shapes = [(array.shape, array.dtype) for array in result[:3]]
    return shapes, [_bytes(array) for array in result[:3]], [_bytes(array) for array in own.values()]


def _like(array: np.ndarray) -> np.ndarray:
    """A copy with the strides and the flags of an array."""
    if array.flags.carray or array.size == 0:
        return array.copy()
    lowest = sum(min(0, stride) * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True))
    extent = sum(abs(stride) * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True))
    # One byte aside for an array that is not aligned.
    memory = np.zeros(extent + array.itemsize + 64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64 + (0 if array.flags.aligned else 1)
    copy = np.ndarray(array.shape, array.dtype, memory, start - lowest, array.strides)
    copy[...] = array
    copy.flags.writeable = array.flags.writeable
    return copy


def _bytes(array: np.ndarray | None) -> bytes | None:
    return None if array is None else array.tobytes()


def assert_same(op: Counted, slow: GroupQueryAttention, inputs: Inputs, is_in_place: bool) -> Any:
    got, wanted = (outcome(o, inputs, is_in_place=is_in_place) for o in (op, slow))
    assert got == wanted
    assert op.op.last_plan == slow.last_plan
    return got


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_calls_run_the_short_way_the_second_time(first: int) -> None:
    for configuration in CONFIGURATIONS[first : first + 20]:
        call = configuration.draw()
        given = {"strategy": configuration.strategy, **call.attributes}
        op, slow = Counted(**given), forgetful(**given)
        for _ in range(2):
            assert_same(op, slow, call.inputs, configuration.in_place)
        assert op.short == int(_is_taken(configuration, call.inputs)), configuration


def _is_taken(c: Configuration, inputs: Inputs) -> bool:
    """Whether calls of a form go the short way: not those that move rows of a window, or pad a cache that grows."""
    if c.sliding:
        past, total = c.pasts, np.array(c.totals)
        held, kept = (retained_length(lengths, c.capacity, c.window) for lengths in (past, total))
        staged = (np.maximum(past + 1 - c.window, 0) < total - kept) & (total > past)
        return c.in_place and not staged.any() and bool((held == kept - (total - past)).all())
    return c.counts is None or c.capacity is None or c.capacity >= c.total


def _other_lengths(draw: Any, inputs: Inputs) -> None:
    name = draw(st.sampled_from([name for name in LENGTHS if inputs[name] is not None]))
    array = inputs[name] = inputs[name].copy()
    index = draw(st.integers(0, array.size - 1))
    step = draw(st.sampled_from([-1, 1, -3, 2, 40, -(2**31), 2**31 - 1]))
    array.reshape(-1)[index] = np.clip(int(array.reshape(-1)[index]) + step, -(2**31), 2**31 - 1)


def _shorter(draw: Any, inputs: Inputs) -> None:
    """All lengths by as much, as after a rewind; a bias shrinks with them."""
    total = int(inputs["total_sequence_length"].item())
    by = draw(st.integers(-2, max(1, total - inputs["query"].shape[1])))
    for name in ("seqlens_k", "total_sequence_length"):
        inputs[name] = inputs[name] - np.int32(by)
    bias = inputs["attention_bias"]
    if bias is not None:
        columns = np.arange(max(total - by, 0)) % total
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
        is_in_place = inputs["past_key"] is not None and data.draw(st.booleans())
        assert_same(op, slow, inputs, is_in_place)
