"""Where compiled kernels live on disk, and what makes one stale."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from .kernels import KernelSpec

_CODE_FOLDERS = ("definitions", "loops", "native")
_CODE_FILES = ("kernels.py", "kernel_arguments.py", "lowering.py", "targets.py")


def cache_directory() -> Path:
    """GQA_TVM_CACHE, else gqa_tvm in the user's cache directory."""
    own = os.environ.get("GQA_TVM_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gqa_tvm"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


@lru_cache(maxsize=1)
def build_stamp() -> str:
    """Hash of everything a kernel's code depends on: our sources and the compiler's version."""
    package = Path(__file__).parent
    schedules = find_spec(f"{__package__}.schedules")
    if schedules is None or schedules.origin is None:
        raise RuntimeError("the installation is incomplete: gqa_tvm.schedules is missing")
    folders = [package / name for name in _CODE_FOLDERS] + [Path(schedules.origin).parent]
    files = [package / name for name in _CODE_FILES]
    files += [path for folder in folders for path in folder.iterdir() if path.suffix in {".py", ".c", ".h"}]
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda p: (p.parent.name, p.name)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(f"{_version('apache-tvm')} {_version('apache-tvm-ffi')}".encode())
    return digest.hexdigest()[:16]


def kernel_directory(target: str) -> Path:
    """Folder of the current kernels of a target."""
    return cache_directory() / "kernels" / build_stamp() / target


def kernel_path(spec: KernelSpec, target: str) -> Path:
    """The shared object of one kernel."""
    return kernel_directory(target) / f"{spec.name}.so"


def launcher_path() -> Path:
    """The shared object of the thread pool and scratch allocator that all kernels of a process share."""
    return cache_directory() / "kernels" / build_stamp() / "launcher.so"
