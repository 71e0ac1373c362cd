"""Schedule steps of the split-integer products: 4 keys at a time, in the order of memory, in registers."""

from __future__ import annotations

import math

from . import intrinsics_vnni as vnni
from .steps import Schedule, _own_loops, end_at_last_key, find_block, vectorize_last

_KEYS = 16
_KEYS_OF_DOT = 4
# Bytes of the longest vectors.
_LONGEST = 64
# Sums of three digits with the 4 vectors that 4 rows of one vector make.
_VALUE_SUMS = 12
# Few rows have too few products to hide the shuffles of whole rows: they take half a row at a time, which the CPU's
# window spans. More rows share a vector of digits between two groups of 4 keys.
_ROWS_BY_HALVES = 2
# So many products of all rows are one stretch of code.
_UNROLLED_PRODUCTS = 96


def multiplies_digits(sch: Schedule) -> bool:
    """Whether the kernel was made with split-integer products."""
    return find_block(sch, "qk_sums") is not None


def qk_suffixes(sch: Schedule) -> list[str]:
    """Of the blocks of the QK steps: one of all digits, in flash_decode another without the last."""
    return [suffix for suffix in ("", "_short") if find_block(sch, f"qk{suffix}")]


def _arrange_rows(sch: Schedule, suffix: str, at, register) -> None:
    """Load 4 rows by whole vectors and rearrange them in registers, inside loop `at`; INT4 planes are split there."""
    if find_block(sch, f"nibbles_{suffix}"):
        nibbles = sch.get_sblock(f"nibbles_{suffix}")
        sch.compute_at(nibbles, at, preserve_unit_loops=True)
        _by_vectors(sch, nibbles, 5)
    arrange, load = sch.get_sblock(f"arrange_{suffix}"), sch.get_sblock(f"load_{suffix}")
    sch.compute_at(arrange, at, preserve_unit_loops=True)
    sch.compute_at(load, at, preserve_unit_loops=True)
    size = load_by_vectors(sch, load, arrange)
    intrinsic = register(str(sch.get(load).writes[0].source.dtype), size)
    t, vectors, j, _ = _own_loops(sch, arrange, 4)
    sch.unroll(t)
    sch.unroll(vectors)
    sch.tensorize(j, intrinsic)


def load_by_vectors(sch: Schedule, load, arrange) -> int:
    """Load rows by the vectors that are arranged next, or by the rows that share these; returns their bytes."""
    size = int(sch.get(arrange).writes[0].source.shape[-1])
    row, column = _own_loops(sch, load, 2)
    columns = int(sch.get(load).reads[0].source.shape[1])
    vectors, inner = sch.split(column, [None, min(size, columns)])
    sch.unroll(row)
    sch.unroll(vectors)
    sch.vectorize(inner)
    return size


def arrange_block(sch: Schedule, suffix: str, register):
    """Rearrange all rows of a block of keys ahead of their use, 4 at a time; returns the loop.

    INT4 planes are split there.
    """
    arrange, load = sch.get_sblock(f"arrange_{suffix}"), sch.get_sblock(f"load_{suffix}")
    if find_block(sch, f"nibbles_{suffix}"):
        nibbles = sch.get_sblock(f"nibbles_{suffix}")
        quad = _own_loops(sch, nibbles, 5)[0]
        sch.compute_at(arrange, quad, preserve_unit_loops=True)
        _, v, e, j, x = _own_loops(sch, nibbles, 5)
        for loop in (v, e, j):
            sch.unroll(loop)
        sch.vectorize(x)
    else:
        quad = _own_loops(sch, arrange, 4)[0]
    sch.compute_at(load, quad, preserve_unit_loops=True)
    size = load_by_vectors(sch, load, arrange)
    intrinsic = register(str(sch.get(load).writes[0].source.dtype), size)
    _, v, j, _ = _own_loops(sch, arrange, 4)
    sch.unroll(v)
    sch.tensorize(j, intrinsic)
    return quad


def _by_vectors(sch: Schedule, block, loops: int) -> None:
    """Unroll the own loops of a block down to the last, which is a vector."""
    own = _own_loops(sch, block, loops)
    for loop in own[:-1]:
        sch.unroll(loop)
    sch.vectorize(own[-1])


