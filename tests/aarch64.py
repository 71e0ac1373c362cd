"""AArch64 kernels on this machine: cross-compiled, run by a C program under qemu, called with the operator's arguments.

`Machine` is the emulated process, `AArch64Library` stands in for the operator's kernel library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from operator_calls import copies

import gqa_tvm
from gqa_tvm.kernel_cache import kernel_path
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.variants import Variant, family_variant

GCC = shutil.which("aarch64-linux-gnu-gcc")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
SYSTEM_ROOT = "/usr/aarch64-linux-gnu"
# CPUs with what a target needs and little more, so that a wrong instruction is an illegal one.
CPUS = {"generic": "cortex-a53", "arm64-neon": "cortex-a53", "arm64-neon-dotprod": "neoverse-n1"}
NATIVE = Path(__file__).parent / "native"
LAUNCHER = Path(gqa_tvm.__file__).parent / "native" / "launcher.c"

needs_aarch64 = pytest.mark.skipif(
    GCC is None or QEMU is None,
    reason="needs qemu-aarch64 and aarch64-linux-gnu-gcc (packages qemu-user-static, gcc-aarch64-linux-gnu)",
)

_MOST_AXES = 8
_INT, _FLOAT, _TENSOR = 1, 3, 7
_CODES = {"i": 0, "u": 1, "f": 2}
# As `Argument` in native/kernel_server.c.
_ARGUMENT = np.dtype(
    [
        *(("kind", "<i4"), ("axes", "<i4"), ("integer", "<i8"), ("number", "<f8"), ("code", "<i4"), ("bits", "<i4")),
        *((name, "<i8", (_MOST_AXES,)) for name in ("shape", "strides")),
    ]
)


def compile_program(output: Path, *sources: Path) -> Path:
    """An AArch64 program of C sources; kernel libraries that it loads see its functions."""
    assert GCC is not None
    includes = f"-I{tvm_ffi.libinfo.find_include_path()}"
    flags = ["-O2", "-std=gnu11", "-Wall", "-Werror", "-pthread", "-rdynamic", includes]
    files = [str(source) for source in sources]
    subprocess.run([GCC, *flags, *files, "-o", str(output), "-ldl"], check=True, capture_output=True, text=True)
    return output


def emulate(target: str, program: Path, *arguments: str) -> list[str]:
    """The command that runs a program on a CPU of the target's family."""
    assert QEMU is not None
    return [QEMU, "-cpu", CPUS[target], "-L", SYSTEM_ROOT, str(program), *arguments]


def build_kernel(spec: KernelSpec, variant: Variant) -> Path:
    """Cross-compile a kernel into the cache unless it is there; returns the path of its `.so`."""
    path = kernel_path(spec, variant).with_suffix(".aarch64.so")
    if not path.exists():
        from gqa_tvm.lowering import compile_kernel

        path.parent.mkdir(parents=True, exist_ok=True)
        module = compile_kernel(spec, variant)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            module.write_to_file(str(made.with_suffix(".o")), "o")
            subprocess.run([str(GCC), "-shared", str(made.with_suffix(".o")), "-o", str(made), "-lm"], check=True)
            os.replace(made, path)
    return path


class Machine:
    """A process on an emulated CPU of a target; `threads`: that kernels run with."""

    def __init__(self, target: str, program: Path, threads: int = 2) -> None:
        self.threads = threads
        self._process = subprocess.Popen(emulate(target, program), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def call(self, library: Path, symbol: str, arguments: tuple[Any, ...]) -> None:
        """Run a kernel; arrays are changed as it changes them. RuntimeError with the text of its error."""
        table = np.zeros(len(arguments), _ARGUMENT)
        arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
        for row, argument in zip(table, arguments, strict=True):
            _describe(row, argument)
        blocks = [str(library).encode(), symbol.encode(), table.tobytes(), *(_memory(a).tobytes() for a in arrays)]
        assert self._process.stdin is not None
        self._process.stdin.write(self.threads.to_bytes(8, "little"))
        for block in blocks:
            self._process.stdin.write(len(block).to_bytes(8, "little") + block)
        self._process.stdin.flush()
        error = self._take_block().decode()
        results = [self._take_block() for _ in arrays]
        if error:
            raise RuntimeError(error)
        for array, result in zip(arrays, results, strict=True):
            memory = _memory(array)
            changed = np.frombuffer(result, np.uint8)
            # Read-only arrays come back too: they have not changed.
            if not np.array_equal(memory, changed):
                memory[...] = changed

    def _take_block(self) -> bytes:
        assert self._process.stdout is not None
        length = self._process.stdout.read(8)
        if len(length) < 8:
            raise RuntimeError(f"the emulated process has died: {self._process.wait()}")
        return self._process.stdout.read(int.from_bytes(length, "little"))


def _describe(row: np.void, argument: Any) -> None:
    if isinstance(argument, np.ndarray):
        row["kind"], row["axes"] = _TENSOR, argument.ndim
        row["code"], row["bits"] = _CODES[argument.dtype.kind], 8 * argument.itemsize
        row["shape"][: argument.ndim] = argument.shape
        row["strides"][: argument.ndim] = [stride // argument.itemsize for stride in argument.strides]
    elif isinstance(argument, float | np.floating):
        row["kind"], row["number"] = _FLOAT, argument
    else:
        row["kind"], row["integer"] = _INT, argument


def _memory(array: np.ndarray) -> np.ndarray:
    """The bytes from an array's first element to its last, what lies between them included."""
    steps = zip(array.shape, array.strides, strict=True)
    size = array.itemsize + sum((extent - 1) * stride for extent, stride in steps) if array.size else 0
    first = array.reshape(-1)[:1] if array.flags.c_contiguous else array[(slice(0, 1),) * array.ndim]
    return np.lib.stride_tricks.as_strided(first.view(np.uint8).reshape(-1), (size,), (1,))


class AArch64Library:
    """Stands in for `runtime.KernelLibrary`: a target's kernels, run by a `Machine` of its own."""

    def __init__(self, target: str, server: Path) -> None:
        self.variant = family_variant(target, "aarch64")
        self.sizes, self.target, self.target_reason = self.variant.sizes, target, "emulated"
        self.machine = Machine(target, server)

    def __enter__(self) -> AArch64Library:
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.close()

    def offered(self, spec: KernelSpec, rows: int) -> KernelSpec:
        return spec

    def kernel(self, spec: KernelSpec) -> Callable[..., None]:
        path, symbol = build_kernel(spec, self.variant), f"__tvm_ffi_{self.variant.symbol(spec)}"
        return lambda *arguments: self.machine.call(path, symbol, arguments)


def run_on(library: AArch64Library, attributes: dict[str, Any], inputs: dict[str, Any], **options: Any) -> Any:
    """(result, plan) of the operator with a library's kernels, on copies of the inputs."""
    op = gqa_tvm.GroupQueryAttention(**attributes, **options)
    op._library = library  # type: ignore[assignment]
    return op(**copies(inputs)), op.last_plan
