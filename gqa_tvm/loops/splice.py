"""Putting a tensor-expression step into a TVMScript loop."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import s_tir, te
from tvm.ir import Var
from tvm.script import tirx as T


def whole(buffer):
    """The region of a whole buffer."""
    return buffer[tuple(slice(0, extent) for extent in buffer.shape)]


def alias(buffer):
    """A second name for a buffer inside the current block.

    A schedule only touches a step that does not read what it writes; an in-place step writes through an alias.
    """
    return T.match_buffer(whole(buffer), buffer.shape, buffer.dtype)


def make_step(arguments: Sequence, suffix: str = ""):
    """The PrimFunc of TE tensors and scalar variables, in the order in which `splice` will take their stand-ins.

    suffix: appended to the names of its blocks, for a kernel that has a step twice.
    """

    def rename(block):
        names = (block.iter_vars, block.reads, block.writes, block.name_hint + suffix, block.body, block.init)
        return s_tir.SBlock(*names, block.alloc_buffers, block.match_buffers, block.annotations)

    function = te.create_prim_func(list(arguments))
    if not suffix:
        return function
    return function.with_body(tvm_ffi.structural_map(function.body, (s_tir.SBlock, rename)))


def splice(step, stand_ins: Sequence) -> None:
    """Emit the body of `step` here, its parameters replaced by local buffers and scalar expressions."""
    replacement = list(zip(step.params, stand_ins, strict=True))

    def substitute(node):
        for parameter, stand_in in replacement:
            if node.same_as(parameter):
                return stand_in
        return node

    T.add_to_parent(tvm_ffi.structural_map(step.body, (Var, substitute)))
