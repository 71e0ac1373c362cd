"""Compiler pass that lets marked loops over cache rows fetch rows that are read later.

Hardware prefetchers give up on attention over a long cache: keys and values take turns, several rows are read at a
time, and vectors of digits are read between them.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from .schedules.fetch import FETCH_AHEAD, FETCH_AROUND

_LINE_BYTES = 64
_CACHES = ("key_cache", "value_cache")


def fetch_ahead():
    """The pass; it comes after blocks have become opaque and before buffers are flattened."""

    @tvm.transform.module_pass(opt_level=0)
    def rewrite(mod, _context):
        return tvm.IRModule({name: _fetch_in_function(function) for name, function in mod.functions.items()})

    return rewrite


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
            for variable in _loop_variables(loop.body):
                if variable in around:
                    around[variable].append(loop)
        return loop

    tvm_ffi.structural_map(body, (tirx.For, find))
    return around


def _loop_variables(body) -> list:
    variables = []

    def find(loop):
        variables.append(loop.loop_var)
        return loop

    tvm_ffi.structural_map(body, (tirx.For, find))
    return variables


def _with_fetch(loop, around):
    """The body of a loop, and a fetch for what it loads for the first time."""
    load = _cache_load(loop.body)
    if load is None:
        # A copy of the loop that sets sums to zero.
        return loop.body
    width = tvm.DataType(str(load.source.dtype)).itemsize
    batch, head, row, column = load.indices
    # The first column of a vector.
    column = column.base if isinstance(column, tirx.Ramp) else _at_zero(column, _loop_variables(loop.body))
    used = _variables((row, column))
    again = [each.loop_var for each in (loop, *around) if not _holds(used, each.loop_var)]
    first_time = [tirx.floormod(column, _LINE_BYTES // width) == 0, *(variable == 0 for variable in again)]
    rows = max(1, int(loop.annotations[FETCH_AHEAD]) // (int(load.source.shape[3]) * width))
    # Beyond the row's end: of a row further on, the address would be computed anew for every load.
    ahead = tirx.Cast("int64", column) + load.source.strides[2] * tirx.IntImm("int64", rows)
    fetch = _fetch(tirx.BufferLoad(load.source, [batch, head, row, ahead]))
    return tirx.SeqStmt([loop.body, tirx.IfThenElse(tirx.all(*first_time), fetch, None)])


def _fetch(load):
    """Ask for a line in the first-level cache; one that does not exist is not an error."""
    read, first_level, data = T.int32(0), T.int32(3), T.int32(1)
    return tirx.Evaluate(T.call_llvm_intrin("void", "llvm.prefetch", T.address_of(load), read, first_level, data))


def _variables(expressions) -> list:
    variables = []

    def find(variable):
        variables.append(variable)
        return variable

    for expression in expressions:
        tvm_ffi.structural_map(expression, (tvm.ir.Var, find))
    return variables


def _holds(variables, variable) -> bool:
    return any(variable.same_as(each) for each in variables)


def _at_zero(expression, variables):
    def replace(var):
        return tirx.IntImm(str(var.ty), 0) if _holds(variables, var) else var

    return tvm_ffi.structural_map(expression, (tvm.ir.Var, replace))


def _cache_load(body):
    """A load from a cache."""
    loads = []

    def find(load):
        if load.source.name in _CACHES:
            loads.append(load)
        return load

    tvm_ffi.structural_map(body, (tvm.ir.expr.TensorLoad, find))
    return loads[0] if loads else None
