"""Candidates as shared objects: what MetaSchedule's builder processes run."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from ..build import _link
from ..lowering import generate_code, lower
from ..targets import Target


def build_candidate(target: Target, reuse_storage: bool, mod: Any, _tvm_target: Any, _params: Any) -> Any:
    """TVM runtime module of a scheduled module, by the passes that kernels are built with."""
    return generate_code(lower(mod, target, reuse_storage), target)


def builder_function(target: Target, reuse_storage: bool) -> Any:
    """`build_candidate` of a target as MetaSchedule calls it."""
    return partial(build_candidate, target, reuse_storage)


def export_candidate(module: Any) -> str:
    """Link a module into a shared object in a folder of its own; returns its path."""
    folder = Path(tempfile.mkdtemp(prefix="gqa_tvm_tune_"))
    made = folder / "candidate.so"
    module.write_to_file(str(folder / "candidate.o"), "o")
    _link([folder / "candidate.o"], made)
    return str(made)
