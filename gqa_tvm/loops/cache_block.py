"""A block of consecutive cache rows, as a tensor expression and as a view inside a loop."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import te, tirx
from tvm.script import tirx as T

from ..definitions.kv_quantize import CACHE_DTYPES, kv_dequantize
from ..kernels import KernelSpec


class CacheBlock(NamedTuple):
    """The keys begin .. begin + kv_block of an entry and KV head in a cache; `last`: the last valid one, from begin."""

    cache: Any
    b: Any
    n: Any
    begin: Any
    last: Any
    kv_block: int


def keys_per_row(spec: KernelSpec, cache) -> int:
    """Keys that lie in a row of a cache buffer [B, N_kv, rows, columns]: several where the cache is packed."""
    return int(cache.shape[3]) // spec.cache_columns if spec.layout else 1


def decoded_cache(spec: KernelSpec, rows: int, columns: int, name: str):
    """TE tensors (cache rows [rows, C], last readable row, decoded [rows, E, columns] float32)."""
    cache_rows = te.placeholder((rows, spec.cache_columns), CACHE_DTYPES[spec.cache], name="rows")
    last_row = te.var("last_row", "int32")
    return cache_rows, last_row, kv_dequantize(cache_rows, last_row, columns, spec.cache, name)


def cache_region(spec: KernelSpec, block: CacheBlock):
    """The block's region of the cache; it may reach past the end, steps clamp their reads."""
    keys = keys_per_row(spec, block.cache)
    first = block.begin if keys == 1 else tirx.floordiv(block.begin, T.int32(keys))
    at = tirx.Cast("int64", first)
    return block.cache[block.b, block.n, at : at + block.kv_block // keys, 0 : keys * spec.cache_columns]


def match_cache(spec: KernelSpec, region, dtype: str, rows: int):
    """The region of so many keys as a [rows, C] buffer of the current block, whatever the cache's row stride.

    Packed: [rows / n, n C] for n keys in a row.
    """
    stride = T.int64()
    keys = keys_per_row(spec, region.source)
    shape = (rows // keys, keys * spec.cache_columns)
    return T.match_buffer(region, shape, dtype, strides=(stride, 1), offset_factor=1, align=1)
