"""Writing a quantised row into a packed cache."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ..definitions.kv_quantize import CACHE_DTYPES
from ..definitions.packed import KEY_QUAD, KEY_ROW
from ..kernels import KernelSpec
from .cache_block import keys_per_row
from .encode_row import encode_row


def encode_packed_row(spec: KernelSpec, value, inverse, cache, where) -> None:
    """Write key where[2] of (entry, KV head, key): its codes in order first, so that LLVM encodes whole vectors."""
    codes = T.sblock_alloc_buffer((spec.cache_columns,), CACHE_DTYPES[spec.cache])
    encode_row(spec, value, inverse, codes, ())
    b, n, key = where
    keys = keys_per_row(spec, cache)
    row, inner = T.bind(tirx.floordiv(key, T.int64(keys))), T.bind(tirx.floormod(key, T.int64(keys)))
    # Columns of a key that lie side by side: 4 in a cache of keys, 1 in one of values.
    width = KEY_QUAD if keys == KEY_ROW else 1
    with T.serial(0, spec.cache_columns // width) as c:
        source, target = c * width, c * (width * keys) + inner * width
        if width == 1:
            T.buffer_store(cache, codes[source], [b, n, row, target])
        else:
            T.buffer_store(cache, codes[T.ramp(source, 1, width)], [b, n, row, T.ramp(target, 1, width)])