def tile_qk_for_dots(sch: Schedule, row_tile: int, most_sums: int, suffix: str) -> None:
    """Scores [m, t]: for `quads` times 4 keys all rows' digits, then lane groups joined and summed for 16 keys."""
    names = ("qk", "qk_total", "qk_join", "qk_sums")
    scores, total, joined, sums = (sch.get_sblock(f"{name}{suffix}") for name in names)
    m, t = _own_loops(sch, scores, 2)
    t_outer, t_inner = sch.split(t, [None, _KEYS])
    sch.reorder(t_outer, m, t_inner)
    sch.vectorize(t_inner)
    sch.compute_at(total, m, preserve_unit_loops=True)
    by_halves = row_tile <= (_ROWS_BY_HALVES if most_sums >= 2 * _VALUE_SUMS else 1)
    row, pair, quad, lane = _own_loops(sch, joined, 4)
    quad, quads = sch.split(quad, [None, 1 if by_halves else 2])
    sch.reorder(quad, row, quads, pair, lane)
    for loop in (row, quads, pair) if by_halves or _products(sch, sums) <= _UNROLLED_PRODUCTS else (quads, pair):
        sch.unroll(loop)
    sch.vectorize(lane)
    sch.compute_at(sums, quad if by_halves else row, preserve_unit_loops=True)
    _tensorize_sums(sch, sums, None if by_halves else quad, f"k{suffix}")
    pair, key, group = _own_loops(sch, total, 3)
    sch.unroll(pair)
    groups = int(sch.get(group).extent)
    _by_vectors(sch, sch.decompose_reduction(total, key), 1)
    lanes = _lanes(sch, joined)
    if lanes != _KEYS:
        outer, key = sch.split(key, [None, lanes])
        sch.unroll(outer)
    sch.tensorize(key, vnni.register_group_sum(4 * lanes, groups))


def _products(sch: Schedule, sums) -> int:
    """Dot products of all rows with 8 keys."""
    return 2 * math.prod(int(sch.get(loop).extent) for loop in _own_loops(sch, sums, 8)[1:7]) // _lanes(sch, sums)


def _lanes(sch: Schedule, block) -> int:
    """Lanes of the vectors that a block writes."""
    return int(sch.get(block).writes[0].source.shape[-1])


def _tensorize_sums(sch: Schedule, sums, arrange_at, keys: str) -> None:
    """Dot products of 4 or 8 keys, which are arranged at a loop, or for each half of a row just before its products."""
    quads, m, d, lane, v, e, j, q = _own_loops(sch, sums, 8)
    tile = (v, e, j, d, quads, m)
    sch.reorder(*tile, lane, q)
    _arrange_rows(sch, keys, arrange_at or v, vnni.register_arrange_keys)
    for loop in tile:
        sch.unroll(loop)
    zeros = sch.decompose_reduction(sums, v)
    _by_vectors(sch, zeros, 4)
    sch.tensorize(lane, vnni.register_dot_keys(4 * _lanes(sch, sums)))


def digits_by_vectors(sch: Schedule, lanes: int) -> None:
    """Digits of the probabilities, a vector at a time."""
    vectorize_last(sch, "p_fixed", lanes)
    vectorize_last(sch, "p_digits", lanes)
    m, d, outer, middle, inner = _own_loops(sch, sch.get_sblock("p_digits"), 5)
    sch.reorder(m, outer, middle, d, inner)
    sch.unroll(d)


def tile_sv_for_dots(sch: Schedule, row_tile: int, most_sums: int) -> None:
    """acc: two rows, or two halves of one, with their digits stay in registers over the keys, or one where most_sums
    vectors fit.

    Two rows rearrange the values they need just before their products, which is faster (Zen 4) than once for all rows,
    unless there are many short vectors of two planes.
    """
    product, result = sch.get_sblock("sv_product"), sch.get_sblock("sv")
    m, e, column = _own_loops(sch, result, 3)
    lanes = _lanes(sch, product)
    size = 4 * lanes
    fits_two = most_sums >= 2 * _VALUE_SUMS
    rows = 2 if row_tile % 2 == 0 and fits_two else 1
    vectors = int(sch.get(column).extent) // size
    halves = 2 if rows == 1 and vectors % 2 == 0 and fits_two else 1
    m_outer, m_inner = sch.split(m, [None, rows])
    column_outer, outer, inner = sch.split(column, [None, halves * size // lanes, lanes])
    sch.reorder(m_outer, column_outer, e, m_inner, outer, inner)
    planes = int(sch.get(product).writes[0].source.shape[3])
    # Both planes of values that are arranged once, where their sums fit.
    both_planes = fits_two and planes == 2 and rows * halves == 1
    sch.compute_at(product, column_outer if both_planes else e, preserve_unit_loops=True)
    # Nibbles of a known plane take fewer instructions.
    for loop in (e, m_inner, outer):
        sch.unroll(loop)
    sch.vectorize(inner)
    m, d, v, e, j, lane, t, b = _own_loops(sch, product, 8)
    keys = _KEYS_OF_DOT * int(sch.get(t).extent)
    end_at_last_key(sch, t, keys)
    if fits_two and (planes == 1 or size == _LONGEST):
        tile = (v, e, m, d, j)
        sch.reorder(t, *tile, lane, b)
        _arrange_rows(sch, "v", v, vnni.register_arrange_values)
    else:
        # Values pass through one register; the digits stay in others.
        tile = (v, e, j, m, d)
        sch.reorder(t, *tile, lane, b)
        end_at_last_key(sch, arrange_block(sch, "v", vnni.register_arrange_values), keys)
    for loop in tile:
        sch.unroll(loop)
    zeros = sch.decompose_reduction(product, t)
    _by_vectors(sch, zeros, 6)
    sch.tensorize(lane, vnni.register_dot_values(size))
