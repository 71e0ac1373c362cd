"""Building kernels: one on demand, or the usual ones ahead."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from threading import Lock

from .errors import BuildError
from .kernel_cache import build_stamp, kernel_path, launcher_path, manifest_path
from .kernels import TOKEN_TILES, CacheFormat, KernelSpec, decode_row_tile
from .targets import best_target, usable_cores
from .variants import Variant, machine_variant

USUAL_HEAD_SIZES = (64, 128)
USUAL_CACHES: tuple[CacheFormat, ...] = ("f32", "i8", "i4")
USUAL_GROUP_SIZES = (1, 2, 3, 4, 7, 8)

_NATIVE = Path(__file__).parent / "native"
# TVM's builder keeps global state: one kernel at a time in a process.
_BUILD_LOCK = Lock()


def usual_kernels(variant: Variant, head_sizes: Iterable[int] = USUAL_HEAD_SIZES) -> list[KernelSpec]:
    """The kernels that `build` makes ahead: every step of a float32 query at common head sizes and group sizes."""
    specs = []
    row_tiles = sorted({decode_row_tile(1, group) for group in USUAL_GROUP_SIZES} | set(TOKEN_TILES))
    row_blocks = (0, *variant.sizes.default.small_q_blocks)
    for head_size in head_sizes:
        for cache in USUAL_CACHES:
            specs += [
                KernelSpec("append", "f32", cache, head_size),
                KernelSpec("naive", "f32", cache, head_size),
            ]
            specs += [KernelSpec("flash_prefill", "f32", cache, head_size, rows) for rows in row_blocks]
            specs += [KernelSpec("flash_decode", "f32", cache, head_size, rows) for rows in row_tiles]
    return specs


def _compiler() -> str:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise BuildError("building a kernel needs a C compiler (gcc or cc on PATH, or CC) to link it")
    return compiler


def _run_compiler(arguments: list[str]) -> None:
    done = subprocess.run([_compiler(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"the C compiler failed: {done.stderr.strip()}")


def _publish(make: Callable[[Path], None], path: Path) -> None:
    """Let `make` write a file beside `path`, then move it there: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        make(made)
        os.replace(made, path)


def _object_path(kernel: Path) -> Path:
    return kernel.with_suffix(".o")


def _link(objects: list[Path], output: Path) -> None:
    _run_compiler(["-shared", *map(str, objects), "-o", str(output), "-lm"])


def build_launcher() -> Path:
    """Compile the launcher unless it is there; returns its path."""
    path = launcher_path()
    if not path.exists():
        source = str(_NATIVE / "launcher.c")
        flags = ["-O2", "-std=gnu11", "-fPIC", "-shared", "-pthread"]
        _publish(lambda made: _run_compiler([*flags, source, "-o", str(made), "-ldl"]), path)
    return path


def build_kernel(spec: KernelSpec, variant: Variant) -> Path:
    """Compile one kernel into the cache unless it is there; returns its path. Needs apache-tvm and a C compiler."""
    path = kernel_path(spec, variant)
    with _BUILD_LOCK:
        if not path.exists():
            try:
                from .lowering import compile_kernel
            except ImportError as error:
                raise BuildError(
                    f"kernel {spec.name} is not built for {variant.target.name} and apache-tvm, which builds it, "
                    f"is missing: pip install 'gqa_tvm[build]' ({error})"
                ) from error
            module = compile_kernel(spec, variant)

            _publish(lambda made: module.write_to_file(str(made), "o"), _object_path(path))
            _publish(lambda made: _link([_object_path(path)], made), path)
    return path


def build(
    target: str | None = None,
    output: str | os.PathLike[str] | None = None,
    head_sizes: Iterable[int] = USUAL_HEAD_SIZES,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Path]:
    """Build the usual kernels of `target` (default: the best for this CPU) into the cache, on all cores.

    output: also link them into this one `.so`, with a manifest beside it, for GroupQueryAttention(library=...).
    progress: called with (done, total, kernel name). Kernels that are already there are not built again.
    Returns the kernels' paths. Raises BuildError.
    """
    variant = machine_variant(target or best_target())
    specs = usual_kernels(variant, head_sizes)
    build_launcher()
    missing = [spec for spec in specs if not kernel_path(spec, variant).exists()]
    done = len(specs) - len(missing)
    if missing:
        # Fresh interpreters: TVM holds threads and locks that a fork would copy in any state.
        with ProcessPoolExecutor(min(usable_cores(), len(missing)), get_context("spawn")) as pool:
            futures = {pool.submit(build_kernel, spec, variant): spec for spec in missing}
            for future in as_completed(futures):
                future.result()
                done += 1
                if progress is not None:
                    progress(done, len(specs), futures[future].name)
    if output is not None:
        _build_library(specs, variant, Path(output))
    return [kernel_path(spec, variant) for spec in specs]


def _build_library(specs: list[KernelSpec], variant: Variant, output: Path) -> None:
    objects = [_object_path(kernel_path(spec, variant)) for spec in specs]
    _publish(lambda made: _link(objects, made), output)
    names = [spec.name for spec in specs]
    manifest = {"stamp": build_stamp(), "target": variant.target.name, "bytes": output.stat().st_size, "kernels": names}
    _publish(lambda made: _write_json(made, manifest), manifest_path(output))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
