"""Query rows as digits, and the steps of flash_decode that multiply by integer dot products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm import te, tirx
from tvm.script import tirx as T

from ..definitions import split_integer as si
from ..definitions.half import magnitude_bits
from ..definitions.kv_quantize import CACHE_DTYPES
from ..definitions.split_vectors import RowVectors
from ..kernels import KernelSpec
from .cache_block import CacheBlock, cache_region, match_cache
from .splice import make_step, splice, whole

# Keys of a QK step.
QK_KEYS = 16


class SplitRows(NamedTuple):
    """Rows as `qk_gemm_digits` takes them."""

    digits: Any  # [rows, D, C / 64, E, 4, 64] int8
    starts: Any  # [rows, D, 16] int32
    down: Any  # [rows] float32, NaN for a row that is not finite


@dataclass(frozen=True)
class SplitRowsForm:
    """The steps of flash_decode for keys and values of these vectors, on a CPU with so many lanes of float32."""

    keys: RowVectors
    values: RowVectors
    lanes: int

    @property
    def columns(self) -> int:
        """Columns of a padded row."""
        return self.values.padded

    def query_position(self, column):
        """Where `split_rows` wants a column of the query; zeros elsewhere."""
        return self.values.position(column)

    def accumulator_position(self, column):
        return self.values.accumulator_position(column)

    def allocate_split_rows(self, spec: KernelSpec, rows: int) -> SplitRows:
        vectors = self.keys
        digits, _ = si.decode_digits(spec.precision)
        return SplitRows(
            T.sblock_alloc_buffer((rows, digits, vectors.count, spec.cache_planes, 4, vectors.size), "int8"),
            T.sblock_alloc_buffer((rows, digits, vectors.lanes), "int32"),
            T.sblock_alloc_buffer((rows,)),
        )

    def split_rows(self, spec: KernelSpec, query, count, target: SplitRows) -> None:
        """Fill `target` from the first `count` rows of query [rows, E, padded C] float32."""
        spread = lambda row, r: _spread(spec, self.keys, row, r, target)  # noqa: E731
        write_digits(spec, query, count, target.down, self.lanes, spread)

    def qk_split_step(self, spec: KernelSpec, row_tile: int, kv_block: int):
        """scores = query keys^T; arguments: cache rows, last row, the fields of `SplitRows`, scores."""
        vectors, planes = self.keys, spec.cache_planes
        cache_rows, last_row = stored_rows(spec, kv_block)
        count, _ = si.decode_digits(spec.precision)
        digits = te.placeholder((row_tile, count, vectors.count, planes, 4, vectors.size), "int8", name="digits")
        starts = te.placeholder((row_tile, count, vectors.lanes), "int32", name="starts")
        down = te.placeholder((row_tile,), name="down")
        code_at = si.key_vectors(cache_rows, last_row, planes, vectors)
        scores = si.qk_gemm_digits(digits, starts, down, code_at, kv_block, vectors)
        return make_step([cache_rows, last_row, digits, starts, down, scores])

    def sv_split_steps(self, spec: KernelSpec, row_tile: int, kv_block: int):
        """acc = alpha acc + p values; arguments: cache rows, last row, p, old acc, alpha, acc."""
        cache_rows, last_row = stored_rows(spec, kv_block)
        p = te.placeholder((row_tile, kv_block), name="p")
        accumulator = te.placeholder((row_tile, spec.cache_planes, self.columns), name="acc_old")
        beta = te.placeholder((row_tile,), name="row_beta")
        digits, down_at = si.probability_digits(p, si.decode_digits(spec.precision)[1])
        code_at = si.value_vectors(cache_rows, last_row, spec.cache_planes, self.values)
        result = si.sv_gemm_digits(digits, down_at, code_at, accumulator, beta, self.values)
        return (make_step([cache_rows, last_row, p, accumulator, beta, result]),)

    def emit_qk_split(self, spec: KernelSpec, shape, step, keys: CacheBlock, operands, tile_of, scores) -> None:
        """scores [R, kv_block] by steps of QK_KEYS keys; tile_of: view of an operand's tile."""
        _emit_qk_split(spec, shape, step, keys, operands, tile_of, scores)


