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

# Keys of a QK step: few rows load the digits that registers keep once for many keys, more would have too many sums.
_QK_KEYS, _FEW_ROWS, _QK_KEYS_OF_FEW = 16, 2, 64
# Of blocks that are in a kernel a second time, for rows that do not need their last digit.
SHORT = "_short"
_SUM_LANES = 16


class SplitRows(NamedTuple):
    """Rows as `qk_gemm_digits` takes them."""

    digits: Any  # [rows, D, C / 64, E, 4, 64] int8
    starts: Any  # [rows, pairs of D] int32
    down: Any  # [rows] float32, NaN for a row that is not finite
    # Where there is a step without the last digit: its `starts`, and whether a row needs that digit.
    short_starts: Any = None  # [rows, pairs of D - 1] int32
    needs_all: Any = None  # [rows] int32, 0 = no

    def of_step(self, short: bool):
        """What a step takes."""
        return self.digits, self.short_starts if short else self.starts, self.down


class QkSteps(NamedTuple):
    """The QK step of all digits, and where there is one, that without the last."""

    all_digits: Any
    short: Any = None


def qk_keys(row_tile: int, kv_block: int) -> int:
    """Keys of a QK step in blocks of so many."""
    few = row_tile <= _FEW_ROWS and kv_block % _QK_KEYS_OF_FEW == 0
    return _QK_KEYS_OF_FEW if few else _QK_KEYS


def has_short_step(spec: KernelSpec) -> bool:
    """Whether rows that do not need their last digit get a QK step of their own."""
    return spec.operation == "flash_decode" and si.decode_digits(spec.precision)[0] == 4


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
        pairs = si.digit_pairs(digits)
        allocate = T.sblock_alloc_buffer
        short = (allocate((rows, pairs), "int32"), allocate((rows,), "int32")) if has_short_step(spec) else ()
        return SplitRows(
            allocate((rows, digits, vectors.count, spec.cache_planes, 4, vectors.size), "int8"),
            allocate((rows, pairs), "int32"),
            allocate((rows,)),
            *short,
        )

    def split_rows(self, spec: KernelSpec, query, count, target: SplitRows) -> None:
        """Fill `target` from the first `count` rows of query [rows, E, padded C] float32."""
        spread = lambda row, r: _spread(spec, self.keys, row, r, target)  # noqa: E731
        write_digits(spec, query, count, target, self.lanes, spread)

    def qk_split_steps(self, spec: KernelSpec, row_tile: int, kv_block: int) -> QkSteps:
        """scores = query keys^T of `qk_keys` keys; arguments: cache rows, last row, digits, starts, down, scores."""
        keys = qk_keys(row_tile, kv_block)
        steps = [self._qk_step(spec, row_tile, keys)]
        if has_short_step(spec):
            steps.append(self._qk_step(spec, row_tile, keys, dropped=1))
        return QkSteps(*steps)

    def _qk_step(self, spec: KernelSpec, row_tile: int, keys: int, dropped: int = 0):
        vectors, planes = self.keys, spec.cache_planes
        cache_rows, last_row = stored_rows(spec, keys)
        count, _ = si.decode_digits(spec.precision)
        digits = te.placeholder((row_tile, count, vectors.count, planes, 4, vectors.size), "int8", name="digits")
        starts = te.placeholder((row_tile, si.digit_pairs(count)), "int32", name="starts")
        down = te.placeholder((row_tile,), name="down")
        code_at = si.key_vectors(cache_rows, last_row, planes, vectors)
        scores = si.qk_gemm_digits(digits, starts, down, code_at, keys, vectors, dropped)
        return make_step([cache_rows, last_row, digits, starts, down, scores], SHORT if dropped else "")

    def sv_split_steps(self, spec: KernelSpec, row_tile: int, kv_block: int):
        """acc = alpha acc + weight p values; arguments: cache rows, last row, p, old acc, alpha, weight, acc."""
        cache_rows, last_row = stored_rows(spec, kv_block)
        p = te.placeholder((row_tile, kv_block), name="p")
        accumulator = te.placeholder((row_tile, spec.cache_planes, self.columns), name="acc_old")
        beta, weight = (te.placeholder((row_tile,), name=name) for name in ("row_beta", "row_weight"))
        digits = si.probability_digits(p, si.decode_digits(spec.precision)[1])
        code_at = si.value_vectors(cache_rows, last_row, spec.cache_planes, self.values)
        result = si.sv_gemm_digits(digits, code_at, accumulator, beta, weight, self.values)
        return (make_step([cache_rows, last_row, p, accumulator, beta, weight, result]),)

    def emit_qk_split(self, spec: KernelSpec, shape, step, keys: CacheBlock, operands, tile_of, scores, seen) -> None:
        """scores [R, kv_block] of the first `seen` keys by steps of `qk_keys`; tile_of: view of an operand's tile."""
        emit_qk_parts(spec, shape, step, keys, operands, tile_of, scores, seen, qk_keys(shape.row_tile, shape.kv_block))


