"""The present arrays of a call: in place, or new ones that hold the past."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import aligned_zeros, kernels_can_write
from .errors import InvalidArgument
from .validation import Phase, Problem


@dataclass(frozen=True)
class Present:
    """A present cache: `array` for the caller, `storage` for the kernels (the same unless they cannot write it)."""

    array: np.ndarray
    storage: np.ndarray

    def finish(self) -> None:
        """Hand what the kernels wrote to the caller's array."""
        if self.storage is not self.array:
            np.copyto(self.array, self.storage)


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
    name: str,
    past: np.ndarray | None,
    given: np.ndarray | None,
    dtype: np.dtype,
    problem: Problem,
) -> Present:
    """The present array of one of key and value, past rows in place; nothing of the caller's is written yet.

    given: the caller's array, None = make one. The same memory as `past` is used in place: only new rows will change.
    Raises InvalidArgument for a wrong shape or dtype, and for memory that overlaps `past` otherwise.
    """
    shape = (
        problem.batch_size,
        problem.kv_num_heads,
        problem.present_length,
        problem.packed_head_size,
    )
    if given is None:
        return _with_past(aligned_zeros(shape, dtype), past, problem)
    _check(f"present_{name}", given, shape, dtype)
    if past is not None and past.size and np.may_share_memory(past, given):
        if past.shape != shape or not _shares_start(past, given):
            raise InvalidArgument(
                f"Output 'present_{name}' overlaps past_{name} without being the same array of shape {shape}"
            )
        return Present(given, given if kernels_can_write(given) else given.copy())
    return _with_past(given, past, problem, clear=True)


def _with_past(array: np.ndarray, past: np.ndarray | None, problem: Problem, clear: bool = False) -> Present:
    """Zeros, then the past rows an entry keeps: [0, P_b), or all it may see when nothing is appended."""
    storage = array if kernels_can_write(array) and not clear else aligned_zeros(array.shape, array.dtype)
    if past is not None and (problem.phase is not Phase.FIRST_PROMPT or not problem.kv_sequence_length):
        shared_kv = problem.kv_sequence_length == 0
        lengths = problem.total_lengths if shared_kv else problem.past_lengths
        for b, rows in enumerate(lengths.tolist()):
            storage[b, :, :rows] = past[b, :, :rows]
    return Present(array, storage)
