"""The short way of a call: what earlier calls of the same form were validated for, run by native/remembered_calls.h.

The long way, in Python, is the truth of what a call means. After it has run a call, `remember` hands the kernels,
their arguments and the few numbers that decide over validity to C. `run` takes a call with arrays of the same form from
there: it looks at the values of lengths, positions and scales, and either knows the call to be valid or leaves it to
the long way. Both run the same kernels with the same arguments.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .arrays import kernels_can_write
from .kernel_calls import APPEND_TENSORS, ATTENTION_TENSORS, AttentionCall, decode_tasks
from .kv_cache import Present
from .launcher import launcher
from .prepared_call import Attention, PreparedCall
from .strategy import Strategy
from .validation import Inputs, Problem

Result = tuple[np.ndarray, np.ndarray, np.ndarray, None]
Run = Callable[..., tuple[Result, Any] | None]

_ARRAYS = (*Inputs._fields, "present_key", "present_value")
# Sources of a kernel's memory besides the operator's arrays.
_SOURCES = {name: index for index, name in enumerate((*_ARRAYS, "entries", "positions", "output"))}
_SOURCES["past_key"], _SOURCES["past_value"] = _SOURCES["present_key"], _SOURCES["present_value"]
_CONSTANT = -1
# Axes along which contiguous arrays may grow from call to call.
_FREE_AXES = {"past_key": 2, "past_value": 2, "present_key": 2, "present_value": 2, "attention_bias": 3}
_NO_LIMIT = 2**63 - 1
_CODES = {"i": 0, "u": 1, "f": 2}
_FLASH, _FLASH_DECODE, _NAIVE = 0, 1, 2


class _Facts(NamedTuple):
    """As `Facts` in native/remembered_call.h."""

    batch: int
    tokens: int
    kv_tokens: int
    kv_heads: int
    columns: int
    cache_itemsize: int
    output_bytes: int
    output_numbers: int
    has_past: int
    has_positions: int
    quantized: int
    sliding: int
    rotary_rows: int
    window: int
    kv_chunk: int
    append: int


class _Choice(NamedTuple):
    """As `Choice` in native/remembered_call.h."""

    bucket: int
    is_long: int
    address: int
    kind: int
    kv_block: int = 1
    chunk: int = 0
    groups: int = 0
    rows: int = 0
    width: int = 0


def run_nothing(*arrays: Any) -> None:
    """A `run` that remembers no call."""


class RememberedCalls:
    """The calls that one operator remembers; they keep stand-ins and dtypes alive, and no array of a caller."""

    def __init__(self) -> None:
        self.run: Run = run_nothing
        self._remember: Callable[..., bool] | None = None

    def start(self, num_threads: int) -> None:
        """Be ready to remember calls that run on so many threads; before, nothing is remembered."""
        if self._remember is None and arrays_are_readable():
            names = (np.ndarray, np.empty, np.zeros, np.dtype(np.uint8))
            self.run, self._remember = launcher().remembered_calls(num_threads, names)

    def remember(
        self,
        given: Sequence[np.ndarray | None],
        caches: tuple[Present, Present],
        call: AttentionCall,
        prepared: PreparedCall,
        attention: Attention,
    ) -> bool:
        """Run calls like this one, which has just run, the short way from now on; False if that cannot be or is done.

        given: inputs, then present arrays. caches: as prepare_presents made them.
        """
        if self._remember is None or attention.totals in prepared.offered:
            return False
        inputs, problem = Inputs._make(given[:-2]), call.problem
        if problem.sliding_window and any(cache.storage is not cache.array or not cache.in_place for cache in caches):
            return False
        prepared.offered.add(attention.totals)
        if not _fits(inputs, given[-2:], problem):
            return False
        append = APPEND_TENSORS if problem.kv_sequence_length else ("entries",) * len(APPEND_TENSORS)
        roles = (*append, *ATTENTION_TENSORS)
        sources = [_source(role, call, inputs) for role in roles]
        scalars = call.forms.scalars
        append_address, attention_address = prepared.addresses(attention)
        result = (problem.batch_size, problem.sequence_length, problem.num_heads * problem.head_size)
        return self._remember(
            tuple(given),
            tuple([call.tensors[role] for role in roles]),
            _free_axes(),
            np.array(_facts(inputs, call, prepared.kv_chunk, append_address), np.int64),
            np.array(sources, np.int64),
            _values((*scalars.append, *scalars.attention)),
            np.array(_choice(problem, attention, attention_address), np.int64),
            attention.plan,
            (result, problem.query_dtype, problem.cache_dtype),
        )


@lru_cache(maxsize=1)
def _free_axes() -> np.ndarray:
    return np.array([_FREE_AXES.get(name, -1) for name in _ARRAYS], np.int64)


def _fits(inputs: Inputs, presents: Sequence[np.ndarray | None], problem: Problem) -> bool:
    """Whether C can tell of calls of this signature that they are valid, and has all that it takes to run them."""
    if problem.sequence_length == 0 or (presents[0] is None) != (presents[1] is None):
        return False
    if any(array is not None and not kernels_can_write(array) for array in presents):
        return False
    # Rotary tables without columns still limit position_ids.
    if inputs.position_ids is not None and problem.positions is None:
        return False
    past = inputs.past_key, inputs.past_value
    return all(a is None or a.size == 0 or a.shape[-1] == 1 or a.strides[-1] == a.itemsize for a in past)


def _source(role: str, call: AttentionCall, inputs: Inputs) -> tuple[int, int, int]:
    """(source, DLPack's code, bytes of an element) of a kernel's tensor."""
    tensor = call.tensors[role]
    name = "query" if role in ("key", "value") and inputs.key is None else role
    source = _CONSTANT if call.is_stand_in(tensor) else _SOURCES[name]
    return source, _CODES[tensor.dtype.kind], tensor.itemsize


def _facts(inputs: Inputs, call: AttentionCall, kv_chunk: int, append: int) -> _Facts:
    problem = call.problem
    return _Facts(
        batch=problem.batch_size,
        tokens=problem.sequence_length,
        kv_tokens=problem.kv_sequence_length,
        kv_heads=problem.kv_num_heads,
        columns=problem.packed_head_size,
        cache_itemsize=problem.cache_dtype.itemsize,
        output_bytes=call.tensors["output"].nbytes,
        output_numbers=call.tensors["output"].size,
        has_past=int(inputs.past_key is not None),
        has_positions=int(problem.positions is not None),
        quantized=int(call.forms.quantized),
        sliding=int(problem.sliding_window),
        rotary_rows=_NO_LIMIT if inputs.cos_cache is None else inputs.cos_cache.shape[0],
        window=call.forms.window,
        kv_chunk=kv_chunk,
        append=append,
    )


def _choice(problem: Problem, attention: Attention, address: int) -> _Choice:
    (is_long, bucket), sizes, strategy = attention.totals, attention.sizes, attention.choice.strategy
    key = bucket.bit_length() - 1, int(is_long), address
    if strategy is Strategy.NAIVE:
        return _Choice(*key, _NAIVE)
    if not attention.choice.few_rows:
        return _Choice(*key, _FLASH)
    chunk = sizes.kv_chunk if strategy is Strategy.FLASH_DECODING else 0
    tasks = decode_tasks(problem, attention.spec, sizes)
    return _Choice(*key, _FLASH_DECODE, sizes.decode_kv_block, chunk, *tasks)


def _values(scalars: tuple[float | int, ...]) -> np.ndarray:
    """Scalars as kernels take them: `Value` of native/kernel_call.h."""
    packed = [struct.pack("=qd", 3, v) if isinstance(v, float) else struct.pack("=qq", 1, int(v)) for v in scalars]
    return np.frombuffer(b"".join(packed), np.int64)


@lru_cache(maxsize=1)
def arrays_are_readable() -> bool:
    """Whether objects and arrays of this process are laid out as native/python_api.h has them.

    Fields that NumPy's headers give to every extension module do not move within a version of its ABI; builds of Python
    without the interpreter's lock, or with more fields in each object, differ. There every call goes the long way.
    """
    if object.__basicsize__ != 16 or ctypes.sizeof(ctypes.c_void_p) != 8 or sys.byteorder != "little":
        return False
    if np.intp(0).itemsize != 8:
        return False
    square = np.zeros((6, 8), np.float32)
    return all(_is_read_rightly(array) for array in (square, square[1::2, 2::3], square.T, np.zeros(3, np.int8)))


def _is_read_rightly(array: np.ndarray) -> bool:
    wanted = (
        *(array.__array_interface__["data"][0], array.ndim, array.flags.num),
        *(id(type(array)), id(array.dtype), array.shape[-1], array.strides[-1]),
    )
    return launcher().read_array(array) == wanted
