"""Where kernels keep small buffers and bound numbers."""

from __future__ import annotations

import tvm
from tvm import tirx

from .functions import rewrite_bodies

# Register tiles and other small scratch live on the stack, where LLVM turns them into registers; larger scratch comes
# from the workspace, so that a worker's stack stays small.
_STACK_LIMIT_BYTES = 4096


def keep_small_buffers_on_stack():
    """Mark buffers that stay on the stack."""

    def on_stack(allocation):
        elements = 1
        for extent in allocation.buffer.shape:
            if not isinstance(extent, tirx.IntImm):
                return allocation
            elements *= int(extent)
        dtype = tvm.DataType(str(allocation.buffer.dtype))
        if elements * dtype.itemsize > _STACK_LIMIT_BYTES:
            return allocation
        annotations = {
            **dict(allocation.annotations),
            "disable_lower_builtin": tirx.IntImm("int32", 1),
        }
        return tirx.AllocBuffer(allocation.buffer, annotations)

    return rewrite_bodies((tirx.AllocBuffer, on_stack))


_SIMPLE_VALUES = (tvm.ir.Var, tirx.IntImm, tvm.ir.expr.TensorLoad)


def keep_bound_values():
    """Let every bound number pass through a stack slot, which LLVM turns into a register.

    Wherever a bound variable appears, TVM's simplifier puts the expression that it stands for, whose variables it then
    replaces as well. It does not look through loads: passes that did nothing but that took half of the time.
    """
    slot_annotations = {"disable_lower_builtin": tirx.IntImm("int32", 1)}

    def through_slot(bind):
        if not isinstance(bind.value.ty, tvm.ir.PrimType) or isinstance(bind.value, _SIMPLE_VALUES):
            return bind
        slot = tirx.decl_buffer((1,), str(bind.value.ty), name=str(bind.var.name))
        return tirx.SeqStmt(
            [
                tirx.AllocBuffer(slot, slot_annotations),
                tirx.BufferStore(slot, bind.value, [0]),
                tirx.Bind(bind.var, tirx.BufferLoad(slot, [0])),
            ]
        )

    def flatten(sequence):
        # A variable is visible in the sequence that binds it, not beyond.
        flat = []
        for statement in sequence.seq:
            flat += statement.seq if isinstance(statement, tirx.SeqStmt) else [statement]
        return tirx.SeqStmt(flat)

    return rewrite_bodies((tirx.Bind, through_slot), (tirx.SeqStmt, flatten))
