"""The cache of a decode loop: buffers for past and present in one, and the arguments that go with them."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from .arrays import huge_page_zeros
from .errors import InvalidArgument
from .kv_layout import PACKED_STEP, layout_from, packed_capacity, packed_shapes
from .sliding_window import can_rewind

_INT32_MAX = 2**31 - 1
_FLOAT_NAMES = ("float32", "float16", "bfloat16")


class KVCache:
    """Key and value buffers of one attention layer that GroupQueryAttention writes in place, and their lengths.

    ::

        cache = KVCache(batch=1, kv_num_heads=8, capacity=256, head_size=128, bits=8, k_scale=0.03, v_scale=0.03)
        for query, key, value in steps:  # a prompt, then one token after the other
            out = op(query, key, value, **cache.arguments(query.shape[1]))
            cache.advance()  # only after a call that returned
        cache.rewind(2)  # takes the last two tokens back

    capacity: rows per entry to begin with; a full cache grows, one with a sliding_window (the operator's
    local_window_size, for sliding_window_cache=1) keeps it. bits: 0 for rows of `dtype` (float32, float16 or bfloat16;
    float32 when left out), 8 or 4 for codes, which need k_scale and v_scale: 1 or kv_num_heads * head_size finite
    numbers each, copied, the same for all rows ever written. kv_layout: the operator's, "packed" for codes without a
    sliding window. A sliding window cache whose call failed other than with
    InvalidArgument may have moved its rows: start again with `rewind(cache.length)`. Raises InvalidArgument.
    """

    def __init__(
        self,
        batch: int,
        kv_num_heads: int,
        capacity: int,
        head_size: int,
        bits: int = 0,
        *,
        dtype: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        sliding_window: int | None = None,
        kv_layout: str = "bnsh",
    ) -> None:
        self._heads = _size("batch", batch), _size("kv_num_heads", kv_num_heads)
        capacity, head_size = _size("capacity", capacity), _size("head_size", head_size)
        self._dtype = _storage_dtype(bits, dtype)
        self._columns = (head_size + 1) // 2 if bits == 4 else head_size
        self._window = None if sliding_window is None else _size("sliding_window", sliding_window)
        if self._window is not None and capacity < self._window:
            raise InvalidArgument(f"capacity must be at least sliding_window ({self._window}), got {capacity}")
        self._layout = layout_from(kv_layout)
        if self._layout and (not bits or sliding_window is not None):
            raise InvalidArgument("kv_layout 'packed' needs bits=8 or bits=4 and no sliding_window")
        self._scales = _read_scales(bits, self._heads[1] * head_size, k_scale, v_scale)
        capacity = packed_capacity(capacity) if self._layout else capacity
        self._key, self._value = self._allocate(capacity)
        self._lengths = [0] * self._heads[0]
        self._announced: list[int] | None = None
        self._room = capacity if sliding_window is None else _INT32_MAX
        self._arrays = self._array_arguments()

    @property
    def key(self) -> np.ndarray:
        """[B, N_kv, capacity, H], or (H + 1) // 2 columns for 4 bits, or packed; growing replaces it."""
        return self._key

    @property
    def value(self) -> np.ndarray:
        """As `key`."""
        return self._value

    @property
    def capacity(self) -> int:
        """Rows per entry."""
        return int(self._key.shape[2]) * (PACKED_STEP if self._layout else 1)

    @property
    def nbytes(self) -> int:
        """Size of both buffers; rows that were never written take no memory."""
        return self._key.nbytes + self._value.nbytes

    @property
    def length(self) -> np.ndarray:
        """int32 [B], a copy: tokens of each entry, also those that a sliding window has dropped."""
        return np.array(self._lengths, np.int32)

    def arguments(self, new_tokens: Any) -> dict[str, np.ndarray]:
        """Keyword arguments for a call of the operator with that many new tokens; makes room for them.

        new_tokens: an int, the same for every entry, or integers [B] for a query of max(new_tokens) rows in which the
        rest of each entry is padding. query_seqlens comes with an array always, with an int where several entries get
        several tokens behind a past; the operator wants causal=1 then. No length changes before `advance`, so this may
        be repeated. Growing at least doubles the capacity; arrays given out before that keep their rows but are the
        cache's no longer.
        Raises InvalidArgument for counts below 0 or all 0, and above 2**31 - 1 tokens or what memory holds.
        """
        if new_tokens.__class__ is int or _is_number(new_tokens):
            return self._same_for_all(operator.index(new_tokens))
        return self._padded(self._counts("new_tokens", new_tokens))

    def _same_for_all(self, count: int) -> dict[str, np.ndarray]:
        if count < 1:
            raise InvalidArgument(f"new_tokens must be at least 1, got {count}")
        totals = [length + count for length in self._lengths]
        longest = max(totals)
        arguments = self._announce(totals, longest)
        arguments["seqlens_k"] = np.array([total - 1 for total in totals], np.int32)
        arguments["total_sequence_length"] = np.array([longest], np.int32)
        if count > 1 and len(totals) > 1 and longest > count:
            arguments["query_seqlens"] = np.array([count] * len(totals), np.int32)
        return arguments

    def _padded(self, counts: list[int]) -> dict[str, np.ndarray]:
        rows = max(counts)
        if rows < 1:
            raise InvalidArgument("new_tokens must be at least 1 for some entry, got 0 for all")
        totals = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        # The operator knows no entry without keys: row 0 of such an entry counts as one, and no query sees it.
        keys = [total or 1 for total in totals]
        arguments = self._announce(totals, max(map(operator.sub, keys, counts)) + rows)
        arguments["seqlens_k"] = np.array(keys, np.int32) - np.int32(1)
        arguments["total_sequence_length"] = np.array([max(keys)], np.int32)
        arguments["query_seqlens"] = np.array(counts, np.int32)
        return arguments

    def _announce(self, totals: list[int], rows: int) -> dict[str, np.ndarray]:
        """Make room for `rows` rows of every entry, of which `totals` will be tokens."""
        if rows > _INT32_MAX:
            raise InvalidArgument(f"new_tokens leads to {rows} tokens, padding included, more than {_INT32_MAX}")
        if rows > self._room:
            self._grow(rows)
        self._announced = totals
        return self._arrays.copy()

    def advance(self) -> None:
        """Count the tokens of the latest `arguments`, whose call has returned. Raises InvalidArgument without one.

        A call that raised InvalidArgument needs nothing: the next `arguments` starts from the same lengths.
        """
        if self._announced is None:
            raise InvalidArgument("advance() comes once after arguments() and the operator's call")
        self._lengths, self._announced = self._announced, None

    def rewind(self, tokens: Any) -> None:
        """Take back the last tokens of every entry: an int, or integers [B]. All of them is always possible.

        Raises InvalidArgument for more tokens than there are, and for a sliding window that no longer holds what the
        shorter sequence sees; then no length has changed.
        """
        dropped = self._counts("tokens", tokens)
        for b, (length, count) in enumerate(zip(self._lengths, dropped, strict=True)):
            if count > length:
                raise InvalidArgument(f"tokens[{b}] = {count} goes back further than the {length} there are")
            if self._window is None or count == length:
                continue
            if not can_rewind(length, count, self.capacity, self._window):
                raise InvalidArgument(
                    f"tokens[{b}] = {count}: after {length} tokens the sliding window no longer holds all rows it held "
                    f"after {length - count}; it must be computed again from its tokens"
                )
        self._lengths = [length - count for length, count in zip(self._lengths, dropped, strict=True)]
        self._announced = None

    def _counts(self, name: str, given: Any) -> list[int]:
        if _is_number(given):
            counts = [operator.index(given)] * len(self._lengths)
        else:
            array = np.asarray(given)
            if array.dtype.kind not in "iu" or array.shape != (len(self._lengths),):
                raise InvalidArgument(
                    f"{name} must be an integer or integers of shape ({len(self._lengths)},), "
                    f"got {array.dtype} of shape {array.shape}"
                )
            counts = array.tolist()
        if min(counts) < 0:
            raise InvalidArgument(f"{name} must not be negative, got {min(counts)}")
        return counts

    def _grow(self, rows: int) -> None:
        capacity = min(max(rows, 2 * self.capacity), _INT32_MAX)
        capacity = packed_capacity(capacity) if self._layout else capacity
        larger = self._allocate(capacity)
        for old, new in zip((self._key, self._value), larger, strict=True):
            keys = self.capacity // old.shape[2]
            for b, length in enumerate(self._lengths):
                rows = -(-length // keys)
                new[b, :, :rows] = old[b, :, :rows]
        self._key, self._value = larger
        self._room = capacity
        self._arrays = self._array_arguments()

    def _allocate(self, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """A key and a value buffer."""
        shape: tuple[int, ...] = (*self._heads, capacity, self._columns)
        shapes = packed_shapes(*self._heads, capacity, self._columns) if self._layout else (shape, shape)
        try:
            return huge_page_zeros(shapes[0], self._dtype), huge_page_zeros(shapes[1], self._dtype)
        except (OSError, OverflowError):
            nbytes = math.prod(shape) * self._dtype.itemsize
            raise InvalidArgument(
                f"a cache of shape {shape} ({self._dtype}) needs {nbytes} bytes, more than there is"
            ) from None

    def _array_arguments(self) -> dict[str, np.ndarray]:
        key, value = self._key, self._value
        return {"past_key": key, "past_value": value, "present_key": key, "present_value": value, **self._scales}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.integer)


def _size(name: str, value: Any) -> int:
    if not _is_number(value) or not 1 <= value <= _INT32_MAX:
        raise InvalidArgument(f"{name} must be an integer in [1, {_INT32_MAX}], got {value!r}")
    return operator.index(value)


def _storage_dtype(bits: Any, dtype: Any) -> np.dtype:
    """The element type of the buffers."""
    if not _is_number(bits) or bits not in (0, 4, 8):
        raise InvalidArgument(f"bits must be 0, 4 or 8, got {bits!r}")
    try:
        wanted = None if dtype is None else np.dtype(dtype)
    except TypeError as error:
        raise InvalidArgument(f"dtype: {error}") from None
    if bits:
        codes = np.dtype(np.int8 if bits == 8 else np.uint8)
        if wanted not in (None, codes):
            raise InvalidArgument(f"dtype must be left out with bits={bits} (the cache is {codes}), got {wanted}")
        return codes
    if wanted is None:
        return np.dtype(np.float32)
    if wanted.name not in _FLOAT_NAMES or not wanted.isnative:
        raise InvalidArgument(f"dtype must be {', '.join(_FLOAT_NAMES)} with bits=0, got {wanted}")
    return wanted


def _read_scales(bits: int, channels: int, k_scale: Any, v_scale: Any) -> dict[str, np.ndarray]:
    """float32 copies [1] or [channels] by name; none without bits."""
    given = {"k_scale": k_scale, "v_scale": v_scale}
    if not bits:
        for name, scale in given.items():
            if scale is not None:
                raise InvalidArgument(f"{name} needs bits=8 or bits=4")
        return {}
    scales = {name: _read_scale(name, scale, channels) for name, scale in given.items()}
    if scales["k_scale"].size != scales["v_scale"].size:
        sizes = scales["k_scale"].size, scales["v_scale"].size
        raise InvalidArgument(f"k_scale and v_scale must have as many elements each, got {sizes[0]} and {sizes[1]}")
    return scales


def _read_scale(name: str, given: Any, channels: int) -> np.ndarray:
    if given is None:
        raise InvalidArgument(f"{name} must be provided when bits is 8 or 4")
    try:
        with np.errstate(over="ignore"):
            scale = np.array(given, np.float32).reshape(-1)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} must be numbers: {error}") from None
    if scale.size not in (1, channels):
        raise InvalidArgument(f"{name} must have 1 or {channels} elements, got {scale.size}")
    if not np.isfinite(scale).all():
        raise InvalidArgument(f"{name} must be finite, got {scale[~np.isfinite(scale)][0]}")
    return scale
