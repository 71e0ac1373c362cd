"""Schedule steps of flash_prefill by integer dot products: query rows as lanes, register tiles of int32 sums."""

from __future__ import annotations

import math

from . import intrinsics_vnni as vnni
from .block_sizes import BlockSizes, largest_divisor
from .split_steps import _by_vectors, arrange_block
from .steps import (
    Schedule,
    _own_loops,
    end_at_last_key,
    end_elementwise_at_last_key,
    reduce_down_columns,
    start_at_first_row,
    vectorize_last,
)

# Keys of a lane.
_KEYS = 4


def digits_of_rows(sch: Schedule, sizes: BlockSizes) -> None:
    """The digits of a task's rows, a vector of rows at a time."""
    lanes = sizes.lanes
    for name in ("query_up", "query_down", "query_fixed", "query_starts"):
        vectorize_last(sch, name, lanes)
    for name, reduced in (("query_largest", 2), ("query_sums", 2)):
        _reduce_over_columns(sch, name, lanes, reduced)
    d, _, _, m = _own_loops(sch, sch.get_sblock("query_words"), 4)
    outer, lane = sch.split(m, [None, lanes])
    sch.reorder(outer, d, lane)
    sch.unroll(d)
    sch.vectorize(lane)


def _reduce_over_columns(sch: Schedule, name: str, lanes: int, reduced: int) -> None:
    """Reduce the last loops of a block for a vector of rows at a time."""
    block = sch.get_sblock(name)
    loops = _own_loops(sch, block, reduced + 1)
    outer, lane = sch.split(loops[0], [None, lanes])
    sch.reorder(outer, *loops[1:], lane)
    sch.vectorize(lane)
    zeros = sch.decompose_reduction(block, loops[1])
    last = _own_loops(sch, zeros, 1)[0]
    if int(sch.get(last).kind) == 0:
        sch.vectorize(last)


def codes_by_vectors(sch: Schedule, name: str, lanes: int) -> None:
    """Unsigned codes of a block of keys [t, plane, column]: one load of a vector serves every plane."""
    _, plane, column = _own_loops(sch, sch.get_sblock(name), 3)
    columns = int(sch.get(column).extent)
    outer, inner = sch.split(column, [None, math.gcd(columns, 4 * lanes)])
    sch.reorder(outer, plane, inner)
    sch.unroll(plane)
    sch.vectorize(inner)
    end_elementwise_at_last_key(sch, (name,))


