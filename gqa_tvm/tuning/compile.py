"""Candidates as shared objects: what MetaSchedule's builder processes run."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from ..kernels import KernelSpec
from ..lowering import compiler_target, generate_code, lower
from ..schedules.block_sizes import BlockSizes
from ..targets import Target
from ..toolchain import link_kernel


def build_candidate(
    spec: KernelSpec, target: Target, sizes: BlockSizes, mod: Any, _tvm_target: Any, _params: Any
) -> Any:
    """TVM runtime module of a scheduled module, by the passes that kernels are built with."""
    return generate_code(lower(mod, spec, target, sizes), compiler_target(spec, target, sizes))


def builder_function(spec: KernelSpec, target: Target, sizes: BlockSizes) -> Any:
    """`build_candidate` of a kernel as MetaSchedule calls it."""
    return partial(build_candidate, spec, target, sizes)


def export_candidate(module: Any, wanted: str) -> str:
    """Link a module for an architecture into a shared object in a folder of its own; returns its path."""
    folder = Path(tempfile.mkdtemp(prefix="gqa_tvm_tune_"))
    made = folder / "candidate.so"
    module.write_to_file(str(folder / "candidate.o"), "o")
    link_kernel(folder / "candidate.o", made, wanted)
    return str(made)
