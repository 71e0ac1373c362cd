"""From a kernel's spec to an object file: loops, schedule, TVM passes, LLVM."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from .definitions.half import float16_to_float32, float32_to_float16
from .kernels import KernelSpec
from .loops.append import append
from .loops.decode import flash_decode
from .loops.naive import naive
from .loops.prefill import flash_prefill
from .loops.primitives_cache import kv_dequantize, kv_quantize
from .loops.primitives_gemm import qk_gemm, sv_gemm
from .schedules.block_sizes import BlockSizes
from .targets import converts_float16, llvm_target

# Register tiles and other small scratch live on the stack, where LLVM turns them into registers; larger scratch comes
# from the workspace, so that a worker's stack stays small.
_STACK_LIMIT_BYTES = 4096


def schedule_module(target: str) -> ModuleType:
    """The schedules of a target."""
    return importlib.import_module(f".schedules.{target.replace('-', '_')}", __package__)


def scheduled_module(spec: KernelSpec, target: str, sizes: BlockSizes) -> tvm.IRModule:
    """The kernel as scheduled TensorIR."""
    schedules = schedule_module(target)
    loops = {
        "flash_prefill": flash_prefill,
        "flash_decode": flash_decode,
        "naive": naive,
        "kv_quantize": kv_quantize,
        "kv_dequantize": kv_dequantize,
        "qk_gemm": qk_gemm,
        "sv_gemm": sv_gemm,
    }
    if spec.operation == "flash_prefill" and spec.row_tile:
        sizes = sizes.with_q_block(spec.row_tile)
    function = append(spec) if spec.operation == "append" else loops[spec.operation](spec, sizes)
    schedule = s_tir.Schedule(tvm.IRModule({spec.name: function}))
    schedule.work_on(spec.name)
    few_rows = spec.operation in ("flash_decode", "qk_gemm", "sv_gemm")
    arguments = (spec.row_tile, spec.cache_columns) if few_rows else ()
    getattr(schedules, f"schedule_{spec.operation}")(schedule, sizes, *arguments)
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


def _passes(target: str, reuse_storage: bool) -> list:
    s, t = s_tir.transform, tirx.transform
    return [
        *([] if converts_float16(target) else [_float16_by_integers()]),
        s.CanonicalizeLoop(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
        _keep_bound_values(),
        s.CompactBufferAllocation(),
        s.LowerMatchBuffer(),
        s.StmtSimplify(),
        s.AnnotateIrregularLoop(),
        s.LowerOpaqueBlock(),
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


def _multiplies_digits(spec: KernelSpec, sizes: BlockSizes) -> bool:
    """Whether small buffers must keep storage of their own.

    Shared with one that is indexed at run time, the vectors of a split-integer product would go through memory.
    """
    decodes = spec.operation == "flash_decode"
    return decodes and sizes.splits_integers(spec.cache, spec.cache_columns, spec.row_tile)


def _llvm_options(spec: KernelSpec, sizes: BlockSizes) -> list[str]:
    """Flash schedules unroll what is worth it; left alone, LLVM also unrolls the loops that run once for a row.

    They are a part of the time that counts where there are one or two rows, and of split-integer kernels.
    """
    decodes_many = spec.operation == "flash_decode" and spec.row_tile > 2
    many_rows = decodes_many or spec.operation in ("flash_prefill", "naive")
    return ["-unroll-threshold-aggressive:uint=100"] if many_rows and not _multiplies_digits(spec, sizes) else []


def compile_kernel(spec: KernelSpec, target: str, sizes: BlockSizes):
    """TVM runtime module of one kernel (`write_to_file(path, "o")`, `inspect_source("asm")`)."""
    mod = scheduled_module(spec, target, sizes)
    tvm_target = tvm.target.Target({**llvm_target(target), "cl-opt": _llvm_options(spec, sizes)})
    tvm_target = tvm_target.with_host(tvm_target)
    mod = tirx.transform.BindTarget(tvm_target)(mod)
    with tvm_target:
        mod = tvm.ir.transform.Sequential(_passes(target, not _multiplies_digits(spec, sizes)))(mod)
    # tvm.tirx.build the function hides the module of the same name.
    return sys.modules["tvm.tirx.build"].tir_to_runtime(mod, {}, tvm_target)
