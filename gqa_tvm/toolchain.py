"""The C compiler: shared objects of kernels, of the launcher and of whole libraries."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from .errors import BuildError
from .kernel_cache import launcher_path
from .targets import Target, architecture

_NATIVE = Path(__file__).parent / "native"
_C_FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-pthread")
# Names of symbols and debug information of the kernels are most of a library, and paths of this machine would be in it.
_LIBRARY_FLAGS = ("-Wl,-s", "-Wl,--gc-sections", "-Wl,--build-id=none", "-Wl,-z,noexecstack")


# Tables to unwind the stack through kernels, which raise nothing: 1.5 % of a library. It adds to the usual script.
_DISCARD_UNWINDING = "SECTIONS { /DISCARD/ : { *(.eh_frame) } } INSERT BEFORE .text;\n"


def require_build_tools(wanted: str, what: str = "kernels") -> None:
    """BuildError that says what to install where kernels for an architecture cannot be built. what: for the message."""
    missing = [] if find_spec("tvm") else ["apache-tvm (pip install 'gqa-tvm[build]')"]
    missing += [] if _find_compiler(wanted) else [_compiler_names(wanted)]
    if missing:
        raise BuildError(f"building {what} for {wanted} needs {' and '.join(missing)}")


def _find_compiler(wanted: str) -> str | None:
    """The C compiler: CC, gcc or cc for this machine's architecture, a cross compiler for another."""
    if wanted == architecture():
        return os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    return shutil.which(_cross_compiler(wanted))


def _cross_compiler(wanted: str) -> str:
    return f"{wanted.replace('x86-64', 'x86_64')}-linux-gnu-gcc"


def _compiler_names(wanted: str) -> str:
    names = "gcc or cc on PATH, or CC" if wanted == architecture() else f"{_cross_compiler(wanted)} on PATH"
    return f"a C compiler ({names})"


def _compile(wanted: str, arguments: Sequence[str]) -> None:
    import subprocess

    compiler = _find_compiler(wanted)
    if compiler is None:
        raise BuildError(f"linking kernels for {wanted} needs {_compiler_names(wanted)}")
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"the C compiler failed: {done.stderr.strip()}")


def publish(make: Callable[[Path], object], path: Path) -> None:
    """Let `make` write a file beside `path`, then move it there: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        make(made)
        os.replace(made, path)


def build_launcher() -> Path:
    """Compile the launcher unless it is there; returns its path."""
    path = launcher_path()
    if not path.exists():
        source = str(_NATIVE / "launcher.c")
        publish(lambda made: _compile(architecture(), [*_C_FLAGS, "-shared", source, "-o", str(made), "-ldl"]), path)
    return path


def link_kernel(object_file: Path, output: Path, wanted: str) -> None:
    """A shared object of one kernel, which uses the launcher of the process."""
    publish(lambda made: _compile(wanted, ["-shared", str(object_file), "-o", str(made), "-lm"]), output)


def link_library(objects: Sequence[Path], targets: Sequence[Target], output: Path) -> None:
    """A shared object of the kernels of several targets (best first) of one architecture, with a launcher.

    The same objects give the same bytes.
    """
    from tvm_ffi import libinfo

    includes = [
        f"-I{_NATIVE / 'include'}",
        f"-I{libinfo.find_include_path()}",
        f"-I{libinfo.find_dlpack_include_path()}",
    ]
    sources = [str(_NATIVE / name) for name in ("launcher.c", "library.c")]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "targets.c"
        table.write_text(_target_table(targets))
        script = Path(folder) / "discard.ld"
        script.write_text(_DISCARD_UNWINDING)
        inputs = [*sources, str(table), *map(str, objects)]
        arguments = [
            *_C_FLAGS,
            "-shared",
            *_LIBRARY_FLAGS,
            f"-Wl,-T,{script}",
            *includes,
            *inputs,
            "-o",
            str(output),
            "-lm",
            "-ldl",
        ]
        _compile(targets[0].architecture, arguments)


def _target_table(targets: Sequence[Target]) -> str:
    """C source of the table that library.c declares."""
    rows = [(target.name.replace("-", "_"), " ".join(sorted(target.features))) for target in targets]
    lines = [f"  {{{json.dumps(name)}, {json.dumps(features)}}}," for name, features in rows]
    declaration = '__attribute__((visibility("hidden"))) const char* const gqa_tvm_targets[][2] = {'
    return "\n".join([declaration, *lines, "  {0, 0},", "};", ""])
