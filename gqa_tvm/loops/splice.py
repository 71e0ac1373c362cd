"""Putting a tensor-expression step into a TVMScript loop."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import s_tir, te, tirx
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
    function = te.create_prim_func(list(arguments))
    starts = _reduction_starts(arguments)
    if not suffix and not starts:
        return function
    buffers = {a: p for a, p in zip(arguments, function.params, strict=True) if _is_tensor(a)}

    def complete(block):
        init = block.init
        if block.name_hint in starts:
            init = tirx.BufferStore(init.buffer, _start_at(block, *starts[block.name_hint], buffers), init.indices)
        names = (block.iter_vars, block.reads, block.writes, block.name_hint + suffix, block.body, init)
        return s_tir.SBlock(*names, block.alloc_buffers, block.match_buffers, block.annotations)

    return function.with_body(tvm_ffi.structural_map(function.body, (s_tir.SBlock, complete)))


def _is_tensor(argument) -> bool:
    return isinstance(argument, te.Tensor)


def _reduction_starts(arguments) -> dict:
    """Name of a reduction -> (its axes, the element it starts from). `create_prim_func` starts them all from zero."""
    starts, waiting = {}, [argument.op for argument in arguments if _is_tensor(argument)]
    while waiting:
        operation = waiting.pop()
        waiting += [tensor.op for tensor in operation.input_tensors]
        for value in getattr(operation, "body", ()):
            if isinstance(value, tirx.Reduce) and value.init:
                starts[operation.name] = operation.axis, value.init[0]
    return starts


def _start_at(block, axes, start, buffers):
    """The element a reduction starts from, for the block's own axes."""
    tensor, *indices = start.args
    own = [next(block.iter_vars[i].var for i, axis in enumerate(axes) if axis.var.same_as(index)) for index in indices]
    return tirx.BufferLoad(buffers[tensor], own)


def splice(step, stand_ins: Sequence) -> None:
    """Emit the body of `step` here, its parameters replaced by local buffers and scalar expressions."""
    replacement = list(zip(step.params, stand_ins, strict=True))

    def substitute(node):
        for parameter, stand_in in replacement:
            if node.same_as(parameter):
                return stand_in
        return node

    T.add_to_parent(tvm_ffi.structural_map(step.body, (Var, substitute)))
