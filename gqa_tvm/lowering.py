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
from .targets import Target, llvm_target
from .variants import Variant

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
    return append(spec) if spec.operation == "append" else loops[spec.operation](spec, sizes)


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

    @tvm.transform.module_pass(opt_level=0)
    def rewrite(mod, _context):
        return tvm.IRModule(
            {
                name: function.with_body(tvm_ffi.structural_map(function.body, (tirx.AllocBuffer, on_stack)))
                for name, function in mod.functions.items()
            }
        )

    return rewrite


def _float16_by_integers():
    """Replace casts from and to float16, for targets without instructions for them."""

    def rewrite_cast(cast):
        source, target = str(cast.value.ty), str(cast.ty)
        if source == "float16" and target == "float32":
            return float16_to_float32(tirx.reinterpret("uint16", cast.value))
        if source == "float32" and target == "float16":
            return tirx.reinterpret("float16", float32_to_float16(cast.value))
        return cast

    @tvm.transform.module_pass(opt_level=0)
    def rewrite(mod, _context):
        return tvm.IRModule(
            {
                name: function.with_body(tvm_ffi.structural_map(function.body, (tirx.Cast, rewrite_cast)))
                for name, function in mod.functions.items()
            }
        )

    return rewrite


def _passes(target: Target, reuse_storage: bool) -> list:
    s, t = s_tir.transform, tirx.transform
    return [
        *([] if target.converts_float16 else [_float16_by_integers()]),
        s.CanonicalizeLoop(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
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
        t.LowerTVMBuiltin(),
        t.LowerIntrin(),
    ]


def multiplies_digits(spec: KernelSpec, sizes: BlockSizes) -> bool:
    """Whether small buffers must keep storage of their own.

    Shared with one that is indexed at run time, the vectors of a split-integer product would go through memory.
    """
    decodes = spec.operation == "flash_decode"
    return decodes and sizes.splits_integers(spec.cache, spec.cache_columns, spec.row_tile)


def lowered_module(spec: KernelSpec, variant: Variant) -> tvm.IRModule:
    """The kernel as LLVM's code generator takes it."""
    owner = variant.owner(spec)
    reuse_storage = not multiplies_digits(spec, owner.sizes.sizes(spec))
    return lower(scheduled_module(spec, owner), owner.target, reuse_storage)


def lower(scheduled: tvm.IRModule, target: Target, reuse_storage: bool) -> tvm.IRModule:
    """Scheduled TensorIR as LLVM's code generator takes it. reuse_storage: see `multiplies_digits`."""
    tvm_target = _tvm_target(target)
    mod = tirx.transform.BindTarget(tvm_target)(scheduled)
    with tvm_target:
        return tvm.ir.transform.Sequential(_passes(target, reuse_storage))(mod)


def generate_code(lowered: tvm.IRModule, target: Target):
    """TVM runtime module of lowered kernels (`write_to_file(path, "o")`, `inspect_source("asm")`)."""
    # tvm.tirx.build the function hides the module of the same name.
    return sys.modules["tvm.tirx.build"].tir_to_runtime(lowered, {}, _tvm_target(target))


def compile_kernel(spec: KernelSpec, variant: Variant):
    """TVM runtime module of one kernel."""
    return generate_code(lowered_module(spec, variant), variant.owner(spec).target)


def _tvm_target(target: Target):
    tvm_target = tvm.target.Target(llvm_target(target))
    return tvm_target.with_host(tvm_target)
