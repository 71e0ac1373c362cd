"""The subcommands ``gqa-tvm build`` and ``gqa-tvm info``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli_arguments import name_list, positive_list

if TYPE_CHECKING:
    from .variants import Variant


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``build``."""
    from .build import USUAL_FORMATS, USUAL_HEAD_SIZES

    sizes, formats = ",".join(map(str, USUAL_HEAD_SIZES)), ",".join(map(":".join, USUAL_FORMATS))
    parser.add_argument(
        "--targets",
        type=name_list,
        metavar="NAME,...",
        help="targets, or an architecture for all of its targets (the best for this CPU; with -o: this architecture)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write this one library, for any CPU of the targets")
    parser.add_argument(
        "--head-sizes", type=positive_list, default=list(USUAL_HEAD_SIZES), metavar="H,...", help=f"({sizes})"
    )
    parser.add_argument(
        "--formats",
        type=_formats,
        default=USUAL_FORMATS,
        metavar="QUERY:CACHE,...",
        help=f"of query and cache: f32, f16, bf16 and for the cache i8, i4 ({formats})",
    )
    parser.add_argument(
        "--kv-layout",
        choices=("bnsh", "packed"),
        default="bnsh",
        help="packed: kernels of packed INT8 and INT4 caches as well (bnsh)",
    )
    parser.add_argument(
        "--kernels", type=name_list, metavar="NAME,...", help="these kernels instead of all of the sizes and formats"
    )


def _formats(text: str) -> list[tuple[str, ...]]:
    from .kernels import CACHE_FORMATS, FLOAT_FORMATS

    pairs = [tuple(pair.split(":")) for pair in name_list(text)]
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in FLOAT_FORMATS or pair[1] not in CACHE_FORMATS:
            raise argparse.ArgumentTypeError(f"must look like f32:i8,f16:i4, got {text!r}")
    return pairs


def build_with_progress(target: Any = None, output: str | None = None, **options: Any) -> list[Path]:
    """`gqa_tvm.build` with a progress bar on stderr."""
    from .build import build
    from .progress import ProgressBar

    with ProgressBar("building kernels", 1) as bar:

        def report(done: int, total: int, name: str) -> None:
            bar.total = total
            bar.advance(done - bar.done, f"built {name}" if name else None)

        paths = build(target, output, progress=report, **options)
        bar.advance(0, "kernels built")
    return paths


def build_command(options: argparse.Namespace) -> int:
    """Builds kernels into the cache or into a library."""
    targets = options.targets[0] if options.targets and len(options.targets) == 1 else options.targets
    chosen = {"head_sizes": options.head_sizes, "formats": options.formats, "kernels": options.kernels}
    chosen["kv_layout"] = options.kv_layout
    paths = build_with_progress(targets, options.output, **chosen)
    if options.output is None:
        print(f"{len(paths)} kernels in {', '.join(sorted({str(path.parent) for path in paths}))}")
    else:
        path = paths[0]
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
        print("\n".join(_library_lines(path)))
    return 0


def add_info_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``info``."""
    parser.add_argument("library", nargs="?", help="a library to describe (the installed one, and the cache)")


def info_command(options: argparse.Namespace) -> int:
    """Prints the target chosen for this CPU, its facts and the kernels on disk, or what a library holds."""
    from .kernel_cache import prebuilt_path

    if options.library is not None:
        print("\n".join(_library_lines(Path(options.library))))
        return 0
    _print_machine()
    if prebuilt_path().exists():
        print(f"installed library: {prebuilt_path()}")
        print("\n".join(_library_lines(prebuilt_path())))
    return 0


def _print_machine() -> None:
    from .errors import BuildError
    from .runtime import library_for
    from .targets import missing_features, own_chain

    reason = ""
    try:
        library = library_for(None)  # with it, the CPU itself is asked for its features
    except BuildError as error:
        library, reason = None, str(error)
    for target in own_chain():
        missing = ", ".join(sorted(missing_features(target)))
        print(f"{target:18} {'lacks ' + missing if missing else 'runs here'}")
    if library is None:
        print(f"no kernels: {reason}")
    else:
        print(f"chosen: {library.target} ({library.target_reason})")
        _print_variant(library.variant)


def _print_variant(variant: Variant) -> None:
    from dataclasses import asdict

    from .kernel_cache import kernel_directory
    from .targets import target_facts

    for name, value in {**asdict(target_facts(variant.target)), **variant.sizes.default.as_dict()}.items():
        print(f"  {name:20} {value}")
    print(f"tuned sizes: {variant.sizes.origins()}")
    directory = kernel_directory(variant)
    print(f"kernels: {len(list(directory.glob('*.so')))} in {directory}")


def _library_lines(path: Path) -> Iterable[str]:
    """What a library holds, target by target."""
    from .kernels import KernelSpec
    from .library_file import read_manifest

    manifest = read_manifest(path, to_run=False)
    versions = ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
    yield f"{manifest.architecture}, stamp {manifest.stamp}, built by {versions}"
    for name, target in manifest.targets.items():
        sizes = sorted({KernelSpec.parse(kernel).head_size for kernel in target.kernels})
        own = sum(symbol.endswith(f"__{name.replace('-', '_')}") for symbol in target.kernels.values())
        heads = ", ".join(map(str, sizes))
        yield f"  {name:18} {len(target.kernels)} kernels ({own} of its own) for head sizes {heads}"
