"""The process's launcher: thread pool, scratch allocator and knowledge of the CPU, shared by all kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path
from threading import RLock
from typing import Any

from .kernel_cache import launcher_path
from .targets import confirm_features

_HOOKS = ("__TVMBackendParallelLaunch", "__TVMBackendAllocWorkspace", "__TVMBackendFreeWorkspace")
# Held while shared objects are loaded and bound to the launcher.
LOADING = RLock()


class Launcher:
    """The launcher in a shared object, which is the launcher alone or a library that has it linked in."""

    def __init__(self, path: Path) -> None:
        # Its functions must be there when the launcher's weak references to them are bound.
        import tvm_ffi  # noqa: F401

        library = ctypes.CDLL(str(path))
        self._hooks = (ctypes.c_void_p * len(_HOOKS))()
        library.gqa_tvm_hooks(self._hooks)
        self._set_num_threads = library.gqa_tvm_set_num_threads
        self._workspace_bytes = library.gqa_tvm_workspace_bytes
        self._workspace_bytes.restype = ctypes.c_int64
        # With the interpreter's lock, which these two need.
        python = ctypes.PyDLL(str(path))
        self._calls, self._read_array = python.gqa_tvm_calls, python.gqa_tvm_read_array
        self._calls.restype, self._calls.argtypes = ctypes.py_object, (ctypes.c_int, ctypes.py_object)
        self._read_array.argtypes = (ctypes.py_object, ctypes.c_void_p)
        confirm_features(lambda name: bool(library.gqa_tvm_cpu_has(name.encode())))

    def install(self, path: Path) -> None:
        """Make the kernels in a shared object call this launcher, and not one of their own."""
        library = ctypes.CDLL(str(path))
        if hasattr(library, "gqa_tvm_use_hooks"):
            library.gqa_tvm_use_hooks(self._hooks)
            return
        for name, address in zip(_HOOKS, self._hooks, strict=True):
            try:
                ctypes.c_void_p.in_dll(library, name).value = address
            except ValueError:  # a kernel that needs no such service does not declare the pointer
                continue

    def use_threads(self, count: int) -> None:
        """Threads of the calling thread's next launches; 0 = all cores this process may use."""
        self._set_num_threads(count)

    def remembered_calls(self, num_threads: int, names: tuple[Any, ...]) -> tuple[Any, Any]:
        """New (run, remember) of native/remember.h, which explains `names`."""
        run, remember = self._calls(num_threads, names)
        return run, remember

    def read_array(self, array: Any) -> tuple[int, ...]:
        """What the launcher reads of a NumPy array of one axis at least: see gqa_tvm_read_array."""
        seen = (ctypes.c_int64 * 7)()
        self._read_array(array, seen)
        return tuple(seen)

    def workspace_bytes(self) -> int:
        """Scratch memory that the kernels of all threads hold at present."""
        return int(self._workspace_bytes())


_launcher: Launcher | None = None


def launcher(provider: Path | None = None) -> Launcher:
    """The process's launcher: of the first library that is loaded, else one by itself, built if it is not there.

    provider: a library that brings one, if the process has none yet. Raises BuildError, OSError.
    """
    global _launcher
    if _launcher is None:
        with LOADING:
            if _launcher is None:
                path = provider or launcher_path()
                if provider is None and not path.exists():
                    from .toolchain import build_launcher

                    path = build_launcher()
                _launcher = Launcher(path)
    return _launcher