def write_digits(spec: KernelSpec, query, count, target, lanes: int, spread) -> None:
    """The digits of the first `count` rows of query [rows, E, columns] float32, target.down and target.needs_all.

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
        if has_short_step(spec):
            squares = sum_of_digits(row, 0, lambda digit: digit * digit)
            needed = si.needs_last_digit(squares, spec.head_size)
            T.buffer_store(target.needs_all, tirx.Cast("int32", needed), [r])
    with T.serial(0, count) as r:
        T.buffer_store(target.down, tirx.Shuffle([scales[r]], [T.int32(0)]), [r])


def sum_of_digits(row, d: int, term=lambda digit: digit):
    """The sum of `term` of a row's digits d [D, E, C], int32.

    A vector of partial sums, of which LLVM would otherwise make a chain of single bytes.
    """
    sums = T.sblock_alloc_buffer((1,), f"int32x{_SUM_LANES}")
    T.buffer_store(sums, tirx.Broadcast(T.int32(0), _SUM_LANES), [0])
    with T.grid(int(row.shape[1]), int(row.shape[2]) // _SUM_LANES) as (e, c):
        digits = tirx.Cast(f"int32x{_SUM_LANES}", row[d, e, T.ramp(c * _SUM_LANES, 1, _SUM_LANES)])
        T.buffer_store(sums, sums[0] + term(digits), [0])
    lanes = [tirx.Shuffle([sums[0]], [T.int32(i)]) for i in range(_SUM_LANES)]
    return T.bind(sum(lanes[1:], lanes[0]))


def _spread(spec: KernelSpec, vectors: RowVectors, row, r, target: SplitRows) -> None:
    """One row's digits [D, E, C] in the order of the dot products, and their products with the code of zero."""
    planes, size, count = spec.cache_planes, vectors.size, int(row.shape[0])
    for d in range(count):
        for v in range(vectors.count):
            for e in range(planes):
                bytes_ = row[d, e, T.ramp(v * vectors.row_size, 1, vectors.row_size)]
                dwords = tirx.reinterpret(f"int32x{vectors.row_size // 4}", bytes_)
                for j in range(4):
                    lanes = [T.int32(4 * (g % vectors.row_groups) + j) for g in range(vectors.groups) for _ in range(4)]
                    spread = tirx.reinterpret(f"int8x{size}", tirx.Shuffle([dwords] * vectors.shared, lanes))
                    T.buffer_store(target.digits, spread, [r, d, v, e, j, T.ramp(0, 1, size)])
    sums = [sum_of_digits(row, d) for d in range(count)]
    for starts, last in ((target.starts, count), (target.short_starts, count - 1)):
        for pair in range(si.digit_pairs(last) if starts is not None else 0):
            total = si.join_pair(sums[2 * pair : min(2 * pair + 2, last)])
            T.buffer_store(starts, total * T.int32(-si.KEY_OFFSET[spec.cache]), [r, pair])


def stored_rows(spec: KernelSpec, kv_block: int):
    """TE tensors of cache rows as they are stored, and of the last readable row."""
    rows = te.placeholder((kv_block, spec.cache_columns), CACHE_DTYPES[spec.cache], name="rows")
    return rows, te.var("last_row", "int32")


def emit_qk_parts(spec: KernelSpec, shape, step, keys: CacheBlock, operands, tile_of, scores, seen, step_keys: int):
    """As `SplitRowsForm.emit_qk_split` by steps of so many keys."""
    begin, last = keys.begin, keys.last
    with T.serial(0, tirx.truncdiv(seen + (step_keys - 1), T.int32(step_keys))) as part:
        offset = T.bind(part * step_keys)
        key = T.bind(begin + offset)
        region = cache_region(spec, keys._replace(begin=key, kv_block=step_keys))
        target = scores[0 : shape.row_tile, offset : offset + step_keys]
        with T.sblock("qk_step"):
            T.reads(region, *(whole(operand) for operand in operands))
            T.writes(target)
            rows = match_cache(spec, region, keys.cache.dtype, step_keys)
            part_scores = T.match_buffer(
                target, (shape.row_tile, step_keys), "float32", strides=(shape.kv_block, 1), offset_factor=1
            )
            splice(step, [rows, last - offset, *(tile_of(operand) for operand in operands), part_scores])
