"""From a kernel's spec to an object file: loops, schedule, TVM passes, LLVM."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from .definitions.half import float16_to_float32, float32_to_float16
from .fetch_ahead import fetch_ahead
from .kernels import KernelSpec
from .loops.append import append
from .loops.decode import flash_decode
from .loops.naive import naive
from .loops.packed_append import packed_append
from .loops.prefill import flash_prefill
from .loops.primitives_cache import kv_dequantize, kv_quantize
from .loops.primitives_gemm import qk_gemm, sv_gemm
from .schedules.block_sizes import BlockSizes, multiplies_digits
from .schedules.steps import UNROLL_FIRST
from .targets import Target, llvm_target
from .variants import Variant
from .visible_tiles import visible_tiles

# Register tiles and other small scratch live on the stack, where LLVM turns them into registers; larger scratch comes
# from the workspace, so that a worker's stack stays small.
_STACK_LIMIT_BYTES = 4096


def schedule_module(target: Target) -> ModuleType:
    """The schedules of a target."""
    return importlib.import_module(f".schedules.{target.name.replace('-', '_')}", __package__)


def kernel_loops(spec: KernelSpec, sizes: BlockSizes):
    """The kernel's PrimFunc before any schedule."""
    loops = {
        "flash_prefill": flash_prefill,
        "flash_decode": flash_decode,
        "naive": naive,
        "kv_quantize": kv_quantize,
        "kv_dequantize": kv_dequantize,
        "qk_gemm": qk_gemm,
        "sv_gemm": sv_gemm,
    }
    if spec.operation == "append":
        return packed_append(spec) if spec.layout else append(spec)
    return loops[spec.operation](spec, sizes)


def fitted_sizes(spec: KernelSpec, sizes: BlockSizes) -> BlockSizes:
    """The sizes for the rows of a flash_prefill task where the spec says how many; else as they are."""
    if spec.operation == "flash_prefill" and spec.row_tile:
        return sizes.with_q_block(spec.row_tile)
    return sizes


def apply_schedule(schedule: s_tir.Schedule, spec: KernelSpec, target: Target, sizes: BlockSizes) -> None:
    """Schedule the kernel's loops for a target, in place."""
    schedules = schedule_module(target)
    few_rows = spec.operation in ("flash_decode", "qk_gemm", "sv_gemm")
    arguments = (spec.row_tile, spec.cache_columns) if few_rows else ()
    getattr(schedules, f"schedule_{spec.operation}")(schedule, sizes, *arguments)


def scheduled_module(spec: KernelSpec, variant: Variant) -> tvm.IRModule:
    """The kernel as scheduled TensorIR."""
    sizes = fitted_sizes(spec, variant.sizes.sizes(spec))
    function = kernel_loops(spec, sizes).with_attr("global_symbol", variant.symbol(spec))
    schedule = s_tir.Schedule(tvm.IRModule({spec.name: function}))
    schedule.work_on(spec.name)
    apply_schedule(schedule, spec, variant.target, sizes)
    return schedule.mod


def _rewrite_bodies(*callbacks):
    """Pass that replaces nodes of the functions' bodies; callbacks: (node type, function node -> node)."""

    @tvm.transform.module_pass(opt_level=0)
    def rewrite(mod, _context):
        return tvm.IRModule(
            {
                name: function.with_body(tvm_ffi.structural_map(function.body, callbacks))
                for name, function in mod.functions.items()
            }
        )

    return rewrite


def _keep_small_buffers_on_stack():
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

    return _rewrite_bodies((tirx.AllocBuffer, on_stack))


_SIMPLE_VALUES = (tvm.ir.Var, tirx.IntImm, tvm.ir.expr.TensorLoad)


def _keep_bound_values():
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

    return _rewrite_bodies((tirx.Bind, through_slot), (tirx.SeqStmt, flatten))


def _unroll_first():
    """Unroll loops that a schedule has marked."""

    def unroll(loop):
        if UNROLL_FIRST not in loop.annotations:
            return loop
        at = lambda index: (tvm.ir.Var, lambda var: index if var.same_as(loop.loop_var) else var)  # noqa: E731
        indices = (tirx.IntImm(str(loop.loop_var.ty), i) for i in range(int(loop.extent)))
        copies = [tvm_ffi.structural_map(loop.body, at(index)) for index in indices]
        return tirx.SeqStmt(copies) if len(copies) > 1 else copies[0]

    return _rewrite_bodies((tirx.For, unroll))


