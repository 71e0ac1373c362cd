"""Building kernels: one on demand, the usual ones ahead, or a library of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from .errors import InvalidArgument
from .kernel_cache import kernel_path, object_path
from .kernels import TOKEN_TILES, CacheFormat, FloatFormat, KernelSpec, Layout, decode_row_tile
from .kv_layout import layout_from
from .library_file import TargetKernels, append_manifest
from .object_cache import build_object
from .targets import (
    ARCHITECTURES,
    FALLBACKS,
    LIBRARY_TARGETS,
    architecture,
    best_target,
    find_target,
    usable_cores,
)
from .toolchain import build_launcher, link_kernel, link_library, publish, require_build_tools
from .tuned_sizes import SizesTable
from .variants import Variant, family_variant, machine_variant

USUAL_HEAD_SIZES = (64, 128)
USUAL_FORMATS: tuple[tuple[FloatFormat, CacheFormat], ...] = (("f32", "f32"), ("f32", "i8"), ("f32", "i4"))
USUAL_GROUP_SIZES = (1, 2, 3, 4, 7, 8)
LIBRARY_ROW_TILES = (1, 2, 4, 8)
# Of the target that runs everywhere and is the fastest nowhere.
LAST_RESORT_ROW_TILES = (1, 4)
_PACKED_OPERATIONS = ("append", "flash_prefill", "flash_decode")

Progress = Callable[[int, int, str], None]
Plan = dict[Variant, list[KernelSpec]]
# What a kernel takes to compile beside the others, for those that come first.
_EFFORT = {"flash_decode": 3, "flash_prefill": 2, "naive": 2}


def usual_kernels(
    variant: Variant,
    head_sizes: Iterable[int] = USUAL_HEAD_SIZES,
    formats: Iterable[tuple[FloatFormat, CacheFormat]] = USUAL_FORMATS,
    layout: Layout = "",
) -> list[KernelSpec]:
    """The kernels that `build` makes ahead for this machine: every step, fitted to common group sizes.

    formats: of the query and the cache; layout: one that quantised caches may have besides BNSH.
    """
    row_tiles = {decode_row_tile(1, group) for group in USUAL_GROUP_SIZES} | set(TOKEN_TILES)
    return _kernels(variant, head_sizes, formats, sorted(row_tiles), variant.sizes.default.small_q_blocks, layout)


def library_kernels(
    variant: Variant,
    head_sizes: Iterable[int] = USUAL_HEAD_SIZES,
    formats: Iterable[tuple[FloatFormat, CacheFormat]] = USUAL_FORMATS,
    layout: Layout = "",
) -> list[KernelSpec]:
    """The kernels of a library: every step for any group size, by tiles of few sizes (`FileLibrary.offered`)."""
    sizes, target = variant.sizes.default, variant.target
    is_last_resort = target.name == FALLBACKS[target.architecture][-1]
    tiles: tuple[int, ...] = LAST_RESORT_ROW_TILES if is_last_resort else LIBRARY_ROW_TILES
    # With as many rows as accumulators there is one key at a time: half of the rows twice is about as fast.
    tiles = tuple(rows for rows in tiles if 2 * rows <= sizes.decode_accumulators)
    # One small block of rows, where the usual one is more than twice as large.
    small = [rows for rows in sizes.small_q_blocks[-1:] if 2 * rows < sizes.q_block]
    return _kernels(variant, head_sizes, formats, tiles, small, layout)


def _kernels(
    variant: Variant,
    head_sizes: Iterable[int],
    formats: Iterable[tuple[FloatFormat, CacheFormat]],
    row_tiles: Iterable[int],
    small_q_blocks: Iterable[int],
    layout: Layout,
) -> list[KernelSpec]:
    specs = []
    for head_size, (query, cache) in product(head_sizes, formats):
        specs += [KernelSpec("append", query, cache, head_size), KernelSpec("naive", query, cache, head_size)]
        specs += [KernelSpec("flash_prefill", query, cache, head_size, rows) for rows in (0, *small_q_blocks)]
        specs += [KernelSpec("flash_decode", query, cache, head_size, rows) for rows in row_tiles]
    packed = [replace(spec, layout=layout) for spec in specs] if layout else []
    return specs + [spec for spec in packed if _is_offered(spec, variant)] + _with_tuned_sizes(specs, variant)


def _is_offered(spec: KernelSpec, variant: Variant) -> bool:
    """Whether there is such a kernel: over packed caches, of some targets, operations and sizes alone."""
    is_possible = spec.operation in _PACKED_OPERATIONS and not spec.is_float_cache
    return not spec.layout or (is_possible and variant.sizes.default.reads_packed(spec.cache_columns))


def _with_tuned_sizes(specs: Iterable[KernelSpec], variant: Variant) -> list[KernelSpec]:
    """The same kernels with other sizes that tuning has found for them."""
    known = set(specs)
    found = [spec for spec in variant.sizes.tuned_specs() if replace(spec, tuned="") in known]
    return sorted(found, key=lambda spec: spec.name)


def _offered(named: Sequence[KernelSpec], variant: Variant) -> list[KernelSpec]:
    return [spec for spec in named if _is_offered(spec, variant)]


def build_kernel(spec: KernelSpec, variant: Variant) -> Path:
    """Compile one kernel into the cache unless it is there; returns its path. Needs apache-tvm and a C compiler."""
    path = kernel_path(spec, variant)
    if not path.exists():
        require_build_tools(variant.target.architecture, spec.name)
        link_kernel(build_object(spec, variant), path, variant.target.architecture)
    return path


def build(
    target: str | Sequence[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    head_sizes: Iterable[int] = USUAL_HEAD_SIZES,
    progress: Progress | None = None,
    *,
    formats: Iterable[tuple[FloatFormat, CacheFormat]] = USUAL_FORMATS,
    kernels: Iterable[str] | None = None,
    kv_layout: str = "bnsh",
) -> list[Path]:
    """Build kernels on all cores: into the cache for this machine, or into one library.

    target: a target, several, or an architecture such as "x86-64" for all of its usual targets; None = the best for
    this CPU, with `output` the usual ones of this architecture. output: the `.so` to write, for `gqa_tvm.load` and
    GroupQueryAttention(library=...); it serves any CPU of its targets' families and has the same bytes wherever it is
    built. head_sizes, formats (of query and cache): what the usual kernels are built for; kv_layout: "packed" for the
    kernels of packed caches as well, for targets that have them; kernels: names of kernels to build instead. progress:
    called with (done, total, kernel name). Kernels that are there are not built again. Returns the kernels' paths, or
    the library's alone. Raises BuildError, InvalidArgument.
    """
    names, wanted = _targets(target, output is not None)
    require_build_tools(wanted)
    sizes, pairs, layout = list(head_sizes), list(formats), layout_from(kv_layout)
    named = None if kernels is None else [KernelSpec.parse(name) for name in kernels]
    choose = usual_kernels if output is None else library_kernels
    plan = {
        variant: choose(variant, sizes, pairs, layout) if named is None else _offered(named, variant)
        for variant in [machine_variant(name) if output is None else family_variant(name, wanted) for name in names]
    }
    for spec in named or ():
        if not any(spec in specs for specs in plan.values()):
            raise InvalidArgument(f"{spec.name}: none of the targets {', '.join(names)} has such a kernel")
    if output is not None:
        objects = _build_all(build_object, object_path, plan, progress)
        publish(lambda made: _write_library(made, objects, plan), Path(output).absolute())
        return [Path(output)]
    build_launcher()
    return _build_all(build_kernel, kernel_path, plan, progress)


def _build_all(
    make: Callable[[KernelSpec, Variant], Path],
    place: Callable[[KernelSpec, Variant], Path],
    plan: Plan,
    progress: Progress | None,
) -> list[Path]:
    """Make the files of a plan that are missing, each once; returns the paths of all."""
    # Targets share kernels: what decides is the path.
    wanted = {place(spec, variant): (spec, variant) for variant, specs in plan.items() for spec in specs}
    missing = [job for path, job in wanted.items() if not path.exists()]
    # The longest first, so that no core is left alone with one at the end.
    missing.sort(key=lambda job: (_EFFORT.get(job[0].operation, 1), job[0].head_size), reverse=True)
    done = len(wanted) - len(missing)
    report = progress or (lambda done, total, name: None)
    report(done, len(wanted), "")
    for name in _run(make, missing):
        done += 1
        report(done, len(wanted), name)
    return list(wanted)


def _run(make: Callable[[KernelSpec, Variant], Path], jobs: Sequence[tuple[KernelSpec, Variant]]) -> Iterator[str]:
    """Run jobs on all cores; gives the name of each kernel when it is done. The first error ends the rest."""
    if not jobs:
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    # Fresh interpreters: TVM holds threads and locks that a fork would copy in any state.
    with ProcessPoolExecutor(min(usable_cores(), len(jobs)), get_context("spawn"), _end_with_parent) as pool:
        futures = {pool.submit(make, *job): job[0].name for job in jobs}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """Have this process ended with the one that started it, which would otherwise compile on for nobody."""
    import ctypes
    import signal

    ends_with_parent = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(ends_with_parent, signal.SIGTERM)


def _write_library(output: Path, objects: Sequence[Path], plan: Plan) -> None:
    targets = [variant.target for variant in plan]
    link_library(sorted(objects, key=lambda path: (path.parent.name, path.name)), targets, output)
    manifest = {
        variant.target.name: TargetKernels(
            _sizes_of(specs, variant).as_dict(), {spec.name: variant.symbol(spec) for spec in specs}
        )
        for variant, specs in plan.items()
    }
    append_manifest(output, targets[0].architecture, manifest)


def _sizes_of(specs: Iterable[KernelSpec], variant: Variant) -> SizesTable:
    """The variant's sizes without records of kernels that a library lacks: the operator asks for what records name."""
    known = set(specs)
    records = [record for record in variant.sizes.records if variant.sizes.kernel_of(record) in known]
    return SizesTable(variant.sizes.default, records)


def _targets(target: str | Sequence[str] | None, for_library: bool) -> tuple[list[str], str]:
    """The targets to build, best first, and their architecture."""
    if target is None:
        target = architecture() if for_library else best_target()
    asked = (target,) if isinstance(target, str) else target
    target = [name for item in asked for name in LIBRARY_TARGETS.get(item, (item,))]
    for name in target:
        find_target(name)
    for wanted in (architecture(), *ARCHITECTURES):
        if target and set(target) <= set(FALLBACKS.get(wanted, ())):
            return [name for name in FALLBACKS[wanted] if name in target], wanted
    raise InvalidArgument(f"targets of one library must be of one architecture, got {', '.join(target)}")
