"""Schedules of the kernels over packed caches: vectors go from memory into products as they are."""

from __future__ import annotations

from . import fetch, generic, split_prefill_steps, steps
from . import intrinsics_vnni as vnni
from .block_sizes import BlockSizes, largest_divisor
from .intrinsics_packed import register_arrange_packed, register_dot_packed_keys
from .split_steps import _by_vectors, qk_suffixes
from .steps import Schedule, _own_loops, find_block

_BYTES = 64
_LANES = 16
_VALUE_KEYS = 4
# Sums of a tile of scores: beside them are vectors of keys, a word of digits and a constant.
_QK_SUMS = 28
# Groups of 16 keys that share a word of digits, by planes. INT8 keys come in the order of memory: from several rows at
# a time they take 1.1 to 1.2 times as long where memory is what bounds them.
_QK_GROUPS = {1: 1, 2: 4}
# Sums of a register tile: they leave room for the operands of its products.
_SUMS = 24


def reads_packed(sch: Schedule) -> bool:
    """Whether the kernel was made for a packed cache."""
    return find_block(sch, "packed_k") is not None


def schedule_decode(sch: Schedule, sizes: BlockSizes) -> None:
    """flash_decode: a word of a query row meets the words of many keys."""
    steps.parallelize_tasks(sch)
    steps.parallelize_tasks(sch, "merge")
    for suffix in qk_suffixes(sch):
        _tile_qk(sch, suffix)
    generic._schedule_few_rows_softmax(sch, sizes)
    _probabilities_by_vectors(sch, sizes)
    _tile_sv(sch)
    fetch.fetch_ahead(sch, sizes)


def _tile_qk(sch: Schedule, suffix: str) -> None:
    """Scores [m, t]: the sums of groups of 16 keys x rows x digits stay in registers over the head."""
    scores, sums = sch.get_sblock(f"qk{suffix}"), sch.get_sblock(f"packed_sums{suffix}")
    m, t = _own_loops(sch, scores, 2)
    digits = int(sch.get(sums).writes[0].source.shape[2])
    rows = largest_divisor(int(sch.get(m).extent), _QK_SUMS // digits)
    codes = sch.get_sblock(f"packed_k{suffix}")
    planes = int(sch.get(codes).writes[0].source.shape[1])
    groups = largest_divisor(_QK_GROUPS[planes], max(1, _QK_SUMS // (digits * rows)))
    keys = int(sch.get(t).extent)
    t, group, lane = sch.split(t, [None, groups, _LANES])
    steps.end_at_last_key(sch, t, keys)
    m_outer, m_inner = sch.split(m, [None, rows])
    sch.reorder(t, m_outer, group, m_inner, lane)
    sch.compute_at(sums, m_outer, preserve_unit_loops=True)
    sch.unroll(group)
    sch.unroll(m_inner)
    sch.vectorize(lane)
    t, m, d, lane, e, c, q = _own_loops(sch, sums, 7)
    sch.reorder(c, e, m, d, t, lane, q)
    sch.compute_at(codes, c, preserve_unit_loops=True)
    _by_vectors(sch, codes, 4)
    for loop in (e, m, d, t):
        sch.unroll(loop)
    _by_vectors(sch, sch.decompose_reduction(sums, c), 4)
    sch.tensorize(lane, register_dot_packed_keys())


def _probabilities_by_vectors(sch: Schedule, sizes: BlockSizes) -> None:
    """Bytes of the probabilities of 16 keys: one shuffle of a register."""
    arrange, fixed = sch.get_sblock("packed_p"), sch.get_sblock("p_fixed")
    _, t, x = _own_loops(sch, arrange, 3)
    sch.compute_at(fixed, t, preserve_unit_loops=True)
    _by_vectors(sch, fixed, 2)
    sch.tensorize(x, register_arrange_packed())


def _tile_sv(sch: Schedule) -> None:
    """acc: the sums of a row's digits x vectors of columns stay in registers over the keys.

    As many vectors as fit, whose values come in the order of memory; further rows find them in the first-level cache.
    """
    product, result = sch.get_sblock("sv_product"), sch.get_sblock("sv")
    _, e, column = _own_loops(sch, result, 3)
    digits = int(sch.get(product).writes[0].source.shape[1])
    planes, vectors = int(sch.get(e).extent), int(sch.get(column).extent) // _LANES
    vectors = largest_divisor(vectors, _SUMS // (digits * planes))
    column_outer, vector, lane = sch.split(column, [None, vectors, _LANES])
    sch.reorder(column_outer, e, vector, lane)
    sch.compute_at(product, column_outer, preserve_unit_loops=True)
    for loop in (e, vector):
        sch.unroll(loop)
    sch.vectorize(lane)
    m, d, e, column, t, b = _own_loops(sch, product, 6)
    steps.end_at_last_key(sch, t, _VALUE_KEYS * int(sch.get(t).extent))
    vector, lane = sch.split(column, [None, _LANES])
    sch.reorder(t, vector, e, m, d, lane, b)
    if find_block(sch, "packed_v"):
        codes = sch.get_sblock("packed_v")
        sch.compute_at(codes, vector, preserve_unit_loops=True)
        _by_vectors(sch, codes, 3)
    for loop in (vector, e, m, d):
        sch.unroll(loop)
    zeros = sch.decompose_reduction(product, t)
    _by_vectors(sch, zeros, 5)
    sch.tensorize(lane, vnni.register_dot_values(_BYTES))


def _codes_by_vectors(sch: Schedule, name: str, loops: int, keys: int) -> None:
    """Codes [.., plane, .., byte] of rows of so many keys so that one load of a vector serves every plane."""
    *outer, byte = _own_loops(sch, sch.get_sblock(name), loops)
    steps.end_at_last_key(sch, outer[0], keys * int(sch.get(outer[0]).extent))
    first, inner = sch.split(byte, [None, _BYTES])
    plane = outer[1]
    sch.reorder(outer[0], *outer[2:], first, plane, inner)
    sch.unroll(plane)
    sch.vectorize(inner)


def schedule_prefill(sch: Schedule, sizes: BlockSizes) -> None:
    """flash_prefill: words of keys serve all rows, rows as lanes."""
    generic._schedule_rows_last_task(sch, sizes)
    split_prefill_steps.digits_of_rows(sch, sizes)
    _codes_by_vectors(sch, "packed_k", 4, _LANES)
    split_prefill_steps.tile_qk_for_rows(sch, sizes)
    generic._schedule_rows_last_bias(sch, sizes)
    split_prefill_steps.softmax_by_rows(sch, sizes)
    split_prefill_steps.probabilities_by_vectors(sch, _LANES)
    if find_block(sch, "packed_v"):
        _codes_by_vectors(sch, "packed_v", 3, _VALUE_KEYS)
    split_prefill_steps.tile_sv_for_rows(sch, sizes, _BYTES)
