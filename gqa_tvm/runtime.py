"""Loading kernels: numpy and apache-tvm-ffi only, never the compiler (which is asked for a missing kernel at most)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import BuildError, InvalidArgument
from .kernel_cache import kernel_path, prebuilt_path
from .kernels import ROW_TILES, KernelSpec
from .launcher import LOADING, launcher
from .library_file import Manifest, read_manifest
from .targets import best_target, find_target, missing_features, own_chain, require_runnable
from .tuned_sizes import SizesTable
from .variants import Variant, family_variant, machine_variant

# Reading and converting the keys for a tile of rows takes about as long as the products of so many rows.
_DECODED_ROWS = 2


def forced_target() -> str | None:
    """GQA_TVM_TARGET, None where it is not set."""
    return os.environ.get("GQA_TVM_TARGET") or None


class KernelLibrary:
    """The kernels of one target; a kernel is loaded, and built if it must be, when it is first asked for.

    target_reason: why this target, in a line.
    """

    def __init__(self, target: str | None = None) -> None:
        launcher()  # it knows what the CPU can run
        if target is None:
            self.target_reason = _reason("the best for this CPU", target := best_target())
        else:
            require_runnable(target)
            self.target_reason = "asked for"
        self._serve(machine_variant(target))

    def _serve(self, variant: Variant) -> None:
        self.target = variant.target.name
        self.variant = variant
        self._functions: dict[KernelSpec, Callable[..., Any]] = {}
        self._addresses: dict[KernelSpec, int] = {}
        self._modules: list[Any] = []

    @property
    def sizes(self) -> SizesTable:
        """Block sizes of the kernels."""
        return self.variant.sizes

    def offered(self, spec: KernelSpec, rows: int) -> KernelSpec:
        """The kernel to run instead of `spec` for so many rows of a group: here it is `spec`."""
        return spec

    def kernel(self, spec: KernelSpec) -> Callable[..., Any]:
        """The callable of a kernel. Raises BuildError when it is neither built nor buildable here."""
        function = self._functions.get(spec)
        if function is None:
            function = self._functions[spec] = self._load(spec)
        return function

    def address(self, spec: KernelSpec) -> int:
        """The address of the C function of a kernel that `kernel` has given; it stays as long as this library."""
        return self._addresses[spec]

    def _load(self, spec: KernelSpec) -> Callable[..., Any]:
        path = kernel_path(spec, self.variant)
        if not path.exists():
            from .build import build_kernel

            build_kernel(spec, self.variant)
        return self._find(spec, self._open(path), path, self.variant.symbol(spec))

    def _find(self, spec: KernelSpec, module: Any, path: Path, symbol: str) -> Callable[..., Any]:
        function: Callable[..., Any] = module[symbol]
        address = ctypes.cast(ctypes.CDLL(str(path))[f"__tvm_ffi_{symbol}"], ctypes.c_void_p).value
        assert address is not None
        self._addresses[spec] = address
        return function

    def _open(self, path: Path) -> Any:
        """The module in a shared object, bound to the process's launcher."""
        import tvm_ffi

        services = launcher()
        with LOADING:
            module = tvm_ffi.load_module(str(path))
            services.install(path)
            self._modules.append(module)
        return module