def _float16_by_integers():
    """Replace casts from and to float16, for targets without instructions for them."""

    def rewrite_cast(cast):
        source, target = str(cast.value.ty), str(cast.ty)
        if source == "float16" and target == "float32":
            return float16_to_float32(tirx.reinterpret("uint16", cast.value))
        if source == "float32" and target == "float16":
            return tirx.reinterpret("float16", float32_to_float16(cast.value))
        return cast

    return _rewrite_bodies((tirx.Cast, rewrite_cast))


def _short_messages():
    """Let a kernel's checks of an argument fail with one message, the number of the argument and the signature.

    MakePackedAPI gives each of its 150 checks a text of its own; what reports them is a quarter of a kernel's code.
    """

    def shorten(check):
        parts = list(check.message_parts)
        texts = [part.value for part in parts]
        numbers = [i + 1 for i, text in enumerate(texts) if text.endswith("argument #")]
        if not numbers:
            return check
        signature = max(texts, key=len)
        message = ("Mismatched argument #", texts[numbers[0]], " of ", signature)
        kind, *message = map(tvm.ir.StringImm, ("TypeError", *message))
        return tirx.AssertStmt(check.condition, kind, message)

    return _rewrite_bodies((tirx.AssertStmt, shorten))


def _passes(target: Target, reuse_storage: bool) -> list:
    s, t = s_tir.transform, tirx.transform
    return [
        *([] if target.converts_float16 else [_float16_by_integers()]),
        s.CanonicalizeLoop(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
        _keep_bound_values(),
        s.CompactBufferAllocation(),
        s.LowerMatchBuffer(),
        _unroll_first(),
        s.StmtSimplify(),
        s.AnnotateIrregularLoop(),
        s.LowerOpaqueBlock(),
        visible_tiles(),
        fetch_ahead(),
        t.FlattenBuffer(),
        t.NarrowDataType(32),
        s.LoopPartition(),
        t.VectorizeLoop(True),
        *([t.StorageRewrite()] if reuse_storage else []),
        s.HoistIfThenElse(),
        t.UnrollLoop(),
        s.RenormalizeSplitPattern(),
        t.StmtSimplify(),
        t.RemoveNoOp(),
        s.RewriteUnsafeSelect(),
        t.CommonSubexprElim(),
        _keep_small_buffers_on_stack(),
        t.VerifyMemory(),
        t.AnnotateEntryFunc(),
        t.SplitHostDevice(),
        t.MakePackedAPI(),
        _short_messages(),
        t.LowerTVMBuiltin(),
        t.LowerIntrin(),
    ]


def compiler_target(spec: KernelSpec, target: Target, sizes: BlockSizes) -> dict[str, object]:
    """TVM's description of what a kernel is compiled for, with LLVM's options.

    Flash schedules unroll what is worth it; left alone, LLVM also unrolls the loops that run once for a row. They are a
    part of the time that counts where there are one or two rows, and of split-integer kernels.
    """
    decodes_many = spec.operation == "flash_decode" and spec.row_tile > 2
    many_rows = decodes_many or spec.operation in ("flash_prefill", "naive")
    unrolls = not many_rows or multiplies_digits(spec, sizes)
    options = [] if unrolls else ["-unroll-threshold-aggressive:uint=100"]
    return {**llvm_target(target), "cl-opt": options}


def lower(scheduled: tvm.IRModule, spec: KernelSpec, target: Target, sizes: BlockSizes) -> tvm.IRModule:
    """A kernel's scheduled TensorIR as LLVM's code generator takes it."""
    tvm_target = _tvm_target(compiler_target(spec, target, sizes))
    mod = tirx.transform.BindTarget(tvm_target)(scheduled)
    with tvm_target:
        return tvm.ir.transform.Sequential(_passes(target, not multiplies_digits(spec, sizes)))(mod)


def lowered_module(spec: KernelSpec, variant: Variant) -> tvm.IRModule:
    """The kernel as LLVM's code generator takes it."""
    owner = variant.owner(spec)
    return lower(scheduled_module(spec, owner), spec, owner.target, owner.sizes.sizes(spec))


def generate_code(lowered: tvm.IRModule, target: dict[str, object]):
    """TVM runtime module of lowered kernels (`write_to_file(path, "o")`, `inspect_source("asm")`).

    target: as `compiler_target`.
    """
    # tvm.tirx.build the function hides the module of the same name.
    return sys.modules["tvm.tirx.build"].tir_to_runtime(lowered, {}, _tvm_target(target))


def compile_kernel(spec: KernelSpec, variant: Variant):
    """TVM runtime module of one kernel."""
    owner = variant.owner(spec)
    description = compiler_target(spec, owner.target, owner.sizes.sizes(spec))
    return generate_code(lowered_module(spec, variant), description)


def _tvm_target(description: dict[str, object]):
    tvm_target = tvm.target.Target(description)
    return tvm_target.with_host(tvm_target)
