"""Compiler pass that lets the products over a block of keys fetch the rows of the next block.

The products of many rows take several times as long as a block takes to come from memory. Its lines are spread evenly
over the iterations of the marked loops and those around them, so that memory works all the time and nobody waits.
"""

from __future__ import annotations

import math

import tvm_ffi
from tvm import tirx

from ..schedules.fetch import FETCH_NEXT_BLOCK
from .cache_reads import LINE_BYTES, at_zero, cache_loads, element_bytes, fetch_line, first_of_lines, loops_in
from .functions import function_pass


def fetch_next_block():
    """The pass; it comes after blocks have become loops and before those are cut to what is visible."""
    return function_pass(_fetch_in_function)


def _fetch_in_function(function):
    # Loops of a block have as many iterations as its sizes say, those over blocks and tasks as the call says.
    of_block = [loop for loop in loops_in(function.body) if isinstance(loop.extent, tirx.IntImm)]
    # The last load is of a block, by products or what they decode ahead; earlier ones may look for special values.
    loads = {load.source.name: load for load in cache_loads(function.body)}

    def fetch(loop):
        cache = next((cache for cache, mark in FETCH_NEXT_BLOCK.items() if mark in loop.annotations), None)
        if cache is None:
            return loop
        keys = int(loop.annotations[FETCH_NEXT_BLOCK[cache]])
        begin = at_zero(loads[cache].indices[2], [each.loop_var for each in of_block])
        line = _line_of_iteration(loop, _around(loop, of_block), keys * len(first_of_lines(loads[cache].source)))
        body = tirx.SeqStmt([loop.body, _fetch(loads[cache], begin, keys, line)])
        marks = {mark: value for mark, value in loop.annotations.items() if mark != FETCH_NEXT_BLOCK[cache]}
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=marks)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, fetch)))


def _around(loop, of_block) -> list:
    """The loops of a block around a loop, innermost first."""
    holds_loop = lambda each: any(inner.loop_var.same_as(loop.loop_var) for inner in loops_in(each.body))  # noqa: E731
    return [each for each in of_block if holds_loop(each)]


def _line_of_iteration(loop, around, count: int):
    """Which of `count` lines an iteration fetches, int32: several in a row the same one if there are more of them."""
    iteration, iterations = loop.loop_var, int(loop.extent)
    for each in around:
        iteration = iteration + each.loop_var * iterations
        iterations *= int(each.extent)
    # In the lowest terms, or the division would be left to every iteration.
    common = math.gcd(count, iterations)
    divisor = tirx.IntImm(str(loop.loop_var.ty), iterations // common)
    return tirx.floordiv(iteration * (count // common), divisor)


def _fetch(load, begin, keys: int, line):
    """Fetch a line of the `keys` rows that come after the block of `begin`."""
    cache, (batch, head, _, _) = load.source, load.indices
    lines = tirx.IntImm(str(line.ty), len(first_of_lines(cache)))
    row = begin + tirx.Cast("int64", tirx.floordiv(line, lines))
    column = tirx.Cast("int64", tirx.floormod(line, lines) * (LINE_BYTES // element_bytes(cache)))
    return fetch_line(tirx.BufferLoad(cache, [batch, head, row, cache.strides[2] * keys + column]))
