"""Values that are not finite must not reach a row that does not see them: 0 * NaN is NaN.

SVGemm multiplies whole blocks and relies on the probability 0 of masked keys; after the last key that a row sees it
reads that one again. In a block that some row does not see entirely, and that holds NaN or infinity where such a
probability meets it, the sum goes over the visible keys of each row instead. Quantised caches hold finite values only:
their kernels have neither the check nor the second form.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script import tirx as T

from ..definitions.half import magnitude_bits, widen
from ..kernels import KernelSpec
from .cache_block import CacheBlock
from .rows import RowBlock
from .score_steps import block_is_visible, rows_see_alike

_INFINITY_BITS = 0x7F800000


def allocate_value_check(spec: KernelSpec):
    """Holds the largest magnitude of a block's values as int32 bits; None where values are always finite."""
    return T.sblock_alloc_buffer((1,), "int32") if spec.is_float_cache else None


def check_values(spec: KernelSpec, block: CacheBlock, rows: RowBlock, largest) -> None:
    """Look for NaN and infinity in a block that some row does not see entirely: in all its rows up to the last that a
    row sees, or where the rows see alike, in this one."""
    if largest is None:
        return
    T.buffer_store(largest, T.int32(0), [0])
    with T.If(tirx.Not(block_is_visible(rows, block.begin, block.kv_block))):
        with T.Then():
            keys = T.bind(tirx.min(block.last + 1, T.int32(block.kv_block)))
            alike = rows_see_alike(rows, block.begin, block.kv_block)
            first = T.bind(tirx.Select(alike, keys - 1, T.int32(0)))
            with T.serial(0, keys - first) as t:
                row = T.bind(tirx.Cast("int64", block.begin + first + t))
                with T.serial(0, spec.head_size) as h:
                    bits = magnitude_bits(widen(block.cache[block.b, block.n, row, h], spec.cache))
                    T.buffer_store(largest, tirx.max(largest[0], bits), [0])


def emit_values(
    spec: KernelSpec, block: CacheBlock, largest, rows: RowBlock, p_at, acc, beta, tile, blocked: Callable[[], None]
) -> None:
    """acc = beta acc + p V: by `blocked` over the whole block, or key by key where `check_values` found cause.

    tile: (first row, rows) of acc; p_at: function (row of the tile, key of the block) -> probability; beta: [rows].
    """
    if largest is None:
        blocked()
        return
    with T.If(largest[0] >= _INFINITY_BITS):
        with T.Then():
            _sum_visible(spec, block, rows, p_at, acc, beta, tile)
        with T.Else():
            blocked()


def _sum_visible(spec: KernelSpec, block: CacheBlock, rows: RowBlock, p_at, acc, beta, tile) -> None:
    first_row, count = tile
    with T.serial(0, count) as i:
        r = T.bind(first_row + i)
        first = T.bind(tirx.max(rows.first_key[r], block.begin))
        end = T.bind(tirx.min(rows.end_key[r], block.begin + block.kv_block))
        with T.serial(0, spec.head_size) as h:
            T.buffer_store(acc, acc[r, 0, h] * beta[i], [r, 0, h])
        with T.serial(0, tirx.max(end - first, T.int32(0))) as t:
            probability = T.bind(p_at(i, first + t - block.begin))
            row = T.bind(tirx.Cast("int64", first + t))
            with T.serial(0, spec.head_size) as h:
                value = widen(block.cache[block.b, block.n, row, h], spec.cache)
                T.buffer_store(acc, acc[r, 0, h] + probability * value, [r, 0, h])
