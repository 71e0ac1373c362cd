"""Schedule steps of flash_prefill by dot products of signed bytes: 4 rows in the lanes of a register."""

from __future__ import annotations

from . import intrinsics_neon as neon
from .block_sizes import BlockSizes, largest_divisor
from .split_prefill_steps import _reduce_over_columns, _unroll_by_vectors
from .split_steps import _by_vectors
from .split_steps_neon import arrange_block
from .steps import Schedule, _own_loops, end_at_last_key, start_at_first_row, vectorize_last

_BYTES, _LANES = 16, 4
# Registers of sums; the rest hold codes and digits.
_SUMS = 24
_TILE_KEYS, _TILE_COLUMNS = 8, 8
# Keys of an arranged vector of values.
_VALUE_KEYS = 16


def digits_of_rows(sch: Schedule, sizes: BlockSizes) -> None:
    """The digits of a task's rows, a vector of rows at a time."""
    for name in ("query_up", "query_down", "query_words"):
        vectorize_last(sch, name, sizes.lanes)
    _reduce_over_columns(sch, "query_largest", sizes.lanes, 2)
    _arrange_digits(sch, sch.get_sblock("arrange_query"))


def _arrange_digits(sch: Schedule, arrange) -> None:
    """Digits of 4 x 4 words, arranged in registers."""
    digit, byte = _own_loops(sch, arrange, 2)
    digits = int(sch.get(digit).extent)
    sch.tensorize(digit if digits > 1 else byte, neon.register_arrange_digits(digits))


def tile_qk_for_rows(sch: Schedule) -> None:
    """Scores [t, m]: the sums of 8 keys x vectors of rows, with all their digits, stay in registers over the head."""
    arrange_block(sch, "k", 3, neon.register_arrange_key_pairs)
    scores, sums = sch.get_sblock("qk"), sch.get_sblock("qk_sums")
    t, m = _own_loops(sch, scores, 2)
    digits = int(sch.get(sums).writes[0].source.shape[2])
    rows = int(sch.get(m).extent)
    vectors = largest_divisor(rows // _LANES, _SUMS // (_TILE_KEYS * digits))
    keys = int(sch.get(t).extent)
    t_outer, t_inner = sch.split(t, [None, _TILE_KEYS])
    end_at_last_key(sch, t_outer, keys)
    m_outer, m_vectors, lane = sch.split(m, [None, vectors, _LANES])
    sch.reorder(t_outer, m_outer, t_inner, m_vectors, lane)
    sch.compute_at(sums, m_outer, preserve_unit_loops=True)
    for loop in (t_inner, m_vectors):
        sch.unroll(loop)
    sch.vectorize(lane)
    t, m, d, half, key, lane, v, e, j, q = _own_loops(sch, sums, 10)
    sch.reorder(t, v, e, j, m, half, d, key, lane, q)
    for loop in (e, j, m, half, d):
        sch.unroll(loop)
    zeros = sch.decompose_reduction(sums, v)
    _by_vectors(sch, zeros, 5)
    sch.tensorize(key, neon.register_lane_dots())


def probabilities_by_vectors(sch: Schedule) -> None:
    """Digits of the probabilities of 4 keys x vectors of rows, arranged in registers."""
    _unroll_by_vectors(sch, "p_words", _LANES)
    arrange = sch.get_sblock("arrange_p")
    for loop in _own_loops(sch, arrange, 4)[:2]:
        sch.unroll(loop)
    _arrange_digits(sch, arrange)


def tile_sv_for_rows(sch: Schedule) -> None:
    """acc: the sums of 4 rows x 8 columns, with all digits, stay in registers over the keys of the block."""
    arrange_block(sch, "v", 4, neon.register_arrange_value_pairs)
    product, result = sch.get_sblock("sv_product"), sch.get_sblock("sv")
    m, e, column = _own_loops(sch, result, 3)
    rows = int(sch.get(m).extent)
    m_outer, m_inner = sch.split(m, [None, _LANES])
    start_at_first_row(sch, m_outer, rows)
    c_outer, c_vectors, lane = sch.split(column, [None, _TILE_COLUMNS // _LANES, _LANES])
    sch.reorder(e, c_outer, m_outer, m_inner, c_vectors, lane)
    sch.compute_at(product, m_outer, preserve_unit_loops=True)
    for loop in (m_inner, c_vectors):
        sch.unroll(loop)
    sch.vectorize(lane)
    m, v, e, i, d, half, row, lane, t, j, b = _own_loops(sch, product, 11)
    end_at_last_key(sch, t, _VALUE_KEYS * int(sch.get(t).extent))
    sch.reorder(m, v, e, i, t, j, half, d, row, lane, b)
    for loop in (j, half, d):
        sch.unroll(loop)
    zeros = sch.decompose_reduction(product, t)
    _by_vectors(sch, zeros, 4)
    sch.tensorize(row, neon.register_lane_dots())
