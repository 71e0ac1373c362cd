"""kv_quantize and kv_dequantize: rows of float32 to cache rows and back, blocks of rows in parallel."""

from __future__ import annotations

from tvm.script import tirx as T

from ..definitions.kv_quantize import CACHE_DTYPES, decode, inverse_scale
from ..kernels import KernelSpec
from .arguments import buffer_parameter, dimension
from .encode_row import encode_row


def declare_matrix(name: str, handle, rows, columns, dtype: str = "float32"):
    """A matrix with contiguous columns and a free row stride; columns: a number or a dimension."""
    # TVM checks a stride only against an extent of its own width.
    extent = T.int64(columns) if isinstance(columns, int) else columns
    return buffer_parameter(name, handle, (rows, extent), dtype, ("row", T.int64(1)))


def declare_column_scale(spec: KernelSpec, handle):
    """A scale per column [K]; callers repeat a single one."""
    return buffer_parameter("scale", handle, (spec.head_size,))


def _decode_row(spec: KernelSpec, codes, scale, x, row) -> None:
    planes = spec.cache_planes

    def store(c, plane: int) -> None:
        h = c * planes + plane
        T.buffer_store(x, decode(codes[row, c], T.int32(plane), spec.cache) * scale[h], [row, h])

    with T.serial(0, spec.head_size // planes) as c:
        for plane in range(planes):
            store(c, plane)
    if spec.head_size % planes:
        store(spec.head_size // planes, 0)


def kv_quantize(spec: KernelSpec, sizes):
    """The kv_quantize kernel's PrimFunc: x [rows, K] float32, scale [K] float32 -> codes [rows, C]."""
    block_rows, K = sizes.kv_block, spec.head_size

    @T.prim_func(s_tir=True)
    def kernel(x_: T.handle, scale_: T.handle, codes_: T.handle):
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        rows = T.meta_var(dimension("rows"))
        x = T.meta_var(declare_matrix("x", x_, rows, K))
        scale = T.meta_var(declare_column_scale(spec, scale_))
        codes = T.meta_var(declare_matrix("codes", codes_, rows, spec.cache_columns, CACHE_DTYPES[spec.cache]))
        for i in T.serial((rows + (block_rows - 1)) // block_rows):
            with T.sblock("task"):
                ai = T.axis.spatial((rows + (block_rows - 1)) // block_rows, i)
                T.reads()
                T.writes()
                first: T.let = ai * block_rows
                inverse = T.sblock_alloc_buffer((K,))
                for h in T.serial(K):
                    inverse[h] = inverse_scale(scale[h])
                for r in T.serial(T.min(rows - first, T.int64(block_rows))):
                    row = T.meta_var(first + r)
                    encode_row(spec, lambda h: x[row, h], inverse, codes, (row,))

    return kernel


def kv_dequantize(spec: KernelSpec, sizes):
    """The kv_dequantize kernel's PrimFunc: codes [rows, C], scale [K] float32 -> x [rows, K] float32."""
    block_rows, K = sizes.kv_block, spec.head_size

    @T.prim_func(s_tir=True)
    def kernel(codes_: T.handle, scale_: T.handle, x_: T.handle):
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        rows = T.meta_var(dimension("rows"))
        codes = T.meta_var(declare_matrix("codes", codes_, rows, spec.cache_columns, CACHE_DTYPES[spec.cache]))
        scale = T.meta_var(declare_column_scale(spec, scale_))
        x = T.meta_var(declare_matrix("x", x_, rows, K))
        for i in T.serial((rows + (block_rows - 1)) // block_rows):
            with T.sblock("task"):
                ai = T.axis.spatial((rows + (block_rows - 1)) // block_rows, i)
                T.reads()
                T.writes()
                first: T.let = ai * block_rows
                for r in T.serial(T.min(rows - first, T.int64(block_rows))):
                    _decode_row(spec, codes, scale, x, first + r)

    return kernel