def write_digits(spec: KernelSpec, query, count, down, lanes: int, spread) -> None:
    """The digits of the first `count` rows of query [rows, E, columns] float32, and `down` [rows].

    spread: function (digits [D, E, columns] int8, row) that stores a row's digits as the products take them.
    """
    planes, columns = (int(n) for n in query.shape[1:])
    digits, _ = si.decode_digits(spec.precision)
    # Whole vectors with a run-time index: the only kind of object for which LLVM aligns the stack to vectors,
    # without which those it spills there straddle cache lines.
    scales = T.sblock_alloc_buffer((int(query.shape[0]),), f"float32x{lanes}")
    largest = T.sblock_alloc_buffer((1,), "int32")
    row = T.sblock_alloc_buffer((digits, planes, columns), "int8")
    with T.serial(0, count) as r:
        T.buffer_store(largest, T.int32(0), [0])
        with T.grid(planes, columns) as (e, c):
            T.buffer_store(largest, tirx.max(largest[0], magnitude_bits(query[r, e, c])), [0])
        finite = T.bind(si.is_finite(largest[0]))
        up, down_factor = (T.bind(scale) for scale in si.row_scales(largest[0], digits))
        T.buffer_store(scales, tirx.Broadcast(down_factor, lanes), [r])
        with T.grid(planes, columns) as (e, c):
            fixed = T.bind(si.fixed_point(tirx.Select(finite, query[r, e, c], T.float32(0)), up))
            for d, digit in enumerate(si.signed_digits(fixed, digits)):
                T.buffer_store(row, digit, [d, e, c])
        spread(row, r)
    with T.serial(0, count) as r:
        T.buffer_store(down, tirx.Shuffle([scales[r]], [T.int32(0)]), [r])


def _spread(spec: KernelSpec, vectors: RowVectors, row, r, target: SplitRows) -> None:
    """One row's digits [D, E, C] in the order of the dot products, and their products with the code of zero."""
    planes, size = spec.cache_planes, vectors.size
    for d in range(int(row.shape[0])):
        for v in range(vectors.count):
            for e in range(planes):
                bytes_ = row[d, e, T.ramp(v * vectors.row_size, 1, vectors.row_size)]
                dwords = tirx.reinterpret(f"int32x{vectors.row_size // 4}", bytes_)
                for j in range(4):
                    lanes = [T.int32(4 * (g % vectors.row_groups) + j) for g in range(vectors.groups) for _ in range(4)]
                    spread = tirx.reinterpret(f"int8x{size}", tirx.Shuffle([dwords] * vectors.shared, lanes))
                    T.buffer_store(target.digits, spread, [r, d, v, e, j, T.ramp(0, 1, size)])
        with T.serial(0, vectors.groups) as group:
            total = T.sblock_alloc_buffer((1,), "int32")
            T.buffer_store(total, T.int32(0), [0])
            with T.grid(vectors.count, planes, 16) as (v, e, i):
                digit = row[d, e, v * vectors.row_size + _row_group(group, vectors) * 16 + i]
                T.buffer_store(total, total[0] + tirx.Cast("int32", digit), [0])
            with T.serial(0, 4) as i:
                start = total[0] * T.int32(-si.KEY_OFFSET[spec.cache])
                T.buffer_store(target.starts, start, [r, d, group * 4 + i])


def _row_group(group, vectors: RowVectors):
    """The group of columns of a group of lanes."""
    return group if vectors.shared == 1 else group % vectors.row_groups


def stored_rows(spec: KernelSpec, kv_block: int):
    """TE tensors of cache rows as they are stored, and of the last readable row."""
    rows = te.placeholder((kv_block, spec.cache_columns), CACHE_DTYPES[spec.cache], name="rows")
    return rows, te.var("last_row", "int32")


def _emit_qk_split(spec: KernelSpec, shape, step, keys: CacheBlock, operands, tile_of, scores) -> None:
    """As `SplitRowsForm.emit_qk_split`."""
    begin, last = keys.begin, keys.last
    with T.serial(0, shape.kv_block // QK_KEYS) as part:
        offset = T.bind(part * QK_KEYS)
        key = T.bind(begin + offset)
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
