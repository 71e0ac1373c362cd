"""The steps of flash_decode over a packed cache, in the place of `split_rows`."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import te
from tvm.script import tirx as T

from ..definitions import packed
from ..definitions import split_integer as si
from ..definitions.kv_quantize import CACHE_DTYPES
from ..kernels import KernelSpec
from .cache_block import CacheBlock, cache_region, match_cache
from .row_state import same_position
from .splice import make_step, splice, whole
from .split_rows import SHORT, QkSteps, has_short_step, sum_of_digits, write_digits

__all__ = [
    "accumulator_position",
    "allocate_split_rows",
    "emit_qk_split",
    "packed_keys",
    "packed_values",
    "qk_split_steps",
    "split_rows",
    "sv_split_steps",
]
# The accumulator holds the columns in order.
accumulator_position = same_position


class PackedRows(NamedTuple):
    """Rows as `qk_gemm_packed` takes them."""

    digits: Any  # [rows, E, C / 4, D, 4] int8
    offsets: Any  # [rows, D] int32
    down: Any  # [rows] float32, NaN for a row that is not finite
    needs_all: Any = None  # [rows] int32, 0 = the row does not need its last digit

    def of_step(self, short: bool):
        """What a step takes: the same without the last digit."""
        del short
        return self[:3]


def allocate_split_rows(spec: KernelSpec, rows: int) -> PackedRows:
    digits, _ = si.decode_digits(spec.precision)
    quads = spec.cache_columns // packed.KEY_QUAD
    return PackedRows(
        T.sblock_alloc_buffer((rows, spec.cache_planes, quads, digits, packed.KEY_QUAD), "int8"),
        T.sblock_alloc_buffer((rows, digits), "int32"),
        T.sblock_alloc_buffer((rows,)),
        T.sblock_alloc_buffer((rows,), "int32") if has_short_step(spec) else None,
    )


def split_rows(spec: KernelSpec, query, count, target: PackedRows) -> None:
    """Fill `target` from the first `count` rows of query [rows, E, C] float32."""
    spread = lambda row, r: _spread(spec, row, r, target)  # noqa: E731
    write_digits(spec, query, count, target, packed.DOT_LANES, spread)


def _spread(spec: KernelSpec, row, r, target: PackedRows) -> None:
    """One row's digits [D, E, C] in the order of the dot products, and their products with the code of zero."""
    planes, columns = spec.cache_planes, spec.cache_columns
    for d in range(int(row.shape[0])):
        with T.grid(planes, columns // packed.KEY_QUAD) as (e, c):
            word = row[d, e, T.ramp(c * packed.KEY_QUAD, 1, packed.KEY_QUAD)]
            T.buffer_store(target.digits, word, [r, e, c, d, T.ramp(0, 1, packed.KEY_QUAD)])
        total = sum_of_digits(row, d)
        T.buffer_store(target.offsets, total * T.int32(si.KEY_OFFSET[spec.cache]), [r, d])


def packed_keys(spec: KernelSpec, kv_block: int):
    """TE tensors of rows of keys as they are stored, and of the last readable key."""
    return _rows(spec, kv_block, packed.KEY_ROW)


def packed_values(spec: KernelSpec, kv_block: int):
    """As `packed_keys`, of values."""
    return _rows(spec, kv_block, packed.VALUE_ROW)


def _rows(spec: KernelSpec, kv_block: int, keys: int):
    shape = (kv_block // keys, keys * spec.cache_columns)
    return te.placeholder(shape, CACHE_DTYPES[spec.cache], name="rows"), te.var("last_key", "int32")


def qk_split_steps(spec: KernelSpec, row_tile: int, kv_block: int) -> QkSteps:
    """scores = query keys^T; arguments: cache rows, last key, digits, offsets, down, scores."""
    steps = [_qk_step(spec, row_tile, kv_block)]
    if has_short_step(spec):
        steps.append(_qk_step(spec, row_tile, kv_block, dropped=1))
    return QkSteps(*steps)


def _qk_step(spec: KernelSpec, row_tile: int, kv_block: int, dropped: int = 0):
    cache_rows, last_key = packed_keys(spec, kv_block)
    planes, quads = spec.cache_planes, spec.cache_columns // packed.KEY_QUAD
    count, _ = si.decode_digits(spec.precision)
    digits = te.placeholder((row_tile, planes, quads, count, packed.KEY_QUAD), "int8", name="digits")
    offsets = te.placeholder((row_tile, count), "int32", name="offsets")
    down = te.placeholder((row_tile,), name="down")
    scores = packed.qk_gemm_packed(digits, offsets, down, packed.key_words(cache_rows, last_key, planes), dropped)
    return make_step([cache_rows, last_key, digits, offsets, down, scores], SHORT if dropped else "")


def sv_split_steps(spec: KernelSpec, row_tile: int, kv_block: int):
    """acc = alpha acc + weight p values; arguments: cache rows, last key, p, old acc, alpha, weight, acc."""
    cache_rows, last_key = packed_values(spec, kv_block)
    planes = spec.cache_planes
    p = te.placeholder((row_tile, kv_block), name="p")
    accumulator = te.placeholder((row_tile, planes, spec.cache_columns), name="acc_old")
    beta, weight = (te.placeholder((row_tile,), name=name) for name in ("row_beta", "row_weight"))
    _, count = si.decode_digits(spec.precision)
    code_at = packed.value_codes(cache_rows, last_key, planes, scaled=True)
    result = packed.sv_gemm_packed(packed.probability_bytes(p, count), count, code_at, accumulator, beta, weight)
    return (make_step([cache_rows, last_key, p, accumulator, beta, weight, result]),)


def emit_qk_split(spec: KernelSpec, shape, step, keys: CacheBlock, operands, tile_of, scores, seen) -> None:
    """scores [R, kv_block] of a block of keys; tile_of: view of an operand's tile."""
    del seen
    region = cache_region(spec, keys)
    with T.sblock("qk_step"):
        T.reads(region, *(whole(operand) for operand in operands))
        T.writes(whole(scores))
        rows = match_cache(spec, region, keys.cache.dtype, keys.kv_block)
        splice(step, [rows, keys.last, *(tile_of(operand) for operand in operands), scores])
