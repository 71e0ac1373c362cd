"""From a kernel's spec to an object file: loops, schedule, TVM passes, LLVM."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import tvm
from tvm import s_tir, tirx

from .kernels import KernelSpec
from .loops.append import append
from .loops.decode import flash_decode
from .loops.naive import naive
from .loops.packed_append import packed_append
from .loops.prefill import flash_prefill
from .loops.primitives_cache import kv_dequantize, kv_quantize
from .loops.primitives_gemm import qk_gemm, sv_gemm
from .passes.fetch_ahead import fetch_ahead
from .passes.fetch_next_block import fetch_next_block
from .passes.half import float16_by_integers
from .passes.messages import short_messages
from .passes.storage import keep_bound_values, keep_small_buffers_on_stack
from .passes.unroll_first import unroll_first
from .passes.visible_tiles import visible_tiles
from .schedules.block_sizes import LONGEST_DOT_BYTES, BlockSizes, multiplies_digits
from .targets import Target, llvm_target
from .variants import Variant


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


def _passes(target: Target, reuse_storage: bool) -> list:
    s, t = s_tir.transform, tirx.transform
    return [
        *([] if target.converts_float16 else [float16_by_integers()]),
        s.CanonicalizeLoop(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
        keep_bound_values(),
        s.CompactBufferAllocation(),
        s.LowerMatchBuffer(),
        unroll_first(),
        s.StmtSimplify(),
        s.AnnotateIrregularLoop(),
        s.LowerOpaqueBlock(),
        fetch_ahead(),
        fetch_next_block(),
        visible_tiles(),
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
        keep_small_buffers_on_stack(),
        t.VerifyMemory(),
        t.AnnotateEntryFunc(),
        t.SplitHostDevice(),
        t.MakePackedAPI(),
        short_messages(),
        t.LowerTVMBuiltin(),
        t.LowerIntrin(),
    ]


def compiler_target(spec: KernelSpec, target: Target, sizes: BlockSizes) -> dict[str, object]:
    """TVM's description of what a kernel is compiled for, with LLVM's options.

    Flash schedules unroll what is worth it; left alone, LLVM also unrolls the loops that run once for a row. They are a
    part of the time that counts where there are one or two rows, and of split-integer kernels with short vectors.
    """
    many_rows = spec.operation in ("flash_prefill", "naive") or (spec.operation == "flash_decode" and spec.row_tile > 2)
    unrolls = sizes.dot_bytes < LONGEST_DOT_BYTES if multiplies_digits(spec, sizes) else not many_rows
    options = [] if unrolls else ["-unroll-threshold-aggressive:uint=100"]
    if spec.operation == "flash_prefill":
        # Else constants of softcap, moved out of all loops, take registers from the sums of a tile.
        options.append("-sink-insts-to-avoid-spills:bool=1")
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
