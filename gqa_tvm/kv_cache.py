"""The present arrays of a call: where its keys lie in them, and how the past gets there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import aligned_zeros, kernels_can_write
from .attributes import Attributes
from .errors import InvalidArgument
from .kernel_arguments import ENTRY_NEW, ENTRY_ORIGIN, ENTRY_PAST, ENTRY_TOTAL
from .sliding_window import retained_length
from .validation import Phase, Problem


@dataclass(frozen=True, eq=False)
class CacheLayout:
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
    return CacheLayout(_entries(problem, problem.past_lengths, problem.total_lengths, 0), kept)


def _entries(problem: Problem, past: np.ndarray, total: np.ndarray, origin: np.ndarray | int) -> np.ndarray:
    entries = np.empty((problem.batch_size, 4), np.int32)
    entries[:, ENTRY_PAST] = past
    entries[:, ENTRY_TOTAL] = total
    entries[:, ENTRY_NEW] = problem.query_lengths
    entries[:, ENTRY_ORIGIN] = origin
    return entries


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


@dataclass(frozen=True, eq=False)
class Present:
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


def prepare_present(
    name: str, past: np.ndarray | None, given: np.ndarray | None, problem: Problem, layout: CacheLayout
) -> Present:
    """The present array of one of key and value; nothing of the caller's is written before `Present.start`.

    given: the caller's array, None = make one. The same memory as `past` is used in place: only new rows change, and a
    sliding window cache that is full moves up. Raises InvalidArgument for a wrong shape or dtype, and for memory that
    overlaps `past` otherwise.
    """
    dtype = problem.cache_dtype
    shape = (problem.batch_size, problem.kv_num_heads, problem.present_length, problem.packed_head_size)
    in_place = False
    if given is None:
        array = aligned_zeros(shape, dtype)
        storage = array
    else:
        array = given
        _check(f"present_{name}", given, shape, dtype)
        in_place = past is not None and past.size > 0 and np.may_share_memory(past, given)
        if in_place and past is not None and (past.shape != shape or not _shares_start(past, given)):
            raise InvalidArgument(
                f"Output 'present_{name}' overlaps past_{name} without being the same array of shape {shape}"
            )
        if in_place:
            storage = given if kernels_can_write(given) else given.copy()
        else:
            # Rows without keys are zeros in the end, whatever the caller's array holds.
            storage = aligned_zeros(shape, dtype)
    if layout.staged_rows:
        storage = aligned_zeros((*shape[:2], layout.staged_rows, shape[3]), dtype)
    return Present(array, storage, past, layout, in_place)
