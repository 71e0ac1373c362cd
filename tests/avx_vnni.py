"""Kernels of x86-avx-vnni on a CPU that has AVX-512 VNNI only: the same instructions, one of them in another encoding.

LLVM's assembly of the target is taken as it is, but for the prefix that asks for the VEX form of `vpdpbusd` with
256-bit operands: the assembler then writes its EVEX form, which needs AVX512VL and AVX512_VNNI. Registers, order and
number of instructions stay the same.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gqa_tvm import GroupQueryAttention
from gqa_tvm.kernel_cache import kernel_path
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.launcher import launcher
from gqa_tvm.runtime import KernelLibrary
from gqa_tvm.targets import cpu_features, find_target
from gqa_tvm.toolchain import publish
from gqa_tvm.variants import machine_variant

TARGET, BASE = "x86-avx-vnni", "x86-avx2"
# What the EVEX form needs in place of the VEX form's feature.
_STAND_IN = {"avx512_vnni", "avx512vl"}
VEX_DOT = "{vex}\tvpdpbusd"
_LINE_NUMBERS = ("\t.file\t1 ", "\t.loc\t")
needs_stand_in = pytest.mark.skipif(
    not (find_target(BASE).features | _STAND_IN) <= cpu_features(), reason="needs AVX-512 VNNI with 256-bit vectors"
)


def assembly(spec: KernelSpec) -> str:
    """LLVM's assembly of one of the target's own kernels."""
    from gqa_tvm.lowering import compile_kernel

    return compile_kernel(spec, machine_variant(TARGET)).inspect_source("asm")


def _assemble(spec: KernelSpec, output: Path) -> None:
    text = assembly(spec)
    assert VEX_DOT in text
    # Line numbers, in a form that some assemblers do not know.
    lines = [line for line in text.replace(VEX_DOT, "vpdpbusd").split("\n") if not line.startswith(_LINE_NUMBERS)]
    source = output.with_suffix(".s")
    source.write_text("\n".join(lines) + "\n")
    subprocess.run(["gcc", "-shared", str(source), "-o", str(output), "-lm"], check=True)


class AvxVnniLibrary(KernelLibrary):
    """The target's kernels, those of its own in the other encoding."""

    def __init__(self) -> None:
        launcher()
        self.target_reason = "a test"
        self._serve(machine_variant(TARGET))

    def _load(self, spec: KernelSpec) -> Callable[..., Any]:
        if self.variant.owner(spec) is not self.variant:
            return super()._load(spec)
        path = kernel_path(spec, self.variant)
        path = path.with_name(f"{path.stem}-evex.so")
        if not path.exists():
            publish(lambda made: _assemble(spec, made), path)
        return self._open(path)[self.variant.symbol(spec)]


def operator(attributes: dict[str, Any], **options: Any) -> GroupQueryAttention:
    """An operator of the target."""
    op = GroupQueryAttention(**attributes, **options)
    op._library = library()
    return op


_library: list[AvxVnniLibrary] = []


def library() -> AvxVnniLibrary:
    """The one library of the process."""
    if not _library:
        _library.append(AvxVnniLibrary())
    return _library[0]
