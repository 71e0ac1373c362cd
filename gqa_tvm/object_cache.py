"""Object files of kernels, kept by the code they were made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from threading import Lock
from typing import Any

from .kernel_cache import object_path, shared_object_path, version
from .kernels import KernelSpec
from .toolchain import publish
from .variants import Variant

# TVM's builder keeps global state: one kernel at a time in a process.
_BUILD_LOCK = Lock()


def build_object(spec: KernelSpec, variant: Variant) -> Path:
    """The object file of a kernel: made by apache-tvm unless it is there for these sources or for the same code."""
    path = object_path(spec, variant)
    with _BUILD_LOCK:
        if not path.exists():
            _make_object(spec, variant, path)
    return path


def _make_object(spec: KernelSpec, variant: Variant, path: Path) -> None:
    from . import lowering

    owner = variant.owner(spec)
    target = lowering.compiler_target(spec, owner.target, owner.sizes.sizes(spec))
    lowered = lowering.lowered_module(spec, variant)
    shared = shared_object_path(_digest(lowered, target))
    if not shared.exists():
        module = lowering.generate_code(lowered, target)
        publish(lambda made: module.write_to_file(str(made), "o"), shared)
    publish(lambda made: _link_or_copy(shared, made), path)


def _digest(lowered: Any, target: dict[str, object]) -> str:
    """Of lowered code, what it is compiled for and what compiles it."""
    import tvm

    described = json.dumps([target, version("apache-tvm"), version("apache-tvm-ffi")], sort_keys=True)
    return hashlib.sha256((described + tvm.ir.save_json(lowered)).encode()).hexdigest()[:32]


def _link_or_copy(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, copy)
