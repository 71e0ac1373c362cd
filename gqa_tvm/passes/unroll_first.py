"""Unrolling before anything is simplified or vectorised."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx

from ..schedules.steps import UNROLL_FIRST
from .functions import rewrite_bodies


def unroll_first():
    """Unroll loops that a schedule has marked."""

    def unroll(loop):
        if UNROLL_FIRST not in loop.annotations:
            return loop
        at = lambda index: (tvm.ir.Var, lambda var: index if var.same_as(loop.loop_var) else var)  # noqa: E731
        indices = (tirx.IntImm(str(loop.loop_var.ty), i) for i in range(int(loop.extent)))
        copies = [tvm_ffi.structural_map(loop.body, at(index)) for index in indices]
        return tirx.SeqStmt(copies) if len(copies) > 1 else copies[0]

    return rewrite_bodies((tirx.For, unroll))
