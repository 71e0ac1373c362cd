"""A block of consecutive cache rows, as a tensor expression and as a view inside a loop."""

from __future__ import annotations

from tvm import te, tirx
from tvm.script import tirx as T

from ..definitions.kv_quantize import CACHE_DTYPES, kv_dequantize
from ..kernels import KernelSpec


def decoded_cache(spec: KernelSpec, rows: int, columns: int, name: str):
    """TE tensors (cache rows [rows, C], last readable row, decoded [rows, E, columns] float32)."""
    cache_rows = te.placeholder((rows, spec.cache_columns), CACHE_DTYPES[spec.cache], name="rows")
    last_row = te.var("last_row", "int32")
    return cache_rows, last_row, kv_dequantize(cache_rows, last_row, columns, spec.cache, name)


def cache_region(spec: KernelSpec, cache, b, n, key_begin, rows: int):
    """The region cache[b, n, key_begin : key_begin + rows]; it may reach past the end, steps clamp their reads."""
    at = tirx.Cast("int64", key_begin)
    return cache[b, n, at : at + rows, 0 : spec.cache_columns]


def match_cache(spec: KernelSpec, region, dtype: str, rows: int):
    """The region as a [rows, C] buffer of the current block, whatever the cache's row stride."""
    stride = T.int64()
    return T.match_buffer(region, (rows, spec.cache_columns), dtype, strides=(stride, 1), offset_factor=1, align=1)
