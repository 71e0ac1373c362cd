"""qk_gemm and sv_gemm as kernels of their own: the steps of flash decoding without its softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from ..definitions.kv_quantize import CACHE_DTYPES
from ..kernels import KernelSpec
from ..schedules.block_sizes import multiplies_digits
from .arguments import buffer_parameter, dimension
from .cache_block import match_cache
from .decode import DecodeShape, qk_rows_first_step, split_form, sv_rows_first_step
from .primitives_cache import declare_column_scale, declare_matrix
from .row_state import same_position
from .splice import alias, splice, whole
from .split_rows import SplitRows, SplitRowsForm, qk_keys


def _gemm_shape(spec: KernelSpec, sizes, split: SplitRowsForm | None = None) -> DecodeShape:
    columns = split.columns if split else sizes.padded_columns(spec.cache_columns)
    return DecodeShape(spec.row_tile, 1, sizes.decode_kv_block, spec.cache_planes, columns, sizes.lanes)


def _ceil_div(extent, divisor: int):
    return (extent + (divisor - 1)) // divisor


class _Tile(NamedTuple):
    """Row tile of a task: rows first .. first + valid of a matrix, valid <= row_tile."""

    first: Any  # int64
    valid: Any  # int64


def _load_query(spec: KernelSpec, shape: DecodeShape, query, tile: _Tile, scale, alpha, packed, position) -> None:
    """packed[r, e, position(c)] = alpha * scale[h] * query[row, h], h = c E + e; 0 in padding columns and rows."""
    fold = T.sblock_alloc_buffer((spec.head_size,))
    with T.serial(0, spec.head_size) as h:
        T.buffer_store(fold, scale[h] * alpha, [h])
    with T.grid(*packed.shape) as (r, e, c):
        T.buffer_store(packed, T.float32(0), [r, e, c])
    with T.serial(0, tile.valid) as r:
        for e in range(shape.planes):
            with T.serial(0, (spec.head_size - e + shape.planes - 1) // shape.planes) as c:
                h = c * shape.planes + e
                T.buffer_store(packed, query[tile.first + r, h] * fold[h], [r, e, position(c)])


def _load_probabilities(shape: DecodeShape, probabilities, tile: _Tile, begin, count, p) -> None:
    """p[r, t] = probabilities[row, begin + t]; 0 past the last key and row, whose values are stand-ins."""
    with T.grid(*p.shape) as (r, t):
        T.buffer_store(p, T.float32(0), [r, t])
    with T.serial(0, tile.valid) as r:
        with T.serial(0, count) as t:
            T.buffer_store(p, probabilities[tile.first + r, begin + t], [r, t])


def _emit_qk(spec: KernelSpec, shape: DecodeShape, step, keys, begin, last, query, scores) -> None:
    region = keys[begin : begin + shape.kv_block, 0 : spec.cache_columns]
    with T.sblock("qk_step"):
        T.reads(region, whole(query))
        T.writes(whole(scores))
        splice(step, [match_cache(spec, region, keys.dtype, shape.kv_block), last, query, scores])


def _emit_qk_split(spec: KernelSpec, shape: DecodeShape, step, keys, begin, last, operands: SplitRows, scores) -> None:
    """As `_emit_qk` by integer dot products, a few keys at a time."""
    taken = operands.of_step(short=False)
    step_keys = qk_keys(shape.row_tile, shape.kv_block)
    with T.serial(0, shape.kv_block // step_keys) as part:
        offset = T.bind(part * step_keys)
        region = keys[begin + offset : begin + offset + step_keys, 0 : spec.cache_columns]
        target = scores[0 : shape.row_tile, offset : offset + step_keys]
        with T.sblock("qk_step"):
            T.reads(region, *(whole(operand) for operand in taken))
            T.writes(target)
            rows = match_cache(spec, region, keys.dtype, step_keys)
            part_scores = T.match_buffer(
                target, (shape.row_tile, step_keys), "float32", strides=(shape.kv_block, 1), offset_factor=1
            )
            splice(step, [rows, last - T.Cast("int32", offset), *taken, part_scores])


def _query_operands(spec: KernelSpec, split: SplitRowsForm | None, query_tile):
    """What the QK step takes of a tile of rows: the rows, or their digits."""
    if split is None:
        return query_tile
    operands = split.allocate_split_rows(spec, int(query_tile.shape[0]))
    split.split_rows(spec, query_tile, int(query_tile.shape[0]), operands)
    return operands


def _emit_sv(spec: KernelSpec, shape: DecodeShape, step, values, begin, last, p, acc, one) -> None:
    region = values[begin : begin + shape.kv_block, 0 : spec.cache_columns]
    with T.sblock("sv_step"):
        T.reads(region, whole(p), whole(acc), whole(one))
        T.writes(whole(acc))
        splice(step, [match_cache(spec, region, values.dtype, shape.kv_block), last, p, acc, one, alias(acc)])


def _write_result(spec: KernelSpec, shape: DecodeShape, acc, tile: _Tile, scale, beta, out) -> None:
    """out = acc * scale + beta * out, beta 0 without a look at out."""

    def store(old) -> None:
        with T.serial(0, tile.valid) as r:
            row = tile.first + r
            for e in range(shape.planes):
                with T.serial(0, (spec.head_size - e + shape.planes - 1) // shape.planes) as c:
                    h = c * shape.planes + e
                    T.buffer_store(out, acc[r, e, c] * scale[h] + old(row, h), [row, h])

    with T.If(beta == T.float32(0)):
        with T.Then():
            store(lambda row, h: T.float32(0))
        with T.Else():
            store(lambda row, h: out[row, h] * beta)


def _save_partial(shape: DecodeShape, acc, partial, tile_index, chunk) -> None:
    with T.grid(*acc.shape) as (r, e, c):
        T.buffer_store(partial, acc[r, e, c], [tile_index, chunk, r, e * shape.columns + c])


def _add_partials(shape: DecodeShape, partial, tile_index, chunks, acc) -> None:
    """acc = sum of all chunks, in chunk order."""
    with T.serial(0, chunks) as k:
        with T.grid(*acc.shape) as (r, e, c):
            T.buffer_store(acc, acc[r, e, c] + partial[tile_index, k, r, e * shape.columns + c], [r, e, c])


def _clear(buffer) -> None:
    with T.grid(*buffer.shape) as at:
        T.buffer_store(buffer, T.float32(0), list(at))


def qk_gemm(spec: KernelSpec, sizes):
    """The qk_gemm kernel's PrimFunc: a task is (sizes.kv_chunk keys, spec.row_tile query rows).

    query [M, K] float32, keys [N, C], scale [K] float32, scores [M, N] float32, alpha -> scores = alpha query keys^T.
    """
    split = split_form(spec, sizes) if multiplies_digits(spec, sizes) else None
    shape = _gemm_shape(spec, sizes, split)
    R, BC, chunk = shape.row_tile, shape.kv_block, sizes.kv_chunk
    step = split.qk_split_steps(spec, R, BC).all_digits if split else qk_rows_first_step(spec, shape)
    emit = _emit_qk_split if split else _emit_qk
    position = split.query_position if split else same_position

    @T.prim_func(s_tir=True)
    def kernel(query_: T.handle, keys_: T.handle, scale_: T.handle, scores_: T.handle, alpha: T.float32):
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        M = T.meta_var(dimension("M"))
        N = T.meta_var(dimension("N"))
        query = T.meta_var(declare_matrix("query", query_, M, spec.head_size))
        keys = T.meta_var(declare_matrix("keys", keys_, N, spec.cache_columns, CACHE_DTYPES[spec.cache]))
        scale = T.meta_var(declare_column_scale(spec, scale_))
        result = T.meta_var(declare_matrix("scores", scores_, M, N))
        # Tiles of one chunk follow each other: they find its keys in the cache.
        for k, i in T.grid(_ceil_div(N, chunk), _ceil_div(M, R)):
            with T.sblock("task"):
                ak, ai = T.axis.remap("SS", [k, i])
                T.reads()
                T.writes()
                vk: T.let = ak
                vi: T.let = ai
                query_tile = T.sblock_alloc_buffer((R, shape.planes, shape.columns))
                scores = T.sblock_alloc_buffer((R, BC))
                first_row: T.let = vi * R
                valid: T.let = T.min(M - first_row, T.int64(R))
                keys_left: T.let = T.min(N - vk * chunk, T.int64(chunk))
                tile = T.meta_var(_Tile(first_row, valid))
                _load_query(spec, shape, query, tile, scale, alpha, query_tile, position)
                operands = T.meta_var(_query_operands(spec, split, query_tile))
                for blk in T.serial(_ceil_div(keys_left, BC)):
                    begin: T.let = vk * chunk + blk * BC
                    count: T.let = T.min(N - begin, T.int64(BC))
                    last: T.let = T.Cast("int32", count) - 1
                    emit(spec, shape, step, keys, begin, last, operands, scores)
                    for r in T.serial(valid):
                        for t in T.serial(count):
                            result[first_row + r, begin + t] = scores[r, t]

    return kernel


def sv_gemm(spec: KernelSpec, sizes):
    """The sv_gemm kernel's PrimFunc: a task is (spec.row_tile rows, kv_chunk keys).

    probabilities [M, T] float32, values [T, C], scale [K] float32, out [M, K] float32, partial [row tiles, chunks,
    row_tile, E x columns] float32 scratch, read only with several chunks, beta, kv_chunk: int64, a multiple of the KV
    block -> out = probabilities values + beta out.
    """
    shape = _gemm_shape(spec, sizes)
    R, BC = shape.row_tile, shape.kv_block
    step = sv_rows_first_step(spec, shape)

    @T.prim_func(s_tir=True)
    def kernel(
        probabilities_: T.handle,
        values_: T.handle,
        scale_: T.handle,
        out_: T.handle,
        partial_: T.handle,
        beta: T.float32,
        kv_chunk: T.int64,
    ):
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        M = T.meta_var(dimension("M"))
        N = T.meta_var(dimension("T"))
        probabilities = T.meta_var(declare_matrix("probabilities", probabilities_, M, N))
        values = T.meta_var(declare_matrix("values", values_, N, spec.cache_columns, CACHE_DTYPES[spec.cache]))
        scale = T.meta_var(declare_column_scale(spec, scale_))
        out = T.meta_var(declare_matrix("out", out_, M, spec.head_size))
        partial = T.meta_var(_declare_partial(partial_, shape))
        chunks = T.meta_var(partial.shape[1])
        for i, k in T.grid(_ceil_div(M, R), chunks):
            with T.sblock("task"):
                ai, ak = T.axis.remap("SS", [i, k])
                T.reads()
                T.writes()
                vi: T.let = ai
                vk: T.let = ak
                acc = T.sblock_alloc_buffer((R, shape.planes, shape.columns))
                p = T.sblock_alloc_buffer((R, BC))
                one = T.sblock_alloc_buffer((R,))
                first_row: T.let = vi * R
                valid: T.let = T.min(M - first_row, T.int64(R))
                keys_left: T.let = T.min(N - vk * kv_chunk, kv_chunk)
                tile = T.meta_var(_Tile(first_row, valid))
                _clear(acc)
                for r in T.serial(R):
                    one[r] = T.float32(1)
                for blk in T.serial(_ceil_div(keys_left, BC)):
                    begin: T.let = vk * kv_chunk + blk * BC
                    count: T.let = T.min(N - begin, T.int64(BC))
                    last: T.let = T.Cast("int32", count) - 1
                    _load_probabilities(shape, probabilities, tile, begin, count, p)
                    _emit_sv(spec, shape, step, values, begin, last, p, acc, one)
                if chunks == T.int64(1):
                    _write_result(spec, shape, acc, tile, scale, beta, out)
                else:
                    _save_partial(shape, acc, partial, vi, vk)
        if chunks > T.int64(1):
            for i in T.serial(_ceil_div(M, R)):
                with T.sblock("merge"):
                    ai = T.axis.spatial(_ceil_div(M, R), i)
                    T.reads()
                    T.writes()
                    vi: T.let = ai
                    acc = T.sblock_alloc_buffer((R, shape.planes, shape.columns))
                    first_row: T.let = vi * R
                    tile = T.meta_var(_Tile(first_row, T.min(M - first_row, T.int64(R))))
                    _clear(acc)
                    _add_partials(shape, partial, vi, chunks, acc)
                    _write_result(spec, shape, acc, tile, scale, beta, out)

    return kernel


def _declare_partial(handle, shape: DecodeShape):
    outer = (dimension("partial_tiles"), dimension("partial_chunks"))
    return buffer_parameter("partial", handle, (*outer, shape.row_tile, shape.planes * shape.columns))
