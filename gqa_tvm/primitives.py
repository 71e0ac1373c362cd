"""The compiled kernels one by one, NumPy in and out: quantisation, the two GEMMs, attention over a filled cache.

Codes are the cache's: int8 [.., K], or for 4 bits uint8 [.., (K + 1) // 2] with the even column in the low nibble and
8 added to each code. Arrays are NumPy or have `__dlpack__`, of any strides and alignment, and are only read. Every
function takes num_threads (None = the cores this process may use), which does not change its result, and raises
InvalidArgument for arguments it cannot take, BuildError where a kernel is missing and cannot be built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np

from .arrays import aligned_empty, as_array, kernels_can_write, readable
from .errors import InvalidArgument
from .kernels import CacheFormat, KernelSpec, Operation, row_tile_for
from .operator import GroupQueryAttention
from .runtime import launcher, library_for
from .schedules.block_sizes import BlockSizes
from .targets import usable_cores

_FORMATS: dict[int, CacheFormat] = {8: "i8", 4: "i4"}
_CODE_DTYPES = {8: np.dtype(np.int8), 4: np.dtype(np.uint8)}
_FLOAT32 = np.dtype(np.float32)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def kv_quantize(x: Any, scale: Any, bits: int, *, num_threads: int | None = None) -> np.ndarray:
    """Codes of rows: clamp(rint(x * (1 / scale))), NaN to the largest code, 1 / 0 taken as 1.

    x: float32 [rows, K]. scale: float32, 1 element or K, finite. bits: 8 or 4.
    Returns int8 [rows, K] or uint8 [rows, (K + 1) // 2]; an odd last column shares its byte with code 0.
    """
    bits = _bits(bits)
    rows = _matrix("x", x, _FLOAT32)
    columns = rows.shape[1]
    factors = _column_scale("scale", scale, columns)
    kernel, spec, _ = _kernel("kv_quantize", bits, columns, num_threads)
    codes = aligned_empty((rows.shape[0], spec.cache_columns), _CODE_DTYPES[bits])
    kernel(rows, factors, codes)
    return codes


def kv_dequantize(
    codes: Any, scale: Any, bits: int, columns: int | None = None, *, num_threads: int | None = None
) -> np.ndarray:
    """Values of rows of codes: code * scale.

    codes: int8 [rows, K] or uint8 [rows, (K + 1) // 2]. scale: float32, 1 element or K, finite. bits: 8 or 4.
    columns: K, None = every column that the codes hold. Returns float32 [rows, K].
    """
    bits = _bits(bits)
    stored = _matrix("codes", codes, _CODE_DTYPES[bits])
    columns = _columns(stored, bits, columns)
    factors = _column_scale("scale", scale, columns)
    kernel, *_ = _kernel("kv_dequantize", bits, columns, num_threads)
    x = aligned_empty((stored.shape[0], columns), _FLOAT32)
    kernel(stored, factors, x)
    return x


def qk_gemm(
    query: Any, keys: Any, scale: Any, bits: int, alpha: float = 1.0, *, num_threads: int | None = None
) -> np.ndarray:
    """Scores of query rows against quantised keys: alpha * query @ dequantized(keys).T, in float32.

    query: float32 [M, K]. keys: int8 [N, K] or uint8 [N, (K + 1) // 2]. scale: float32, 1 element or K, finite.
    bits: 8 or 4. Returns float32 [M, N].
    """
    bits = _bits(bits)
    rows, stored = _matrix("query", query, _FLOAT32), _matrix("keys", keys, _CODE_DTYPES[bits])
    columns = rows.shape[1]
    _columns(stored, bits, columns, "keys")
    factors = _column_scale("scale", scale, columns)
    alpha = _number("alpha", alpha)
    kernel, *_ = _kernel("qk_gemm", bits, columns, num_threads, rows.shape[0])
    scores = aligned_empty((rows.shape[0], stored.shape[0]), _FLOAT32)
    kernel(rows, stored, factors, scores, alpha)
    return scores


def sv_gemm(
    probabilities: Any,
    values: Any,
    scale: Any,
    bits: int,
    columns: int | None = None,
    beta: float = 0.0,
    out: Any = None,
    *,
    num_threads: int | None = None,
) -> np.ndarray:
    """Weighted sums of quantised values: probabilities @ dequantized(values) + beta * out, in float32.

    probabilities: float32 [M, T]. values: int8 [T, K] or uint8 [T, (K + 1) // 2]. scale: float32, 1 element or K,
    finite. bits: 8 or 4. columns: K, None = every column that the values hold. out: writable float32 [M, K], updated in
    place and returned; it is not read when beta is 0, and must be given when it is not. Returns float32 [M, K].
    """
    bits = _bits(bits)
    weights, stored = _matrix("probabilities", probabilities, _FLOAT32), _matrix("values", values, _CODE_DTYPES[bits])
    rows, keys = weights.shape
    if stored.shape[0] != keys:
        raise InvalidArgument(f"values must have a row per column of probabilities ({keys}), got {stored.shape[0]}")
    columns = _columns(stored, bits, columns, "values")
    factors = _column_scale("scale", scale, columns)
    beta = _number("beta", beta)
    given = _output(out, (rows, columns), beta)
    kernel, spec, sizes = _kernel("sv_gemm", bits, columns, num_threads, rows)
    result = _in_place(given, weights, stored, factors)
    if result is None:
        result = aligned_empty((rows, columns), _FLOAT32)
        if given is not None:
            result[...] = given
    partial, kv_chunk = _partial_sums(rows, keys, spec, sizes)
    kernel(weights, stored, factors, result, partial, beta, kv_chunk)
    if given is None:
        return result
    if result is not given:
        given[...] = result
    return given


def _partial_sums(rows: int, keys: int, spec: KernelSpec, sizes: BlockSizes) -> tuple[np.ndarray, int]:
    """Scratch of sv_gemm and the keys of a task."""
    kv_chunk = sizes.kv_chunk
    # A split of the keys gives few rows to several threads; many rows need none. The number of threads has no say.
    if rows > sizes.decode_rows:
        kv_chunk = -(-keys // sizes.decode_kv_block) * sizes.decode_kv_block
    chunks = -(-keys // kv_chunk)
    tiles = -(-rows // spec.row_tile) if chunks > 1 else 1
    width = spec.cache_planes * sizes.padded_columns(spec.cache_columns)
    return aligned_empty((tiles, chunks, spec.row_tile, width), _FLOAT32), kv_chunk


def flash_attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    total_lengths: Any,
    k_scale: Any,
    v_scale: Any,
    *,
    bits: int,
    scale: float | None = None,
    causal: bool = True,
    local_window_size: int = -1,
    softcap: float = 0.0,
    num_threads: int | None = None,
    strategy: str = "flash",
) -> np.ndarray:
    """Attention of the last S tokens of each entry over its filled, quantised cache.

    query: float32 [B, S, N, H]; token s of entry b stands at position total_lengths[b] - S + s. key_cache, value_cache:
    codes [B, N_kv, C, H or (H + 1) // 2], N a multiple of N_kv. total_lengths: int32 or int64 [B], each S <= t <= C.
    k_scale, v_scale: float32, 1 element or N_kv * H, finite. scale: of the scores, None = 1 / sqrt(H). causal: a token
    sees no later one. local_window_size: keys a token sees, itself included, -1 = all. softcap: 0 = off. strategy:
    "flash", "naive", "flash_decoding" or "auto". Returns float32 [B, S, N, H].
    """
    bits = _bits(bits)
    rows = _array("query", query, _FLOAT32, 4)
    keys, values = (
        _array(name, cache, _CODE_DTYPES[bits], 4)
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache))
    )
    batch, tokens, heads, head_size = rows.shape
    kv_heads = keys.shape[1]
    _check_caches(rows, keys, values, bits)
    totals = _total_lengths(total_lengths, rows, keys)
    k_factors, v_factors = _scale_pair(k_scale, v_scale, kv_heads * head_size)
    quant_type = "PER_TENSOR" if k_factors.size == 1 else "PER_CHANNEL"
    if np.shares_memory(keys, values):
        # The operator refuses key and value caches in one place.
        values = values.copy()
    attention = GroupQueryAttention(
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=0.0 if scale is None else scale,
        softcap=softcap,
        causal=causal,
        local_window_size=local_window_size,
        k_quant_type=quant_type,
        v_quant_type=quant_type,
        kv_cache_bit_width=bits,
        strategy=strategy,
        num_threads=None if num_threads is None else _positive("num_threads", num_threads),
    )
    output = np.empty(rows.shape, np.float32)
    # The operator takes several entries at once only with one token each.
    for entries in [slice(0, batch)] if tokens == 1 else [slice(b, b + 1) for b in range(batch)]:
        nothing = np.empty((totals[entries].size, 0, kv_heads * head_size), np.float32)
        # The caches are past and present at once: nothing is added and nothing copied.
        result = attention(
            query=rows[entries].reshape(-1, tokens, heads * head_size),
            key=nothing,
            value=nothing,
            past_key=keys[entries],
            past_value=values[entries],
            seqlens_k=totals[entries] - 1,
            total_sequence_length=totals[entries].max(keepdims=True),
            k_scale=k_factors,
            v_scale=v_factors,
            present_key=keys[entries],
            present_value=values[entries],
        )
        output[entries] = result.output.reshape(output[entries].shape)
    return output


def _kernel(
    operation: Operation, bits: int, columns: int, num_threads: int | None, rows: int = 0
) -> tuple[Callable[..., Any], KernelSpec, BlockSizes]:
    """The kernel, its spec and block sizes; the launcher is set to num_threads. rows: 0 = without a row tile."""
    threads = usable_cores() if num_threads is None else _positive("num_threads", num_threads)
    library = library_for(None)
    spec = KernelSpec(operation, "f32", _FORMATS[bits], columns, row_tile_for(rows) if rows else 0)
    kernel = library.kernel(spec)
    launcher().use_threads(threads)
    return kernel, spec, library.sizes.default


def _bits(bits: int) -> int:
    if not isinstance(bits, Integral) or bits not in _FORMATS:
        raise InvalidArgument(f"bits must be 8 or 4, got {bits!r}")
    return int(bits)


def _positive(name: str, value: int) -> int:
    if not isinstance(value, Integral) or value < 1:
        raise InvalidArgument(f"{name} must be a positive integer or None, got {value!r}")
    return int(value)


def _number(name: str, value: float) -> float:
    if not isinstance(value, Real):
        raise InvalidArgument(f"{name} must be a real number, got {type(value).__name__}")
    number = float(value)
    if not abs(number) <= _FLOAT32_MAX:
        raise InvalidArgument(f"{name} must be a finite float32, got {number}")
    return number


def _array(name: str, value: Any, dtype: np.dtype, ndim: int) -> np.ndarray:
    """The argument as kernels read it: `dtype`, `ndim` axes, none of them empty."""
    array = _checked(name, value, dtype)
    if array.ndim != ndim or 0 in array.shape:
        raise InvalidArgument(f"{name} must have {ndim} axes, none of extent 0, got shape {array.shape}")
    return _with_unit_stride(readable(array))


def _matrix(name: str, value: Any, dtype: np.dtype) -> np.ndarray:
    return _array(name, value, dtype, 2)


def _checked(name: str, value: Any, dtype: np.dtype) -> np.ndarray:
    array = as_array(value, name)
    if array is None or array.dtype != dtype:
        came = "nothing" if array is None else str(array.dtype)
        raise InvalidArgument(f"{name} must be an array of {dtype}, got {came}")
    return array


def _with_unit_stride(array: np.ndarray) -> np.ndarray:
    """A last axis of extent 1 may have any stride in NumPy; kernels check for 1 element."""
    if array.strides[-1] == array.itemsize:
        return array
    strides = (*array.strides[:-1], array.itemsize)
    return np.lib.stride_tricks.as_strided(array, array.shape, strides, writeable=True)


def _columns(codes: np.ndarray, bits: int, columns: int | None, name: str = "codes") -> int:
    """K of codes [rows, stored]; checks that they hold `columns`."""
    planes, stored = 8 // bits, codes.shape[-1]
    if columns is None:
        return planes * stored
    columns = _positive("columns", columns)
    wanted = -(-columns // planes)
    if stored != wanted:
        raise InvalidArgument(f"{name} must have {wanted} elements a row for {columns} columns, got {stored}")
    return columns


def _scale(name: str, scale: Any, count: int) -> np.ndarray:
    """A finite float32 scale of 1 or `count` elements, flat."""
    given = np.float32(scale) if isinstance(scale, float) else scale
    array = _checked(name, given, _FLOAT32).reshape(-1)
    if array.size not in (1, count):
        raise InvalidArgument(f"{name} must have 1 element or {count}, got {array.size}")
    if not (math.isfinite(array[0]) if array.size == 1 else np.isfinite(array).all()):
        raise InvalidArgument(f"{name} must be finite, got {array[~np.isfinite(array)][0]}")
    return array


def _column_scale(name: str, scale: Any, columns: int) -> np.ndarray:
    """A scale as [K], repeated where one serves all columns."""
    array = _scale(name, scale, columns)
    return array.repeat(columns) if array.size < columns else _with_unit_stride(readable(array))


def _scale_pair(k_scale: Any, v_scale: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The scales of keys and values, of one size: 1 or `count`."""
    keys, values = _scale("k_scale", k_scale, count), _scale("v_scale", v_scale, count)
    if keys.size == values.size:
        return keys, values
    return keys.repeat(count // keys.size), values.repeat(count // values.size)


def _output(out: Any, shape: tuple[int, int], beta: float) -> np.ndarray | None:
    if out is None:
        if beta:
            raise InvalidArgument(f"beta is {beta}, but there is no out to multiply by it")
        return None
    array = _checked("out", out, _FLOAT32)
    if array.shape != shape:
        raise InvalidArgument(f"out must have shape {shape}, got {array.shape}")
    if not array.flags.writeable:
        raise InvalidArgument("out is read-only")
    return array


def _in_place(out: np.ndarray | None, *inputs: np.ndarray) -> np.ndarray | None:
    """`out` if the kernel can write it directly: in its layout, no input in its memory."""
    if out is None or not kernels_can_write(out) or out.strides[-1] != out.itemsize:
        return None
    return None if any(np.may_share_memory(out, array) for array in inputs) else out


def _check_caches(query: np.ndarray, keys: np.ndarray, values: np.ndarray, bits: int) -> None:
    batch, _, heads, head_size = query.shape
    if values.shape != keys.shape:
        raise InvalidArgument(f"key_cache and value_cache must have one shape, got {keys.shape} and {values.shape}")
    if keys.shape[0] != batch:
        raise InvalidArgument(f"key_cache must have the query's {batch} entries, got {keys.shape[0]}")
    if heads % keys.shape[1]:
        raise InvalidArgument(f"query heads must be a multiple of the KV heads, got {heads} and {keys.shape[1]}")
    _columns(keys, bits, head_size, "key_cache")


def _total_lengths(total_lengths: Any, query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The lengths as int32 [B], each within [S, C]."""
    array = as_array(total_lengths, "total_lengths")
    if array is None or array.dtype not in (np.int32, np.int64) or array.shape != query.shape[:1]:
        came = "nothing" if array is None else f"{array.dtype} of shape {array.shape}"
        raise InvalidArgument(f"total_lengths must be int32 or int64 of shape {query.shape[:1]}, got {came}")
    tokens, capacity = query.shape[1], keys.shape[2]
    outside = array[(array < tokens) | (array > capacity)]
    if outside.size:
        raise InvalidArgument(f"total_lengths must be within [S, C] = [{tokens}, {capacity}], got {outside[0]}")
    return np.array(array, np.int32)