def tile_qk_for_rows(sch: Schedule, sizes: BlockSizes) -> None:
    """Scores [t, m]: a tile of keys x vectors of rows, with all their digits, stays in registers over the head."""
    scores, sums = sch.get_sblock("qk"), sch.get_sblock("qk_sums")
    t, m = _own_loops(sch, scores, 2)
    digits = int(sch.get(sums).writes[0].source.shape[1])
    rows, keys = int(sch.get(m).extent), int(sch.get(t).extent)
    vectors = rows // sizes.lanes
    key_tile = largest_divisor(keys, sizes.dot_sums // (digits * vectors))
    t_outer, t_inner = sch.split(t, [None, key_tile])
    end_at_last_key(sch, t_outer, keys)
    m_outer, m_vectors, lane = sch.split(m, [None, vectors, sizes.lanes])
    sch.reorder(m_outer, t_outer, t_inner, m_vectors, lane)
    sch.compute_at(sums, t_outer, preserve_unit_loops=True)
    for loop in (t_inner, m_vectors):
        sch.unroll(loop)
    sch.vectorize(lane)
    key, digit, row, e, c, q = _own_loops(sch, sums, 6)
    vector, lane = sch.split(row, [None, sizes.lanes])
    words_stay = _all_operands_stay(sizes) or key_tile >= vectors * digits
    tile = (key, vector, digit) if words_stay else (vector, digit, key)
    sch.reorder(e, c, *tile, lane, q)
    for loop in (key, vector, digit):
        sch.unroll(loop)
    zeros = sch.decompose_reduction(sums, e)
    _by_vectors(sch, zeros, 4)
    sch.tensorize(lane, vnni.register_dot_rows(4 * sizes.lanes))


def _all_operands_stay(sizes: BlockSizes) -> bool:
    """Whether registers are left beside the sums for all operands of a tile: else the fewer stay, others pass."""
    return sizes.dot_sums >= _MANY_SUMS


_MANY_SUMS = 24


def softmax_by_rows(sch: Schedule, sizes: BlockSizes) -> None:
    """The softmax of a tile of rows relative to the block's own maximum, rows as lanes."""
    for name in ("m_new", "alpha", "weight", "sum_start", "m_out", "l_new"):
        vectorize_last(sch, name, sizes.lanes, sizes.elementwise_vectors)
    reduce_down_columns(sch, "block_max", sizes.lanes, sizes.reduction_vectors)
    for name in ("p", "block_sum"):
        _unroll_by_vectors(sch, name, sizes.lanes)
    some = sch.get_sblock("p_sum")
    m, t = _own_loops(sch, some, 2)
    vector, lane = sch.split(m, [None, sizes.lanes])
    sch.reorder(vector, t, lane)
    for loop in (vector, t):
        sch.unroll(loop)
    sch.vectorize(lane)
    _by_vectors(sch, sch.decompose_reduction(some, t), 1)


def _unroll_by_vectors(sch: Schedule, name: str, lanes: int) -> None:
    """All of a block over rows, in registers."""
    block = sch.get_sblock(name)
    *outer, m = _own_loops(sch, block, len(sch.get(block).iter_vars))
    vector, lane = sch.split(m, [None, lanes])
    for loop in (*outer, vector):
        sch.unroll(loop)
    sch.vectorize(lane)


def probabilities_by_vectors(sch: Schedule, lanes: int) -> None:
    """Bytes of the probabilities of 4 keys x vectors of rows, arranged in registers."""
    _unroll_by_vectors(sch, "p_fixed", lanes)
    _, vector, j, _ = _own_loops(sch, sch.get_sblock("arrange_p"), 4)
    sch.unroll(vector)
    sch.tensorize(j, vnni.register_arrange_probabilities(4 * lanes))


def values_by_vectors(sch: Schedule) -> None:
    """The values of a block of keys, 4 rows at a time, as the dot products take them."""
    quad = arrange_block(sch, "v", vnni.register_arrange_values_in_order)
    end_at_last_key(sch, quad, _KEYS * int(sch.get(quad).extent))


def tile_sv_for_rows(sch: Schedule, sizes: BlockSizes, width: int = 0) -> None:
    """acc: a tile of rows x vectors of columns, with all digits, stays in registers over the keys of the block."""
    product, result = sch.get_sblock("sv_product"), sch.get_sblock("sv")
    m, e, column = _own_loops(sch, result, 3)
    digits = int(sch.get(product).writes[0].source.shape[1])
    columns = int(sch.get(column).extent)
    lanes = (width or sizes.value_width(columns)) // _KEYS
    all_rows = int(sch.get(m).extent)
    # A tile of the softmax that is passed over leaves no factor for its rows.
    softmax_rows = int(sch.get(sch.get_sblock("m_out")).writes[0].source.shape[0])
    rows, vectors = _value_tile(softmax_rows, columns // lanes, digits, sizes.dot_sums)
    m_outer, m_inner = sch.split(m, [None, rows])
    start_at_first_row(sch, m_outer, all_rows)
    c_outer, c_vectors, lane = sch.split(column, [None, vectors, lanes])
    sch.reorder(e, c_outer, m_outer, m_inner, c_vectors, lane)
    sch.compute_at(product, m_outer, preserve_unit_loops=True)
    for loop in (m_inner, c_vectors):
        sch.unroll(loop)
    sch.vectorize(lane)
    m, d, e, column, t, b = _own_loops(sch, product, 6)
    end_at_last_key(sch, t, _KEYS * int(sch.get(t).extent))
    vector, lane = sch.split(column, [None, lanes])
    values_stay = _all_operands_stay(sizes) or vectors < rows * digits
    tile = (m, d, vector) if values_stay else (vector, m, d)
    sch.reorder(t, e, *tile, lane, b)
    for loop in (e, m, d, vector):
        sch.unroll(loop)
    zeros = sch.decompose_reduction(product, t)
    _by_vectors(sch, zeros, 5)
    sch.tensorize(lane, vnni.register_dot_values(_KEYS * lanes))


def _value_tile(rows: int, vectors: int, digits: int, most_sums: int) -> tuple[int, int]:
    """Rows and vectors of columns of a tile: those with the fewest loads for their products."""

    def loads(tile: tuple[int, int]) -> float:
        return 1 / (tile[0] * digits) + 1 / tile[1]

    wide = (v for v in range(1, vectors + 1) if vectors % v == 0 and v * digits <= most_sums)
    return min(((largest_divisor(rows, most_sums // (v * digits)), v) for v in wide), key=loads)
