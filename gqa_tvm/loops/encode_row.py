"""Writing a row of float32 values as a cache stores it."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ..definitions.half import narrow
from ..definitions.kv_quantize import encode, pack_nibbles
from ..kernels import KernelSpec


def encode_row(spec: KernelSpec, value, inverse, cache, where) -> None:
    """cache[where] = value(h), h < H: rounded to a float format, or quantised by the inverse scales [H]."""

    def code(h):
        return encode(value(h), inverse[h], spec.cache)

    if spec.is_float_cache:
        with T.serial(0, spec.head_size) as h:
            T.buffer_store(cache, narrow(value(h), spec.cache), [*where, h])
    elif spec.cache == "i8":
        with T.serial(0, spec.head_size) as h:
            T.buffer_store(cache, tirx.Cast("int8", code(h)), [*where, h])
    else:
        with T.serial(0, spec.head_size // 2) as c:
            T.buffer_store(cache, pack_nibbles(code(c * 2), code(c * 2 + 1)), [*where, c])
        if spec.head_size % 2:
            last = spec.head_size - 1
            T.buffer_store(cache, pack_nibbles(code(last), T.int32(0)), [*where, last // 2])
