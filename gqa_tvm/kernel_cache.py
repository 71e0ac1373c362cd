"""Where compiled kernels live on disk, and what makes one stale."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from .kernels import KernelSpec
from .targets import architecture
from .variants import Variant

_PACKAGE = Path(__file__).parent
_CODE_FOLDERS = ("definitions", "loops", "passes")
_CODE_FILES = ("kernels.py", "kernel_arguments.py", "lowering.py", "targets.py", "variants.py")


def cache_directory() -> Path:
    """GQA_TVM_CACHE, else gqa_tvm in the user's cache directory."""
    own = os.environ.get("GQA_TVM_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gqa_tvm"


def version(package: str) -> str:
    """Of an installed distribution, "absent" if it is not."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _hash_files(files: Iterable[Path], *extra: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda p: (p.parent.name, p.name)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(" ".join(extra).encode())
    return digest.hexdigest()[:16]


def _sources(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in {".py", ".c", ".h"}]


@lru_cache(maxsize=1)
def build_stamp() -> str:
    """Hash of everything a kernel's code depends on: our sources and the compiler's version."""
    schedules = find_spec(f"{__package__}.schedules")
    if schedules is None or schedules.origin is None:
        raise RuntimeError("the installation is incomplete: gqa_tvm.schedules is missing")
    folders = [*(_PACKAGE / name for name in _CODE_FOLDERS), Path(schedules.origin).parent]
    files = [_PACKAGE / name for name in _CODE_FILES]
    files += [path for folder in folders for path in _sources(folder)]
    return _hash_files(files, version("apache-tvm-ffi"))


@lru_cache(maxsize=1)
def launcher_stamp() -> str:
    """Hash of the launcher's sources."""
    return _hash_files(_sources(_PACKAGE / "native"))


@lru_cache(maxsize=1)
def library_stamp() -> str:
    """What a library of many kernels must have been built from to be loaded: kernels and launcher as they are here."""
    return _hash_files([], build_stamp(), launcher_stamp())


def kernel_directory(variant: Variant) -> Path:
    """Folder of a variant's own kernels, as today's sources and its default block sizes make them."""
    target, sizes = variant.target, variant.sizes.default
    return cache_directory() / "kernels" / build_stamp() / target.architecture / f"{target.name}-{sizes.digest()}"


def kernel_path(spec: KernelSpec, variant: Variant) -> Path:
    """The shared object of one kernel, in the folder of the variant whose code it is."""
    return kernel_directory(variant.owner(spec)) / f"{spec.name}.so"


def object_path(spec: KernelSpec, variant: Variant) -> Path:
    """The object file of one kernel, beside its shared object."""
    return kernel_path(spec, variant).with_suffix(".o")


def shared_object_path(digest: str) -> Path:
    """The object file of lowered code, whatever sources it came from."""
    return cache_directory() / "objects" / f"{digest}.o"


def prebuilt_path() -> Path:
    """The library that an installed wheel brings for this machine; a source tree has none."""
    return _PACKAGE / "prebuilt" / f"libgqa-{architecture()}.so"


def launcher_path() -> Path:
    """The shared object of the thread pool and scratch allocator that all kernels of a process share."""
    return cache_directory() / "launcher" / f"{launcher_stamp()}.so"
