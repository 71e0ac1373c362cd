"""What passes that fetch cache rows need of a kernel's loops and loads."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

LINE_BYTES = 64
CACHES = ("key_cache", "value_cache")


def loops_in(body) -> list:
    return nodes_in(body, tirx.For)


def element_bytes(cache) -> int:
    """Bytes of an element."""
    return tvm.DataType(str(cache.dtype)).itemsize


def first_of_lines(cache) -> list:
    """The first column of each line of a row, int64."""
    return [T.int64(first) for first in range(0, int(cache.shape[3]), LINE_BYTES // element_bytes(cache))]


def fetch_line(load):
    """Ask for a line in the first-level cache; one that does not exist is not an error."""
    read, first_level, data = T.int32(0), T.int32(3), T.int32(1)
    return tirx.Evaluate(T.call_llvm_intrin("void", "llvm.prefetch", T.address_of(load), read, first_level, data))


def variables_in(expression) -> list:
    return nodes_in(expression, tvm.ir.Var)


def nodes_in(expression, kind) -> list:
    """Those of a kind in a statement or an expression, inner ones first."""
    found = []

    def find(node):
        found.append(node)
        return node

    tvm_ffi.structural_map(expression, (kind, find))
    return found


def is_among(variables, variable) -> bool:
    return any(variable.same_as(each) for each in variables)


def at_zero(expression, variables):
    """An expression or a statement where these variables are 0."""

    def replace(var):
        return tirx.IntImm(str(var.ty), 0) if is_among(variables, var) else var

    return tvm_ffi.structural_map(expression, (tvm.ir.Var, replace))


def cache_loads(body) -> list:
    """The loads from key and value caches."""
    return [load for load in nodes_in(body, tvm.ir.expr.TensorLoad) if load.source.name in CACHES]
