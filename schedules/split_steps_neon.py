"""Schedule steps of the split-integer products of `definitions.split_signed`: 4 keys in the lanes of a register."""

from __future__ import annotations

from . import intrinsics_neon as neon
from .block_sizes import largest_divisor
from .split_steps import _by_vectors
from .steps import Schedule, _own_loops, end_at_last_key, find_block, vectorize_last

_LANES = 4
# Vectors of sums for a vector of bytes.
_VECTORS = 4
# Registers of sums of scores and of values; the rest hold arranged codes and digits.
_SUMS = 16
_VALUE_SUMS = 24
# Up to so many sums of scores, by digits, further groups of keys join a tile: they share a load of digits.
_SHARED_SUMS = {1: 16, 2: 16, 3: 8, 4: 8}
# From so many rows on, a step's keys are arranged before the products: those then need fewer registers.
_MANY_ROWS = 4
# Groups of 4 keys of a step.
_QUADS = 4


def _arrange_rows(sch: Schedule, name: str, at, register) -> None:
    """Load rows by vectors and rearrange them in registers, inside loop `at`; INT4 planes are split there."""
    if find_block(sch, f"nibbles_{name}"):
        nibbles = sch.get_sblock(f"nibbles_{name}")
        sch.compute_at(nibbles, at, preserve_unit_loops=True)
        _by_vectors(sch, nibbles, len(sch.get(nibbles).iter_vars))
    arrange, load = sch.get_sblock(f"arrange_{name}"), sch.get_sblock(f"load_{name}")
    sch.compute_at(arrange, at, preserve_unit_loops=True)
    sch.compute_at(load, at, preserve_unit_loops=True)
    _by_vectors(sch, load, 2)
    intrinsic = register(str(sch.get(load).writes[0].source.dtype))
    block, vector, first, *_ = _own_loops(sch, arrange, len(sch.get(arrange).iter_vars))
    sch.unroll(block)
    sch.unroll(vector)
    sch.tensorize(first, intrinsic)


def arrange_block(sch: Schedule, name: str, inner: int, register, is_part: bool = False) -> None:
    """Arrange the rows of a block ahead of their products; inner: own loops of one arrangement in registers.

    is_part: of a block of which the step takes a few keys.
    """
    arrange, load = sch.get_sblock(f"arrange_{name}"), sch.get_sblock(f"load_{name}")
    nibbles = find_block(sch, f"nibbles_{name}")
    if not is_part:
        end_at_last_key(sch, sch.get_loops(nibbles or arrange)[0], int(sch.get(load).reads[0].source.shape[0]))
    if nibbles:
        vector = _own_loops(sch, nibbles, inner + 2)[0]
        sch.compute_at(arrange, vector, preserve_unit_loops=True)
        _by_vectors(sch, nibbles, inner + 1)
    sch.compute_at(load, _own_loops(sch, arrange, inner + 1)[0], preserve_unit_loops=True)
    _by_vectors(sch, load, 2)
    intrinsic = register(str(sch.get(load).writes[0].source.dtype))
    sch.tensorize(_own_loops(sch, arrange, inner)[0], intrinsic)


def tile_qk_for_dots(sch: Schedule, row_tile: int) -> None:
    """Scores [m, t]: for 4 or 8 keys the sums of some rows' digits stay in registers over the columns."""
    scores, sums = sch.get_sblock("qk"), sch.get_sblock("qk_sums")
    digits = int(sch.get(sums).writes[0].source.shape[2])
    rows = largest_divisor(row_tile, _SUMS // digits)
    quads = largest_divisor(_QUADS, max(1, _SHARED_SUMS[digits] // (digits * rows)))
    m, t = _own_loops(sch, scores, 2)
    t_outer, t_quads, t_inner = sch.split(t, [None, quads, _LANES])
    m_outer, m_inner = sch.split(m, [None, rows])
    sch.reorder(t_outer, m_outer, t_quads, m_inner, t_inner)
    sch.compute_at(sums, m_outer, preserve_unit_loops=True)
    for loop in (t_quads, m_inner):
        sch.unroll(loop)
    sch.vectorize(t_inner)
    quad, m, d, lane, v, e, j, q = _own_loops(sch, sums, 8)
    sch.reorder(v, e, quad, m, d, lane, j, q)
    if row_tile >= _MANY_ROWS:
        arrange_block(sch, "k", 2, neon.register_arrange_keys, is_part=True)
    else:
        _arrange_rows(sch, "k", v, neon.register_arrange_keys)
    for loop in (e, quad, m, d):
        sch.unroll(loop)
    zeros = sch.decompose_reduction(sums, v)
    _by_vectors(sch, zeros, 4)
    sch.tensorize(lane, neon.register_dots())


def digits_by_vectors(sch: Schedule, lanes: int, suffix: str) -> None:
    """Digits of the probabilities: of 4 vectors, whose bytes fill one."""
    vectorize_last(sch, f"p_fixed{suffix}", lanes, 4)
    vectorize_last(sch, f"p_digits{suffix}", 4 * lanes)
    m, d, outer, middle, inner = _own_loops(sch, sch.get_sblock(f"p_digits{suffix}"), 5)
    sch.reorder(m, outer, middle, d, inner)
    sch.unroll(d)


def tile_sv_for_dots(sch: Schedule, row_tile: int, suffix: str) -> None:
    """acc: the sums of 16 columns of one or two rows stay in registers over the keys, 16 of which pass at a time."""
    product, result = sch.get_sblock(f"sv_product{suffix}"), sch.get_sblock(f"sv{suffix}")
    digits = int(sch.get(product).writes[0].source.shape[1])
    rows = largest_divisor(row_tile, _VALUE_SUMS // (_VECTORS * digits))
    m, e, column = _own_loops(sch, result, 3)
    m_outer, m_inner = sch.split(m, [None, rows])
    v, vectors, lane = sch.split(column, [None, _VECTORS, _LANES])
    sch.reorder(m_outer, v, e, m_inner, vectors, lane)
    sch.compute_at(product, e, preserve_unit_loops=True)
    for loop in (m_inner, vectors):
        sch.unroll(loop)
    sch.vectorize(lane)
    m, d, v, e, i, lane, t, j, b = _own_loops(sch, product, 9)
    sch.reorder(t, v, e, i, m, d, lane, j, b)
    if row_tile > rows:
        arrange_block(sch, f"v{suffix}", 3, neon.register_arrange_values)
    else:
        _arrange_rows(sch, f"v{suffix}", t, neon.register_arrange_values)
    for loop in (v, e, i, m, d):
        sch.unroll(loop)
    zeros = sch.decompose_reduction(product, t)
    _by_vectors(sch, zeros, 6)
    sch.tensorize(lane, neon.register_dots())
