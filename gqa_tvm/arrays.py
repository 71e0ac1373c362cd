"""Turning what a caller passes into arrays the kernels can read in place."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InvalidArgument

if TYPE_CHECKING:
    import tvm_ffi

ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


def as_array(value: Any, name: str) -> np.ndarray | None:
    """NumPy view of an array or DLPack tensor; None stays None. Raises InvalidArgument for what is neither."""
    if value is None or isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except Exception as error:
            bfloat16 = _bfloat16_from_dlpack(value)
            if bfloat16 is not None:
                return bfloat16
            raise InvalidArgument(f"Input '{name}' cannot be read through DLPack: {error}") from error
    try:
        array = np.asarray(value)
    except Exception as error:
        raise InvalidArgument(f"Input '{name}' is not an array: {error}") from error
    # A Python number has no dtype of its own; ONNX Runtime's integers here are 32 bits wide.
    if isinstance(value, int) and -(2**31) <= value < 2**31:
        return array.astype(np.int32)
    return array


class _Memory:
    """Array interface of a DLPack tensor that NumPy has no dtype for, seen as its bits."""

    def __init__(self, tensor: tvm_ffi.Tensor) -> None:
        self._keep = tensor
        strides = tuple(2 * stride for stride in tensor.strides)
        self.__array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<u2",
            "data": (tensor.data_ptr(), False),
            "strides": strides,
            "version": 3,
        }


def _bfloat16_from_dlpack(value: Any) -> np.ndarray | None:
    """A bfloat16 CPU tensor as an array of ml_dtypes.bfloat16, which NumPy knows once it is imported; else None."""
    try:
        import tvm_ffi

        tensor = tvm_ffi.from_dlpack(value)
        if str(tensor.dtype) != "bfloat16" or tensor.device.type != "cpu":
            return None
        import ml_dtypes
    except Exception:
        return None
    return np.asarray(_Memory(tensor)).view(ml_dtypes.bfloat16)


class _Writable:
    """Array interface of a read-only array, claimed writable: the call layer refuses read-only memory even to read."""

    def __init__(self, array: np.ndarray) -> None:
        self._keep = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def readable(array: np.ndarray) -> np.ndarray:
    """The array as kernels take it: aligned elements, contiguous last axis; a copy only where it is not so."""
    if not array.flags.aligned or (array.shape[-1] > 1 and array.strides[-1] != array.itemsize):
        return np.array(array, order="C")
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        return np.array(array, order="C")
    if not array.flags.writeable:
        return np.asarray(_Writable(array))
    return array


def as_bits(array: np.ndarray) -> np.ndarray:
    """A bfloat16 array as kernels take it: uint16; any other array as it is."""
    return array.view(np.uint16) if array.dtype.kind == "V" else array


def required(array: np.ndarray | None) -> np.ndarray:
    """An input that validation has found present, `readable`."""
    assert array is not None
    return readable(array)


def kernels_can_write(array: np.ndarray) -> bool:
    """Whether a cache can be written in place by the kernels."""
    flags = array.flags
    if flags.carray:
        return True
    steps = array.strides
    contiguous = array.shape[-1] <= 1 or steps[-1] == array.itemsize
    return bool(flags.aligned and contiguous and not any(step < 0 or step % array.itemsize for step in steps))


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Zeroed array at a 64-byte boundary; pages are only touched when they are written."""
    return _aligned(shape, np.dtype(dtype), np.zeros)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Uninitialised array at a 64-byte boundary."""
    return _aligned(shape, np.dtype(dtype), np.empty)


def _aligned(shape: tuple[int, ...], dtype: np.dtype, allocate: Any) -> np.ndarray:
    buffer = allocate(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    # A third of the time that buffer.ctypes.data takes.
    start = -ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % ALIGNMENT
    return np.ndarray(shape, dtype, buffer, start)


def huge_page_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeroed array in an anonymous mapping that lives as long as it; pages are only touched when they are written.

    From 2 MiB on it starts at a multiple of 2 MiB and asks for huge pages where the system has them; smaller ones start
    at a page. Raises OSError or OverflowError where there is no room.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    is_large = nbytes >= _HUGE_PAGE
    mapping = _map(nbytes + _HUGE_PAGE if is_large else nbytes)
    start = 0
    if is_large:
        start = -np.frombuffer(mapping, np.uint8).__array_interface__["data"][0] % _HUGE_PAGE
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Kernels without huge pages refuse the advice; the memory is as good.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.ndarray(shape, dtype, mapping, start)


def _map(nbytes: int) -> mmap.mmap:
    # Python's default is shared memory, which gets no huge pages and which a forked process would write into.
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)
