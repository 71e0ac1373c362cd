"""Calls that go the short way or the long way, counted and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gqa_tvm import GroupQueryAttention, InvalidArgument

Inputs = dict[str, Any]


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


def other_presents(inputs: Inputs) -> dict[str, np.ndarray]:
    """Present arrays beside the past, full of what is to be overwritten."""
    past, total = inputs["past_key"], inputs["total_sequence_length"]
    if past is None or past.ndim != 4 or total is None or not 0 <= int(total.sum()) < 1000:
        return {}
    shape = (*past.shape[:2], max(past.shape[2], int(total.sum())), past.shape[3])
    return {name: np.full(shape, 77, past.dtype) for name in ("present_key", "present_value")}


PRESENTS = ("new", "past", "other")


def outcome(op: Callable[..., Any], inputs: Inputs, presents: str) -> Any:
    """What a call gives, or says; and what it leaves in its arrays. presents: new arrays, the past, or others."""
    own = {name: array if array is None else like(array) for name, array in inputs.items()}
    others = other_presents(own) if presents == "other" else {}
    given = in_place(own) if presents == "past" else own | others
    try:
        result = op(**given)
    except InvalidArgument as error:
        return str(error), [_bytes(array) for array in given.values()]
    assert result._fields == ("output", "present_key", "present_value", "output_qk") and result.output_qk is None
    assert all(type(array) is np.ndarray for array in result[:3])
    assert result.output.__array_interface__["data"][0] % 64 == 0 and result.output.flags.carray
    if "present_key" in given:
        assert result.present_key is given["present_key"] and result.present_value is given["present_value"]
    else:
        assert result.present_key.__array_interface__["data"][0] % 64 == 0 and result.present_key.flags.carray
    shapes = [(array.shape, array.dtype) for array in result[:3]]
    return shapes, [_bytes(array) for array in result[:3]], [_bytes(array) for array in own.values()]


def like(array: np.ndarray) -> np.ndarray:
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


def assert_same(op: Counted, slow: GroupQueryAttention, inputs: Inputs, presents: str) -> None:
    """Both ways: the same results, words, arrays and plan."""
    got, wanted = (outcome(each, inputs, presents) for each in (op, slow))
    assert got == wanted
    assert op.op.last_plan == slow.last_plan
