"""Loading kernels: numpy and apache-tvm-ffi only, never the compiler (which is asked for a missing kernel at most)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from threading import Lock, local
from typing import Any

import tvm_ffi

from .kernel_cache import kernel_path, launcher_path
from .kernels import KernelSpec
from .targets import best_target, require_runnable

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
        if target is None:
            target = best_target()
        else:
            require_runnable(target)
        self.target = target
        self._functions: dict[KernelSpec, Callable[..., Any]] = {}
        self._modules: list[Any] = []

    def kernel(self, spec: KernelSpec) -> Callable[..., Any]:
        """The callable of a kernel. Raises BuildError when it is neither built nor buildable here."""
        function = self._functions.get(spec)
        return function if function is not None else self._load(spec)

    def _load(self, spec: KernelSpec) -> Callable[..., Any]:
        path = kernel_path(spec, self.target)
        if not path.exists():
            from .build import build_kernel

            build_kernel(spec, self.target)
        services = launcher()
        with _lock:
            module = tvm_ffi.load_module(str(path))
            services.install(path)
            self._modules.append(module)
            self._functions[spec] = module[spec.name]
        return self._functions[spec]


_libraries: dict[str | None, KernelLibrary] = {}


def library_for(target: str | None) -> KernelLibrary:
    """The shared library object of a target (None = best for this CPU)."""
    key = target or best_target()
    with _lock:
        if key not in _libraries:
            _libraries[key] = KernelLibrary(key)
    return _libraries[key]
