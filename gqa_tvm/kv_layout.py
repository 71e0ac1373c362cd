"""How a cache's bytes lie: "bnsh", ONNX Runtime's rows, or "packed", as integer dot products take them.

A packed key cache is [B, N_kv, C / 16, columns / 4, 16, 4], a packed value cache [B, N_kv, C / 4, columns, 4]: columns
are stored bytes of a key (H, or H / 2 for INT4), the last axes (16, 4) are key and column, (4) is key. The bytes are
those of [B, N_kv, C, columns] in another order. Calls see a packed cache as rows of that shape, whose bytes mean
nothing row by row, and kernels as [B, N_kv, C / n, n columns], n keys together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arrays import aligned_empty
from .attributes import Attributes
from .errors import InvalidArgument
from .kernel_arguments import PACKED_KEYS
from .kernels import Layout
from .schedules.block_sizes import BlockSizes
from .strategy import Strategy, flash_disabled
from .validation import Inputs, Problem

# Keys of a group of a packed cache, of which its capacity is a multiple; columns of a word.
PACKED_STEP = PACKED_KEYS["key_cache"]
_VALUE_KEYS = PACKED_KEYS["value_cache"]
_WORD = 4
_CODES = (np.dtype(np.int8), np.dtype(np.uint8))
_LAYOUTS: dict[str, Layout] = {"bnsh": "", "packed": "packed"}


def layout_from(name: str) -> Layout:
    """The layout of this name. Raises InvalidArgument that lists the valid ones."""
    try:
        return _LAYOUTS[name]
    except (KeyError, TypeError):
        raise InvalidArgument(f"kv_layout must be one of {', '.join(_LAYOUTS)}, got {name!r}") from None


def packed_shapes(batch: int, kv_heads: int, capacity: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a packed key and value cache for at least `capacity` keys of so many stored bytes.

    Raises InvalidArgument for columns that are no multiple of 16.
    """
    if columns % PACKED_STEP:
        raise InvalidArgument(_columns_text(columns))
    rows = packed_capacity(capacity)
    return (
        (batch, kv_heads, rows // PACKED_STEP, columns // _WORD, PACKED_STEP, _WORD),
        (batch, kv_heads, rows // _VALUE_KEYS, columns, _VALUE_KEYS),
    )


def packed_capacity(rows: int) -> int:
    """The least capacity of a packed cache for so many keys."""
    return -(-rows // PACKED_STEP) * PACKED_STEP


def _columns_text(columns: int) -> str:
    return (
        f"kv_layout 'packed' takes caches of a multiple of {PACKED_STEP} stored bytes per key and head (head sizes of "
        f"a multiple of {PACKED_STEP}, for INT4 of {2 * PACKED_STEP}), got {columns}"
    )


def pack_kv_cache(key_cache: np.ndarray, value_cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Caches [B, N_kv, C, columns] int8 or uint8 as new packed ones, C rounded up to a multiple of 16 by zeros.

    columns: H, or H / 2 for INT4. Raises InvalidArgument.
    """
    _check_pair(key_cache, value_cache, (4, 4))
    if key_cache.shape != value_cache.shape:
        raise InvalidArgument(f"caches must have the same shape, got {key_cache.shape} and {value_cache.shape}")
    b, n, capacity, columns = key_cache.shape
    key_shape, value_shape = packed_shapes(b, n, capacity, columns)
    keys, values = _padded(key_cache), _padded(value_cache)
    keys = keys.reshape(*key_shape[:3], PACKED_STEP, *key_shape[3:4], _WORD)
    values = values.reshape(*value_shape[:3], _VALUE_KEYS, columns)
    return _copied(keys.swapaxes(3, 4)), _copied(values.swapaxes(3, 4))


def unpack_kv_cache(
    key_cache: np.ndarray, value_cache: np.ndarray, length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Packed caches as new ones [B, N_kv, length, columns]; length: keys to keep, None = all.

    Raises InvalidArgument.
    """
    _check_pair(key_cache, value_cache, (6, 5))
    rows = as_rows(key_cache, "key_cache"), as_rows(value_cache, "value_cache")
    if rows[0].shape != rows[1].shape:
        raise InvalidArgument(f"not caches of one length: {key_cache.shape} and {value_cache.shape}")
    capacity = rows[0].shape[2]
    if length is not None and not 0 <= length <= capacity:
        raise InvalidArgument(f"length must be in [0, {capacity}], got {length}")
    keys = key_cache.swapaxes(3, 4).reshape(rows[0].shape)
    values = value_cache.swapaxes(3, 4).reshape(rows[1].shape)
    return _copied(keys[:, :, :length]), _copied(values[:, :, :length])


def _check_pair(key_cache: np.ndarray, value_cache: np.ndarray, ranks: tuple[int, int]) -> None:
    for name, cache, rank in (("key_cache", key_cache, ranks[0]), ("value_cache", value_cache, ranks[1])):
        if not isinstance(cache, np.ndarray) or cache.dtype not in _CODES or cache.ndim != rank:
            raise InvalidArgument(f"{name} must be an int8 or uint8 array of {rank} dimensions, got {_told(cache)}")
    if key_cache.dtype != value_cache.dtype:
        raise InvalidArgument(f"caches must have one type, got {key_cache.dtype} and {value_cache.dtype}")


def _told(array: object) -> str:
    return f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__


def _padded(rows: np.ndarray) -> np.ndarray:
    missing = packed_capacity(rows.shape[2]) - rows.shape[2]
    return np.pad(rows, ((0, 0), (0, 0), (0, missing), (0, 0)))


def _copied(array: np.ndarray) -> np.ndarray:
    """The same elements in a new array at a 64-byte boundary."""
    copy = aligned_empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def as_rows(array: np.ndarray, name: str) -> np.ndarray:
    """A packed cache's memory as [B, N_kv, C, columns]. Raises InvalidArgument for another shape, or one with gaps."""
    inner = (PACKED_STEP, _WORD) if "key" in name else (_VALUE_KEYS,)
    rank = 4 + len(inner)
    if array.ndim != rank or array.shape[rank - len(inner) :] != inner:
        wanted = "[B, N_kv, C / 16, columns / 4, 16, 4]" if "key" in name else "[B, N_kv, C / 4, columns, 4]"
        raise InvalidArgument(f"Input '{name}' must be packed, {wanted}, got shape {array.shape}")
    if array.size and not array[0, 0].flags.c_contiguous:
        raise InvalidArgument(f"Input '{name}' must have all bytes of a KV head side by side, got {array.strides}")
    keys, width = (PACKED_STEP, _WORD) if "key" in name else (_VALUE_KEYS, 1)
    return array.reshape(*array.shape[:2], array.shape[2] * keys, array.shape[3] * width)


class PackedArrays(NamedTuple):
    """What a call's arrays are as rows, and which ones the caller has."""

    inputs: Inputs
    presents: tuple[np.ndarray | None, np.ndarray | None]
    given: tuple[np.ndarray | None, np.ndarray | None]

    def results(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The present arrays in the caller's shape."""
        key, value = self.given
        if key is not None and value is not None:
            return key, value
        shapes = packed_shapes(*keys.shape)  # type: ignore[arg-type]
        return keys.reshape(shapes[0]) if key is None else key, values.reshape(shapes[1]) if value is None else value


def packed_arrays(inputs: Inputs, presents: tuple[np.ndarray | None, ...]) -> PackedArrays:
    """A call's arrays with every cache as rows; present and past of the same memory are one array.

    Raises InvalidArgument unless a past is its own present: what is packed is written in place.
    """
    old_key, new_key = _pair("key", inputs.past_key, presents[0])
    old_value, new_value = _pair("value", inputs.past_value, presents[1])
    rows = inputs._replace(past_key=old_key, past_value=old_value)
    return PackedArrays(rows, (new_key, new_value), (presents[0], presents[1]))


def _pair(
    name: str, past: np.ndarray | None, present: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Past and present as rows, one array where there is a past."""
    if past is None:
        return None, None if present is None else as_rows(present, f"present_{name}")
    rows = as_rows(past, f"past_{name}")
    if present is None or not _is_same(past, present):
        raise InvalidArgument(f"kv_layout 'packed' writes in place: present_{name} must be the array past_{name}")
    return rows, rows


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    if a is b:
        return True
    same = (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype)
    return same and a.__array_interface__["data"][0] == b.__array_interface__["data"][0]


def kernel_view(rows: np.ndarray, name: str) -> np.ndarray:
    """Rows of `as_rows` as kernels take them: [B, N_kv, C / n, n columns]; name: "key_cache" or "value_cache"."""
    keys = PACKED_KEYS[name]
    b, n, capacity, columns = rows.shape
    return rows.reshape(b, n, capacity // keys, keys * columns)


def check_packed_operator(attributes: Attributes, strategy: Strategy) -> None:
    """Raise InvalidArgument for an operator that has no packed form."""
    reasons = (
        (not attributes.is_quantized, "a float cache has none: set k_quant_type, v_quant_type and kv_cache_bit_width"),
        (attributes.use_sliding_window, "sliding_window_cache=1 moves single rows"),
        (bool(attributes.qk_output), "output_qk is only computed by naive, which reads BNSH"),
        (strategy is Strategy.NAIVE, "strategy 'naive' reads BNSH"),
        (flash_disabled(), "ORT_GQA_DISABLE_FLASH_ATTENTION is set, and naive reads BNSH"),
    )
    for holds, reason in reasons:
        if holds:
            raise InvalidArgument(f"kv_layout 'packed' is not possible: {reason}")


def packed_problem(problem: Problem, sizes: BlockSizes, target: str) -> Problem:
    """A valid call over packed rows: its present has whole groups of keys. Raises InvalidArgument if it cannot run."""
    columns = problem.packed_head_size
    if columns % PACKED_STEP:
        raise InvalidArgument(_columns_text(columns))
    if not sizes.reads_packed(columns):
        if not sizes.reads_packed(PACKED_STEP):
            raise InvalidArgument(
                "kv_layout 'packed' needs integer dot products of 64 bytes (target x86-avx512-vnni), "
                f"got target {target}"
            )
        raise InvalidArgument(f"kv_layout 'packed' takes at most 256 stored bytes per key and head, got {columns}")
    if problem.past_capacity:
        if problem.present_length > problem.past_capacity:
            raise InvalidArgument(
                f"kv_layout 'packed' writes in place: past arrays of {problem.past_capacity} keys have no room for "
                f"total_sequence_length {problem.total_sequence_length}"
            )
        return problem
    return problem._replace(present_length=packed_capacity(problem.present_length))