class FileLibrary(KernelLibrary):
    """The kernels that a file of several targets holds of one of them; others come from the cache or are built."""

    def __init__(self, path: Path, manifest: Manifest, target: str | None = None) -> None:
        self._path, self._manifest = path, manifest
        self._choose(target)  # what the system lists is enough to refuse a file before its code is loaded
        launcher(path)
        wanted, self.target_reason = self._choose(target)
        found = manifest.targets[wanted]
        self._symbols = found.kernels
        self._serve(family_variant(wanted)._replace(sizes=found.table()))
        self._module = self._open(path)

    def _choose(self, asked: str | None) -> tuple[str, str]:
        """The target to run and why."""
        among = self._manifest.targets
        wanted, why = asked or forced_target(), "asked for" if asked else "forced by GQA_TVM_TARGET"
        if wanted is None:
            best = best_target(among)
            return best, _reason(f"the best of {len(among)} in {self._path.name} for this CPU", best, among)
        find_target(wanted)
        if wanted not in among:
            raise InvalidArgument(f"target {wanted}, {why}, is not in it; it has {', '.join(among)}")
        require_runnable(wanted)
        return wanted, f"{why}, one of {len(among)} in {self._path.name}"

    def offered(self, spec: KernelSpec, rows: int) -> KernelSpec:
        """The kernel of the file that takes so many rows with the least work: a library has tiles of few sizes."""
        if spec.name in self._symbols:
            return spec
        others = [other for tile in (0, *ROW_TILES) if (other := replace(spec, row_tile=tile)).name in self._symbols]
        if spec.operation == "flash_decode":
            work = {other: -(-rows // other.row_tile) * (other.row_tile + _DECODED_ROWS) for other in others}
            return min(others, key=work.__getitem__, default=spec)
        return others[0] if others else spec

    def _load(self, spec: KernelSpec) -> Callable[..., Any]:
        symbol = self._symbols.get(spec.name)
        if symbol is not None:
            return self._find(spec, self._module, self._path, symbol)
        try:
            return super()._load(spec)
        except BuildError as error:
            raise BuildError(
                f"{self._path.name} has no kernel {spec.name} (head size {spec.head_size}) for {self.target}; "
                f"it has {self._contents()}. {error}"
            ) from error

    def _contents(self) -> str:
        """Formats and head sizes of the kernels, for a message."""
        specs = [KernelSpec.parse(name) for name in self._symbols]
        sizes = ", ".join(map(str, sorted({spec.head_size for spec in specs})))
        formats = ", ".join(sorted({f"{spec.query}:{spec.cache}" for spec in specs}))
        return f"head sizes {sizes} with query:cache formats {formats}"


def _reason(why: str, chosen: str, among: Iterable[str] | None = None) -> str:
    """Why a target was chosen, and what the CPU lacks for the next better one."""
    if among is None and forced_target():
        return "forced by GQA_TVM_TARGET"
    chain = [name for name in own_chain() if among is None or name in among]
    better = chain[: chain.index(chosen)]
    if not better:
        return why
    missing = ", ".join(sorted(missing_features(better[-1])))
    return f"{why}: {better[-1]} needs {missing}, which it lacks"


def load(path: str | os.PathLike[str], target: str | None = None) -> KernelLibrary:
    """The kernels of a library that `gqa_tvm.build(..., output=path)` made, for the best of its targets for this CPU.

    target: one of the library's, None = GQA_TVM_TARGET or the best. Kernels that it lacks come from the cache or are
    built. Raises BuildError for a file that is damaged or no such library, for one of another architecture or version,
    and if none of its targets (or not the one asked for) runs on this CPU.
    """
    file = Path(path).resolve()
    manifest = read_manifest(file)
    try:
        return FileLibrary(file, manifest, target)
    except (ValueError, KeyError, TypeError, RuntimeError, OSError, AttributeError) as error:
        raise BuildError(f"{file} cannot be used: {error}") from error


def _installed_library(target: str | None) -> KernelLibrary:
    """The prebuilt library of the installed package, else the cache."""
    path = prebuilt_path()
    if not path.exists():
        return KernelLibrary(target)
    try:
        return load(path, target)
    except BuildError as refused:
        try:
            library = KernelLibrary(target)
        except BuildError as error:
            raise BuildError(f"{refused}. {error}") from error
        library.target_reason += f"; {refused}"
        return library


_libraries: dict[tuple[str | None, ...], KernelLibrary] = {}


def library_for(target: str | None, path: str | None = None) -> KernelLibrary:
    """The library object that operators share: of a file, or the installed one for a target (None = best for this CPU).

    Raises BuildError, InvalidArgument.
    """
    key: tuple[str | None, ...] = (target, forced_target(), None if path is None else str(Path(path).resolve()))
    if path is None and target is None:
        key = *key, best_target()
    if key not in _libraries:
        library = _installed_library(target) if path is None else load(path, target)
        _libraries.setdefault(key, library)
    return _libraries[key]
