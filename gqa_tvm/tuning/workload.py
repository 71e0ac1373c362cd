"""A kernel with every size, scalar and integer input replaced by constants: what MetaSchedule can measure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad, Var

from ..kernel_arguments import ENTRY_NEW, ENTRY_ORIGIN, ENTRY_PAST, ENTRY_TOTAL, ROTARY_OFF, SINK_NONE
from ..kernels import KernelSpec
from ..lowering import apply_schedule, fitted_sizes, kernel_loops
from ..schedules.block_sizes import BlockSizes
from ..targets import Target, TargetFacts, llvm_target
from .space import SampledSizes, inner_candidates
from .task import Shape

_INTEGER_INPUTS = ("entries", "positions")


def static_module(spec: KernelSpec, sizes: BlockSizes, shape: Shape) -> tvm.IRModule:
    """The kernel's loops for one call; its parameters are the float and code tensors alone.

    Causal, without window, softcap, bias, sinks, norm and rotary. A trace of it applies to the kernel itself, whose
    blocks and loops are the same.
    """
    sizes = fitted_sizes(spec, sizes)
    function = kernel_loops(spec, sizes)
    named = _named_sizes(spec, sizes, shape)
    constants = {var: named[var.name] for var in _size_variables(function)}
    constants |= {parameter: named[parameter.name] for parameter in function.params if not _is_buffer(parameter)}
    integers = [parameter for parameter in function.params if parameter.name in _INTEGER_INPUTS]
    entry = {ENTRY_PAST: shape.total - shape.tokens, ENTRY_TOTAL: shape.total, ENTRY_NEW: shape.tokens, ENTRY_ORIGIN: 0}

    def load(node):
        if not any(node.source.same_as(buffer) for buffer in integers):
            return node
        value = entry[int(node.indices[1])] if node.source.name == "entries" else 0
        return tirx.IntImm(str(node.ty), value)

    def substitute(var):
        for known, value in constants.items():
            if var.same_as(known):
                return tvm.tirx.const(value, str(var.ty))
        return var

    body = tvm_ffi.structural_map(function.body, (TensorLoad, load))
    tensors = [p for p in function.params if _is_buffer(p) and p.name not in _INTEGER_INPUTS]
    static = tirx.PrimFunc(tensors, body, function.ret_type, function.attrs)
    static = tvm_ffi.structural_map(static, (Var, substitute))
    return tvm.IRModule({"main": static.with_attr("global_symbol", "main")})


def symbolic_module(spec: KernelSpec, sizes: BlockSizes) -> tvm.IRModule:
    """The kernel as it ships, with the function name that traces of `static_module` refer to."""
    function = kernel_loops(spec, fitted_sizes(spec, sizes))
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})


def _is_buffer(parameter) -> bool:
    return isinstance(parameter.ty, tirx.buffer.BufferType)


def _size_variables(function) -> list[Any]:
    """The symbolic sizes and strides of the parameters, each once."""
    found: list[Any] = []
    for parameter in filter(_is_buffer, function.params):
        for size in (*parameter.shape, *parameter.strides):
            if isinstance(size, Var) and not any(size.same_as(known) for known in found):
                found.append(size)
    return found


class _Ones(dict[str, Any]):
    """Sizes that nothing depends on, such as those of absent inputs, are 1."""

    def __missing__(self, name: str) -> int:
        return 1


def _named_sizes(spec: KernelSpec, sizes: BlockSizes, shape: Shape) -> Mapping[str, Any]:
    """Values of the kernels' symbolic sizes and scalar parameters by name; tensors are compact."""
    heads, total, columns = shape.kv_heads * shape.group_size, shape.total, spec.cache_columns
    hidden = heads * spec.head_size
    cache_strides = {"batch": shape.kv_heads * total * columns, "head": total * columns, "row": columns}
    caches = {f"{name}_{axis}": value for name in ("key_cache", "value_cache") for axis, value in cache_strides.items()}
    return _Ones(
        **caches,
        S=shape.tokens,
        N=heads,
        N_kv=shape.kv_heads,
        C=total,
        query_hidden=hidden,
        query_batch=shape.tokens * hidden,
        query_token=hidden,
        softmax_scale=1.0 / math.sqrt(spec.head_size),
        # Off as 0 is, but the branch that is not taken divides by it.
        softcap=-1.0,
        window=-1,
        causal=1,
        norm_epsilon=0.0,
        rotary=ROTARY_OFF,
        has_bias=0,
        sink=SINK_NONE,
        **_partial_states(spec, sizes, shape),
    )


def _partial_states(spec: KernelSpec, sizes: BlockSizes, shape: Shape) -> dict[str, int]:
    """Sizes of the states that chunks leave for the merge, as the operator allocates them."""
    if shape.total <= sizes.kv_chunk:
        return {"kv_chunk": -(-shape.total // sizes.decode_kv_block) * sizes.decode_kv_block}
    all_rows = shape.tokens * shape.group_size
    rows = min(-(-sizes.decode_rows // spec.row_tile) * spec.row_tile, all_rows) if spec.row_tile else 1
    return {
        "kv_chunk": sizes.kv_chunk,
        "partial_heads": shape.kv_heads,
        "partial_groups": -(-all_rows // rows),
        "partial_chunks": -(-shape.total // sizes.kv_chunk),
        "partial_rows": rows,
    }


def sane_array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers like those of real calls: TVM's own random bytes would be NaN and denormal floats."""
    rng = np.random.default_rng(0)
    if dtype in ("int8", "uint8"):
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    if shape == (1,):
        return np.full(shape, 0.02, dtype)
    return rng.standard_normal(shape, np.float32).astype(dtype)


@dataclass(frozen=True)
class Workload:
    """A point of the outer grid for one call."""

    spec: KernelSpec
    sizes: BlockSizes
    shape: Shape
    target: Target
    facts: TargetFacts

    def module(self) -> tvm.IRModule:
        return static_module(self.spec, self.sizes, self.shape)

    def tvm_target(self) -> tvm.target.Target:
        return tvm.target.Target({**llvm_target(self.target), "num-cores": max(self.facts.cores, 1)})

    def schedule(self, schedule: tvm.s_tir.Schedule) -> None:
        """The kernel's schedule with its inner fields sampled."""
        schedule.work_on("main")
        sampled = {
            name: schedule.sample_categorical(list(values), [1.0 / len(values)] * len(values))
            for name, values in inner_candidates(self.spec, self.sizes).items()
        }
        apply_schedule(schedule, self.spec, self.target, SampledSizes(self.sizes, sampled))  # type: ignore[arg-type]

    def candidates(self) -> dict[str, tuple[int, ...]]:
        """The values of every sampled field, in the order of the samplings."""
        return inner_candidates(self.spec, self.sizes)

    def sizes_at(self, point: tuple[int, ...]) -> BlockSizes | None:
        """The sizes that decisions stand for; None for those that contradict each other."""
        chosen = {name: values[at] for (name, values), at in zip(self.candidates().items(), point, strict=True)}
        try:
            return replace(self.sizes, **chosen)
        except ValueError:
            return None

    def default_point(self) -> tuple[int, ...]:
        """The decisions that give the workload's own sizes, or the nearest below."""
        return tuple(
            max((at for at, value in enumerate(values) if value <= getattr(self.sizes, name)), default=0)
            for name, values in self.candidates().items()
        )
