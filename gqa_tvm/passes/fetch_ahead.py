"""Compiler pass that lets marked loops over cache rows fetch rows that are read later.

Hardware prefetchers give up on attention over a long cache: keys and values take turns, several rows are read at a
time, and vectors of digits are read between them. Where a block's rows are read in several passes, fetches are for the
next block; else, and in the last block, for rows that come some bytes later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from ..schedules.block_sizes import largest_divisor
from ..schedules.fetch import FETCH_AHEAD, FETCH_AROUND
from .cache_reads import (
    LINE_BYTES,
    at_zero,
    cache_loads,
    element_bytes,
    fetch_line,
    first_of_lines,
    is_among,
    loops_in,
    nodes_in,
    variables_in,
)
from .functions import function_pass


def fetch_ahead():
    """The pass; it comes after blocks have become opaque and before buffers are flattened."""
    return function_pass(_fetch_in_function)


def _fetch_in_function(function):
    around = _loops_around(function.body)

    def fetch(loop):
        if FETCH_AHEAD in loop.annotations:
            body = _with_fetch(loop, around[loop.loop_var])
        elif FETCH_AROUND in loop.annotations:
            body = loop.body
        else:
            return loop
        marks = {mark: value for mark, value in loop.annotations.items() if mark not in (FETCH_AHEAD, FETCH_AROUND)}
        if not marks and isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1:
            # Without its mark it would have gone before this pass.
            return at_zero(body, [loop.loop_var])
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=marks)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, fetch)))


def _loops_around(body) -> dict:
    """Variable of a loop that fetches -> the marked loops around it, innermost first."""
    around = {}

    def find(loop):
        if FETCH_AHEAD in loop.annotations:
            around[loop.loop_var] = []
        if FETCH_AROUND in loop.annotations:
            for inner in loops_in(loop.body):
                if inner.loop_var in around:
                    around[inner.loop_var].append(loop)
        return loop

    tvm_ffi.structural_map(body, (tirx.For, find))
    return around


def _with_fetch(loop, around):
    """The body of a loop, and fetches for a later row, once for each line that the loops load.

    around: the marked loops around, innermost first.
    """
    loads = cache_loads(loop.body)
    if not loads:
        # A copy of the loop that sets sums to zero.
        return loop.body
    passes = _passes_over_rows(loads[0], (loop, *around))
    if passes is None:
        return tirx.SeqStmt([loop.body, *_fetches(loads, loop, around)])
    is_followed = passes.last >= T.int64(2 * passes.block - 1)
    ahead = _fetches(loads, loop, around, tirx.Not(is_followed))
    return tirx.SeqStmt([loop.body, *_fetches_of_next_block(loads[0], passes, is_followed), *ahead])


class _Passes(NamedTuple):
    """Loops that read the rows of a block of keys several times, `rows` of them at a time."""

    rows: Any  # the unrolled loop
    unrolled: list  # other unrolled loops
    reads: Any  # the loop over the block
    turn: Any  # which pass it is
    share: int  # of the rows of a read, those that a pass fetches; passes after the first rows / share fetch none
    last: Any  # the last row that exists, of the block

    @property
    def block(self) -> int:
        return int(self.reads.extent) * int(self.rows.extent)


def _passes_over_rows(load, loops) -> _Passes | None:
    """The passes of marked loops, innermost first, around a load; None if there is one, or loops of another form."""
    row = load.indices[2]
    at = next((i for i, each in enumerate(loops) if each.kind != tirx.ForKind.UNROLLED), None)
    clamps = nodes_in(row, tirx.Min)
    if at is None or len(clamps) != 1:
        return None
    unrolled, reads, around = loops[:at], loops[at], loops[at + 1 :]
    rows = [each for each in unrolled if is_among(variables_in(row), each.loop_var)]
    if len(rows) != 1 or any(is_among(variables_in(row), each.loop_var) for each in around):
        return None
    turn, turns = 0, 1
    for each in around:
        turn, turns = turn + each.loop_var * turns, turns * int(each.extent)
    spread = largest_divisor(int(rows[0].extent), turns)
    others = [each for each in unrolled if each is not rows[0]]
    passes = _Passes(rows[0], others, reads, turn, int(rows[0].extent) // spread, clamps[0].b)
    return passes if spread > 1 else None


def _fetches_of_next_block(load, passes: _Passes, is_followed) -> list:
    """Fetches of the rows of the next block, if it is whole: each pass has its share, in the order of memory.

    With all of them in the first pass, memory would rest in the others.
    """
    cache, (batch, head, row, _) = load.source, load.indices
    rows, reads = passes.rows, passes.reads
    begin = at_zero(row, [reads.loop_var, rows.loop_var])
    own = (passes.turn * int(reads.extent) + reads.loop_var) * passes.share + rows.loop_var
    target, ahead = begin + tirx.Cast("int64", own), cache.strides[2] * passes.block
    fetches = [fetch_line(tirx.BufferLoad(cache, [batch, head, target, ahead + c])) for c in first_of_lines(cache)]
    own_share = [rows.loop_var < passes.share, passes.turn < int(rows.extent) // passes.share]
    conditions = [*own_share, is_followed, *(each.loop_var == 0 for each in passes.unrolled)]
    return [tirx.IfThenElse(tirx.all(*conditions), fetch, None) for fetch in fetches]


def _fetches(loads, loop, around, condition=None) -> list:
    """Fetches of a row that comes the mark's bytes later; condition: when at all, None = always.

    Where rows come again for further columns, all lines of a row are fetched the first time: asked for every other
    line, the prefetchers of the CPU become slower themselves.
    """
    cache, (batch, head, row, column) = loads[0].source, loads[0].indices
    row_bytes, line = int(cache.shape[3]) * element_bytes(cache), LINE_BYTES // element_bytes(cache)
    column, lanes = _first_column(column, loop.body)
    of_row, of_column = variables_in(row), variables_in(column)
    chain = [each.loop_var for each in (loop, *around)]
    conditions = [variable == 0 for variable in chain if not is_among(of_row + of_column, variable)]
    conditions += [] if condition is None else [condition]
    # What is unrolled is one read of several rows and columns.
    reads = [each.loop_var for each in (loop, *around) if each.kind != tirx.ForKind.UNROLLED]
    innermost_row = next((i for i, variable in enumerate(reads) if is_among(of_row, variable)), len(reads))
    comes_again = any(is_among(of_column, variable) for variable in reads[innermost_row:])
    if comes_again or len({str(each.indices[3]) for each in loads}) > 1:
        fetched = first_of_lines(cache)
        conditions.append(column == 0)
    else:
        fetched = [tirx.Cast("int64", column)]
        if lanes < line:
            conditions.append(tirx.floormod(column, line) == 0)
    # Beyond the row's end: of a row further on, the address would be computed anew for every load.
    ahead = cache.strides[2] * max(1, int(loop.annotations[FETCH_AHEAD]) // row_bytes)
    fetches = [fetch_line(tirx.BufferLoad(cache, [batch, head, row, ahead + c])) for c in fetched]
    return [tirx.IfThenElse(tirx.all(*conditions), fetch, None) for fetch in fetches] if conditions else fetches


def _first_column(column, body):
    """The first column of the vector that a body loads, and its lanes."""
    if isinstance(column, tirx.Ramp):
        return column.base, int(column.lanes)
    inner = loops_in(body)
    return at_zero(column, [loop.loop_var for loop in inner]), int(inner[0].extent)
