"""Query rows as digits, and the steps of flash_decode that multiply by integer dot products."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import te, tirx
from tvm.script import tirx as T

from ..definitions import split_integer as si
from ..definitions.half import magnitude_bits
from ..definitions.kv_quantize import CACHE_DTYPES
from ..definitions.split_integer import accumulator_position
from ..kernels import KernelSpec
from .cache_block import CacheBlock, cache_region, match_cache
from .splice import make_step, splice, whole

__all__ = [
    "accumulator_position",
    "allocate_split_rows",
    "emit_qk_split",
    "qk_split_step",
    "split_rows",
    "sv_split_steps",
]
# Keys of a QK step; between the steps, cache rows that are needed soon are fetched.
QK_KEYS = 16
_LINE_BYTES = 64


class SplitRows(NamedTuple):
    """Rows as `qk_gemm_digits` takes them."""

    digits: Any  # [rows, D, C / 64, E, 4, 64] int8
    offsets: Any  # [rows, D, 16] int32
    down: Any  # [rows] float32, NaN for a row that is not finite


def allocate_split_rows(spec: KernelSpec, rows: int) -> SplitRows:
    vectors = spec.cache_columns // si.DOT_BYTES
    digits, _ = si.decode_digits(spec.precision)
    return SplitRows(
        T.sblock_alloc_buffer((rows, digits, vectors, spec.cache_planes, 4, si.DOT_BYTES), "int8"),
        T.sblock_alloc_buffer((rows, digits, si.DOT_LANES), "int32"),
        T.sblock_alloc_buffer((rows,)),
    )


def split_rows(spec: KernelSpec, query, count, target: SplitRows, spread=None) -> None:
    """Fill `target` from the first `count` rows of query [rows, E, C] float32; spread: as `_spread`, the default."""
    planes, columns = spec.cache_planes, spec.cache_columns
    digits, _ = si.decode_digits(spec.precision)
    # Whole vectors with a run-time index: the only kind of object for which LLVM aligns the stack to vectors, without
    # which those it spills there straddle cache lines.
    scales = T.sblock_alloc_buffer((int(query.shape[0]),), f"float32x{si.DOT_LANES}")
    largest = T.sblock_alloc_buffer((1,), "int32")
    row = T.sblock_alloc_buffer((digits, planes, columns), "int8")
    with T.serial(0, count) as r:
        T.buffer_store(largest, T.int32(0), [0])
        with T.grid(planes, columns) as (e, c):
            T.buffer_store(largest, tirx.max(largest[0], magnitude_bits(query[r, e, c])), [0])
        finite = T.bind(si.is_finite(largest[0]))
        up, down = (T.bind(scale) for scale in si.row_scales(largest[0], digits))
        T.buffer_store(scales, tirx.Broadcast(down, si.DOT_LANES), [r])
        with T.grid(planes, columns) as (e, c):
            fixed = T.bind(si.fixed_point(tirx.Select(finite, query[r, e, c], T.float32(0)), up))
            for d, digit in enumerate(si.signed_digits(fixed, digits)):
                T.buffer_store(row, digit, [d, e, c])
        (spread or _spread)(spec, row, r, target)
    with T.serial(0, count) as r:
        T.buffer_store(target.down, tirx.Shuffle([scales[r]], [T.int32(0)]), [r])


def _spread(spec: KernelSpec, row, r, target: SplitRows) -> None:
    """One row's digits [4, E, C] in the order of the dot products, and their products with the code of zero."""
    vectors, planes = spec.cache_columns // si.DOT_BYTES, spec.cache_planes
    for d in range(int(row.shape[0])):
        for v in range(vectors):
            for e in range(planes):
                bytes_ = row[d, e, T.ramp(v * si.DOT_BYTES, 1, si.DOT_BYTES)]
                dwords = tirx.reinterpret(f"int32x{si.DOT_LANES}", bytes_)
                for j in range(4):
                    lanes = [T.int32(4 * group + j) for group in range(4) for _ in range(4)]
                    spread = tirx.reinterpret(f"int8x{si.DOT_BYTES}", tirx.Shuffle([dwords], lanes))
                    T.buffer_store(target.digits, spread, [r, d, v, e, j, T.ramp(0, 1, si.DOT_BYTES)])
        with T.serial(0, 4) as group:
            total = T.sblock_alloc_buffer((1,), "int32")
            T.buffer_store(total, T.int32(0), [0])
            with T.grid(vectors, planes, 16) as (v, e, i):
                digit = row[d, e, v * si.DOT_BYTES + group * 16 + i]
                T.buffer_store(total, total[0] + tirx.Cast("int32", digit), [0])
            with T.serial(0, 4) as i:
                offset = total[0] * T.int32(si.KEY_OFFSET[spec.cache])
                T.buffer_store(target.offsets, offset, [r, d, group * 4 + i])


