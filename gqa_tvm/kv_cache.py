"""The present arrays of a call: where its keys lie in them, and how the past gets there."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .arrays import aligned_zeros, kernels_can_write
from .attributes import Attributes
from .errors import InvalidArgument
from .kernel_arguments import ENTRY_TOTAL
from .sliding_window import retained_length
from .validation import Inputs, Phase, Problem


class CacheLayout(NamedTuple):
    """Where each entry's keys lie in the cache the kernels work on.

    entries: [B, 4] int32, columns ENTRY_*. kept_from, kept_rows: the past rows [kept_from, kept_from + kept_rows) of an
    entry are its first rows here; None = all stay where they are (kept_rows of them are needed). staged_rows: rows of a
    temporary cache, for a step whose first tokens still need positions that the present no longer holds; 0 = the
    kernels work on the present itself. final_rows: rows the present holds afterwards, the last ones of a staged cache.
    """

    entries: np.ndarray
    kept_rows: np.ndarray
    kept_from: np.ndarray | None = None
    staged_rows: int = 0
    final_rows: np.ndarray | None = None


def plan_layout(attributes: Attributes, problem: Problem) -> CacheLayout:
    """The layout of a valid call."""
    if problem.sliding_window:
        return _plan_sliding_window(attributes.window, problem)
    if problem.kv_sequence_length == 0:
        kept = problem.total_lengths
    elif problem.phase is Phase.FIRST_PROMPT:
        kept = np.zeros_like(problem.past_lengths)
    else:
        kept = problem.past_lengths
    return CacheLayout(_entries(problem, problem.past_lengths, problem.total_lengths), kept)


def _entries(problem: Problem, past: np.ndarray, total: np.ndarray, origin: np.ndarray | None = None) -> np.ndarray:
    """Columns in the order of ENTRY_PAST, ENTRY_TOTAL, ENTRY_NEW, ENTRY_ORIGIN."""
    origins = [0] * problem.batch_size if origin is None else origin.tolist()
    # Small batches are the common case: lists are faster than four strided assignments.
    columns = (past.tolist(), total.tolist(), problem.query_lengths.tolist(), origins)
    return np.array(list(zip(*columns, strict=True)), np.int32)


def _plan_sliding_window(window: int, problem: Problem) -> CacheLayout:
    past, total = (lengths.astype(np.int64) for lengths in (problem.past_lengths, problem.total_lengths))
    new, capacity = problem.query_lengths.astype(np.int64), problem.present_length
    held, final = retained_length(past, capacity, window), retained_length(total, capacity, window)
    first_needed = np.maximum(past + 1 - window, 0)
    if ((first_needed < total - final) & (new > 0)).any():
        entries = _entries(problem, held, held + new, past - held)
        staged_rows = int((held + new).max())
        return CacheLayout(entries, held, np.zeros_like(held), staged_rows, final)
    kept = final - new
    return CacheLayout(_entries(problem, kept, final, total - final), kept, held - kept, 0, final)


class Present(NamedTuple):
    """A present cache: `array` for the caller, `storage` for the kernels (the same unless they cannot use it)."""

    array: np.ndarray
    storage: np.ndarray
    past: np.ndarray | None
    layout: CacheLayout
    in_place: bool

    def start(self) -> None:
        """Put the kept rows of the past where the kernels expect them; from here on the caller's array changes."""
        layout = self.layout
        in_place = self.in_place and not layout.staged_rows
        if self.past is None or (in_place and layout.kept_from is None):
            return
        firsts = np.zeros_like(layout.kept_rows) if layout.kept_from is None else layout.kept_from
        for b, (first, rows) in enumerate(zip(firsts.tolist(), layout.kept_rows.tolist(), strict=True)):
            if rows and not (in_place and first == 0):
                self.storage[b, :, :rows] = self.past[b, :, first : first + rows]

    def finish(self) -> None:
        """Hand what the kernels wrote to the caller's array."""
        if self.storage is self.array:
            return
        if not self.layout.staged_rows:
            np.copyto(self.array, self.storage)
            return
        if not self.in_place:
            self.array[...] = 0
        assert self.layout.final_rows is not None
        totals = self.layout.entries[:, ENTRY_TOTAL].tolist()
        for b, (end, rows) in enumerate(zip(totals, self.layout.final_rows.tolist(), strict=True)):
            self.array[b, :, :rows] = self.storage[b, :, end - rows : end]


