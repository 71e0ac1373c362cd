"""Loading kernels: numpy and apache-tvm-ffi only, never the compiler (which is asked for a missing kernel at most)."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock, local
from typing import Any

import tvm_ffi

from .errors import BuildError
from .kernel_cache import build_stamp, kernel_path, launcher_path, manifest_path
from .kernels import KernelSpec
from .targets import best_target, require_runnable
from .tuned_sizes import SizesTable
from .variants import machine_variant

_HOOKS = ("__TVMBackendParallelLaunch", "__TVMBackendAllocWorkspace", "__TVMBackendFreeWorkspace")


class Launcher:
    """The thread pool and scratch allocator of the process, shared by all kernel libraries."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        hooks = (ctypes.c_void_p * len(_HOOKS))()
        self._library.gqa_tvm_hooks(hooks)
        self._hooks = tuple(hooks)
        self._set_num_threads = self._library.gqa_tvm_set_num_threads
        self._current = local()

    def install(self, path: Path) -> None:
        """Make the kernel library at `path`, which is loaded already, call this launcher."""
        library = ctypes.CDLL(str(path))
        for name, address in zip(_HOOKS, self._hooks, strict=True):
            try:
                ctypes.c_void_p.in_dll(library, name).value = address
            except ValueError:  # a kernel that needs no such service does not declare the pointer
                continue

    def use_threads(self, count: int) -> None:
        """Threads of the calling thread's next launches; 0 = all cores this process may use."""
        if getattr(self._current, "count", None) != count:
            self._set_num_threads(count)
            self._current.count = count


_launcher: Launcher | None = None
_lock = Lock()


def launcher() -> Launcher:
    """The process's launcher, built on first use if it is not there."""
    global _launcher
    if _launcher is None:
        with _lock:
            if _launcher is None:
                path = launcher_path()
                if not path.exists():
                    from .build import build_launcher

                    path = build_launcher()
                _launcher = Launcher(path)
    return _launcher


class KernelLibrary:
    """The kernels of one target; a kernel is loaded, and built if it must be, when it is first asked for."""

    def __init__(self, target: str | None = None) -> None:
        self.target_reason = "asked for" if target else "the best for this CPU"
        if target is None:
            target = best_target()
        else:
            require_runnable(target)
        self.target = target
        self.variant = machine_variant(target)
        self._functions: dict[KernelSpec, Callable[..., Any]] = {}
        self._modules: list[Any] = []

    @property
    def sizes(self) -> SizesTable:
        """Block sizes of the kernels."""
        return self.variant.sizes

    def kernel(self, spec: KernelSpec) -> Callable[..., Any]:
        """The callable of a kernel. Raises BuildError when it is neither built nor buildable here."""
        function = self._functions.get(spec)
        return function if function is not None else self._load(spec)

    def _load(self, spec: KernelSpec) -> Callable[..., Any]:
        path = kernel_path(spec, self.variant)
        if not path.exists():
            from .build import build_kernel

            build_kernel(spec, self.variant)
        self._load_file(path, [spec])
        return self._functions[spec]

    def _load_file(self, path: Path, specs: list[KernelSpec]) -> None:
        services = launcher()
        with _lock:
            module = tvm_ffi.load_module(str(path))
            services.install(path)
            self._modules.append(module)
            self._functions.update({spec: module[self.variant.symbol(spec)] for spec in specs})


def load(path: str | os.PathLike[str]) -> KernelLibrary:
    """The kernels of a library that `gqa_tvm.build(target, output)` made; others come from the cache as usual.

    Raises BuildError for a file without a readable manifest, one of another version of this package, or a target that
    this CPU cannot run.
    """
    file = Path(path).resolve()
    try:
        manifest = json.loads(manifest_path(file).read_text())
        stamp, target, size = manifest["stamp"], manifest["target"], manifest["bytes"]
        specs = [KernelSpec.parse(name) for name in manifest["kernels"]]
        found = file.stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{file} is no kernel library: its manifest {manifest_path(file).name}: {error}") from error
    if stamp != build_stamp():
        raise BuildError(f"{file} was built from other sources: its stamp is {stamp}, wanted {build_stamp()}")
    # The system's loader maps a truncated file without complaint and dies on the first missing page.
    if found != size:
        raise BuildError(f"{file} is damaged: {found} bytes, wanted {size}")
    try:
        library = KernelLibrary(target)
        library._load_file(file, specs)
    except (ValueError, RuntimeError, OSError, AttributeError) as error:
        raise BuildError(f"{file} cannot be loaded: {error}") from error
    return library


_libraries: dict[str, KernelLibrary] = {}


def library_for(target: str | None, path: str | None = None) -> KernelLibrary:
    """The library object that operators share: of a file, or of a target (None = best for this CPU)."""
    key = str(Path(path).resolve()) if path is not None else target or best_target()
    if key not in _libraries:
        library = KernelLibrary(key) if path is None else load(path)
        _libraries.setdefault(key, library)
    return _libraries[key]
