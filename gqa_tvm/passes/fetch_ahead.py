"""Compiler pass that lets marked loops over cache rows fetch rows that are read later.

Hardware prefetchers give up on attention over a long cache: keys and values take turns, several rows are read at a
time, and vectors of digits are read between them.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from ..schedules.fetch import FETCH_AHEAD, FETCH_AROUND
from .functions import function_pass

_LINE_BYTES = 64
_CACHES = ("key_cache", "value_cache")


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
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, fetch)))


def _loops_around(body) -> dict:
    """Variable of a loop that fetches -> the marked loops around it, innermost first."""
    around = {}

    def find(loop):
        if FETCH_AHEAD in loop.annotations:
            around[loop.loop_var] = []
        if FETCH_AROUND in loop.annotations:
            for inner in _loops(loop.body):
                if inner.loop_var in around:
                    around[inner.loop_var].append(loop)
        return loop

    tvm_ffi.structural_map(body, (tirx.For, find))
    return around


def _loops(body) -> list:
    loops = []

    def find(loop):
        loops.append(loop)
        return loop

    tvm_ffi.structural_map(body, (tirx.For, find))
    return loops


def _with_fetch(loop, around):
    """The body of a loop, and fetches for a later row, once for each line that the loops load.

    around: the marked loops around, innermost first. Where rows come again for further columns, all lines of a row are
    fetched the first time: asked for every other line, the prefetchers of the CPU become slower themselves.
    """
    loads = _cache_loads(loop.body)
    if not loads:
        # A copy of the loop that sets sums to zero.
        return loop.body
    cache, (batch, head, row, column) = loads[0].source, loads[0].indices
    width = tvm.DataType(str(cache.dtype)).itemsize
    columns, line = int(cache.shape[3]), _LINE_BYTES // width
    column, lanes = _first_column(column, loop.body)
    of_row, of_column = _variables(row), _variables(column)
    chain = [each.loop_var for each in (loop, *around)]
    conditions = [variable == 0 for variable in chain if not _holds(of_row + of_column, variable)]
    # What is unrolled is one read of several rows and columns.
    reads = [each.loop_var for each in (loop, *around) if each.kind != tirx.ForKind.UNROLLED]
    innermost_row = next((i for i, variable in enumerate(reads) if _holds(of_row, variable)), len(reads))
    comes_again = any(_holds(of_column, variable) for variable in reads[innermost_row:])
    if comes_again or len({str(each.indices[3]) for each in loads}) > 1:
        fetched = [tirx.IntImm("int32", first) for first in range(0, columns, line)]
        conditions.append(column == 0)
    else:
        fetched = [column]
        if lanes < line:
            conditions.append(tirx.floormod(column, line) == 0)
    # Beyond the row's end: of a row further on, the address would be computed anew for every load.
    ahead = cache.strides[2] * max(1, int(loop.annotations[FETCH_AHEAD]) // (columns * width))
    fetches = [_fetch(tirx.BufferLoad(cache, [batch, head, row, ahead + tirx.Cast("int64", c)])) for c in fetched]
    if conditions:
        fetches = [tirx.IfThenElse(tirx.all(*conditions), fetch, None) for fetch in fetches]
    return tirx.SeqStmt([loop.body, *fetches])


def _first_column(column, body):
    """The first column of the vector that a body loads, and its lanes."""
    if isinstance(column, tirx.Ramp):
        return column.base, int(column.lanes)
    inner = _loops(body)
    return _at_zero(column, [loop.loop_var for loop in inner]), int(inner[0].extent)


def _fetch(load):
    """Ask for a line in the first-level cache; one that does not exist is not an error."""
    read, first_level, data = T.int32(0), T.int32(3), T.int32(1)
    return tirx.Evaluate(T.call_llvm_intrin("void", "llvm.prefetch", T.address_of(load), read, first_level, data))


def _variables(expression) -> list:
    variables = []

    def find(variable):
        variables.append(variable)
        return variable

    tvm_ffi.structural_map(expression, (tvm.ir.Var, find))
    return variables


def _holds(variables, variable) -> bool:
    return any(variable.same_as(each) for each in variables)


def _at_zero(expression, variables):
    def replace(var):
        return tirx.IntImm(str(var.ty), 0) if _holds(variables, var) else var

    return tvm_ffi.structural_map(expression, (tvm.ir.Var, replace))


def _cache_loads(body) -> list:
    loads = []

    def find(load):
        if load.source.name in _CACHES:
            loads.append(load)
        return load

    tvm_ffi.structural_map(body, (tvm.ir.expr.TensorLoad, find))
    return loads