def stored_rows(spec: KernelSpec, kv_block: int):
    """TE tensors of cache rows as they are stored, and of the last readable row."""
    rows = te.placeholder((kv_block, spec.cache_columns), CACHE_DTYPES[spec.cache], name="rows")
    return rows, te.var("last_row", "int32")


def qk_split_step(spec: KernelSpec, row_tile: int, kv_block: int):
    """scores = query keys^T; arguments: cache rows, last row, the fields of `SplitRows`, scores."""
    cache_rows, last_row = stored_rows(spec, kv_block)
    vectors, planes = spec.cache_columns // si.DOT_BYTES, spec.cache_planes
    count, _ = si.decode_digits(spec.precision)
    digits = te.placeholder((row_tile, count, vectors, planes, 4, si.DOT_BYTES), "int8", name="digits")
    offsets = te.placeholder((row_tile, count, si.DOT_LANES), "int32", name="offsets")
    down = te.placeholder((row_tile,), name="down")
    code_at = si.key_vectors(cache_rows, last_row, planes)
    scores = si.qk_gemm_digits(digits, offsets, down, code_at, (kv_block, vectors, planes))
    return make_step([cache_rows, last_row, digits, offsets, down, scores])


def sv_split_steps(spec: KernelSpec, row_tile: int, kv_block: int):
    """acc = alpha acc + p values; arguments: cache rows, last row, p, old acc, alpha, acc."""
    cache_rows, last_row = stored_rows(spec, kv_block)
    planes = spec.cache_planes
    p = te.placeholder((row_tile, kv_block), name="p")
    accumulator = te.placeholder((row_tile, planes, spec.cache_columns), name="acc_old")
    beta = te.placeholder((row_tile,), name="row_beta")
    digits, down_at = si.probability_digits(p, si.decode_digits(spec.precision)[1])
    code_at = si.value_vectors(cache_rows, last_row, planes)
    result = si.sv_gemm_digits(digits, down_at, code_at, accumulator, beta, spec.cache_columns // si.DOT_BYTES)
    return (make_step([cache_rows, last_row, p, accumulator, beta, result]),)


def _fetch_rows(spec: KernelSpec, cache, b, n, first, total, lines: int) -> None:
    """Ask for cache lines of the rows from `first` on (of those that exist) in the second-level cache."""
    at = T.bind(tirx.Cast("int64", tirx.max(tirx.min(first, total - QK_KEYS), T.int32(0))))
    per_row = spec.cache_columns // _LINE_BYTES
    for line in range(lines):
        address = T.address_of(cache[b, n, at + line // per_row, line % per_row * _LINE_BYTES])
        locality_l2, read, data = T.int32(2), T.int32(0), T.int32(1)
        T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", address, read, locality_l2, data))


def emit_qk_split(
    spec: KernelSpec, shape, step, keys: CacheBlock, values: CacheBlock, operands, tile_of, scores
) -> None:
    """scores [R, kv_block] by steps of QK_KEYS keys; tile_of: view of an operand's tile.

    The loads from memory are spread over the step: values of this block, keys of the next.
    """
    b, n, begin, last = keys.b, keys.n, keys.begin, keys.last
    rows_of_lines = QK_KEYS * spec.cache_columns // _LINE_BYTES
    with T.serial(0, shape.kv_block // QK_KEYS) as part:
        offset = T.bind(part * QK_KEYS)
        key = T.bind(begin + offset)
        lines = rows_of_lines if shape.row_tile > 1 else 1
        _fetch_rows(spec, values.cache, b, n, key, last + begin + 1, lines)
        if shape.row_tile > 1:
            _fetch_rows(spec, keys.cache, b, n, key + shape.kv_block, last + begin + 1, lines)
        region = cache_region(spec, keys._replace(begin=key, kv_block=QK_KEYS))
        target = scores[0 : shape.row_tile, offset : offset + QK_KEYS]
        with T.sblock("qk_step"):
            T.reads(region, *(whole(operand) for operand in operands))
            T.writes(target)
            rows = match_cache(spec, region, keys.cache.dtype, QK_KEYS)
            part_scores = T.match_buffer(
                target, (shape.row_tile, QK_KEYS), "float32", strides=(shape.kv_block, 1), offset_factor=1
            )
            splice(step, [rows, last - offset, *(tile_of(operand) for operand in operands), part_scores])