def _check(name: str, given: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if given.shape != shape or given.dtype != dtype:
        raise InvalidArgument(
            f"Output '{name}' must be {dtype} of shape {shape}, got {given.dtype} of shape {given.shape}"
        )
    if not given.flags.writeable:
        raise InvalidArgument(f"Output '{name}' is read-only; the cache is written into it")


def _shares_start(a: np.ndarray, b: np.ndarray) -> bool:
    return a.__array_interface__["data"][0] == b.__array_interface__["data"][0] and a.strides == b.strides


def prepare_presents(
    inputs: Inputs, given: tuple[np.ndarray | None, ...], problem: Problem, layout: CacheLayout
) -> tuple[Present, Present]:
    """The present key and value caches; nothing of the caller's is written before `Present.start`.

    given: the caller's arrays, None = make one. The memory of a past array is used in place: only new rows change, and
    a sliding window cache that is full moves up. Raises InvalidArgument for a wrong shape or dtype, for memory that
    overlaps the past otherwise or is both key and value, and for a cache that does not fit in memory.
    """
    keys = _prepare("key", inputs.past_key, given[0], problem, layout)
    values = _prepare("value", inputs.past_value, given[1], problem, layout)
    # Bounds alone would refuse keys and values interleaved in one buffer.
    if np.may_share_memory(keys.array, values.array) and np.shares_memory(keys.array, values.array):
        raise InvalidArgument("Outputs 'present_key' and 'present_value' share memory")
    for name, present, other in (("key", keys, values), ("value", values, keys)):
        # The rows of one are moved before those of the other are read.
        if present.in_place and not other.in_place and other.past is not None:
            if np.shares_memory(present.array, other.past):
                raise InvalidArgument(f"Output 'present_{name}' shares memory with the other past array")
    return keys, values


def _prepare(
    name: str, past: np.ndarray | None, given: np.ndarray | None, problem: Problem, layout: CacheLayout
) -> Present:
    shape = (problem.batch_size, problem.kv_num_heads, problem.present_length, problem.packed_head_size)
    in_place = given is not None and given is past
    if given is not None and not (in_place and given.shape == shape and given.flags.writeable):
        _check(f"present_{name}", given, shape, problem.cache_dtype)
        in_place = _is_same_memory(name, past, given, shape)
    array = _zeros(shape, problem.cache_dtype) if given is None else given
    if layout.staged_rows:
        storage = _zeros((*shape[:2], layout.staged_rows, shape[3]), problem.cache_dtype)
    elif in_place:
        storage = array if kernels_can_write(array) else array.copy()
    else:
        # Rows without keys are zeros in the end, whatever the caller's array holds.
        storage = array if given is None else _zeros(shape, problem.cache_dtype)
    return Present(array, storage, past, layout, in_place)


def _is_same_memory(name: str, past: np.ndarray | None, given: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether `given` is the array of the past; InvalidArgument when it overlaps it in any other way."""
    if past is None or not past.size or not np.may_share_memory(past, given):
        return False
    if past.shape != shape or not _shares_start(past, given):
        raise InvalidArgument(
            f"Output 'present_{name}' overlaps past_{name} without being the same array of shape {shape}"
        )
    return True


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    try:
        return aligned_zeros(shape, dtype)
    except MemoryError:
        wanted = math.prod(shape) * dtype.itemsize
        raise InvalidArgument(f"a cache of shape {shape} ({dtype}) needs {wanted} bytes, more than there is") from None
