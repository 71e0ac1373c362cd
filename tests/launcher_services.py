"""The launcher called from Python, and small kernels linked with it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import gqa_tvm

GCC = shutil.which("gcc") or "gcc"
LAUNCHER = Path(gqa_tvm.__file__).parent / "native" / "launcher.c"
MIB = 1 << 20


class Env(ctypes.Structure):
    _fields_ = (("sync_handle", ctypes.c_void_p), ("num_task", ctypes.c_int32))


Task = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(Env), ctypes.c_void_p)
Launch = ctypes.CFUNCTYPE(ctypes.c_int, Task, ctypes.c_void_p, ctypes.c_int)
Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
Free = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)


class Services:
    """The launcher's entry points in the library at `path`, callable from Python."""

    def __init__(self, path: Path) -> None:
        self.library = library = ctypes.CDLL(str(path))
        hooks = (ctypes.c_void_p * 3)()
        library.gqa_tvm_hooks(hooks)
        launch, allocate, free = (hook or 0 for hook in hooks)
        self.launch, self._allocate, self._free = Launch(launch), Allocate(allocate), Free(free)
        self.set_num_threads = library.gqa_tvm_set_num_threads
        self.get_num_threads = library.gqa_tvm_get_num_threads
        self.workspace_bytes = library.gqa_tvm_workspace_bytes
        self.workspace_bytes.restype = ctypes.c_int64

    def allocate(self, size: int) -> int | None:
        return self._allocate(1, 0, size, 2, 32)

    def free(self, address: int | None) -> None:
        assert self._free(1, 0, address) == 0


def compile_kernels(folder: Path) -> Path:
    """An object file with `rows` (scratch in and around a parallel loop) and `greedy` (scratch of any size)."""
    import tvm
    from tvm.script import tirx as T

    @T.prim_func(s_tir=True)
    def rows(x: T.handle, y: T.handle, k: T.int32):
        T.func_attr({"global_symbol": "rows"})
        m = T.int64()
        X = T.match_buffer(x, (m,), "float32", align=4)
        Y = T.match_buffer(y, (m,), "float32", align=4)
        doubled = T.alloc_buffer((m,), "float32")
        for i in range(m):
            doubled[i] = X[i] * T.float32(2)
        for i in T.parallel(m):
            powers = T.alloc_buffer((2000,), "float32")
            powers[0] = T.float32(1)
            for j in range(k):
                powers[j + 1] = powers[j] * T.float32(0.5) + doubled[i]
            Y[i] = powers[k]

    @T.prim_func(s_tir=True)
    def greedy(x: T.handle, n: T.int64):
        T.func_attr({"global_symbol": "greedy"})
        m = T.int64()
        X = T.match_buffer(x, (m,), "float32", align=4)
        kept = T.alloc_buffer((m,), "float32")
        for i in range(m):
            kept[i] = X[i]
        for i in T.parallel(m):
            scratch = T.alloc_buffer((n,), "float32")
            scratch[0] = kept[i]
            scratch[n - T.int64(1)] = T.float32(1)
            X[i] = scratch[0]

    module = tvm.IRModule({"rows": rows, "greedy": greedy})
    built = tvm.compile(module, target={"kind": "llvm"})
    built.mod.write_to_file(str(folder / "kernels.o"), "o")
    return folder / "kernels.o"


def link(folder: Path, name: str, *sources: Path) -> Path:
    """A shared library of objects and C sources."""
    path = folder / name
    files = [str(source) for source in sources]
    flags = ["-O2", "-std=gnu11", "-fPIC", "-pthread", "-shared"]
    subprocess.run([GCC, *flags, *files, "-o", str(path), "-ldl"], check=True)
    return path
