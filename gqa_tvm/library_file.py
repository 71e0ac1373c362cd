"""One file with the kernels of several targets: an ELF shared object that ends with its manifest.

The manifest is JSON behind the ELF image, followed by its length and a mark. So a file is judged before the system's
loader sees it, which maps a truncated file without complaint and dies on the first page that is missing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .errors import BuildError
from .kernel_cache import library_stamp, version
from .targets import architecture
from .tuned_sizes import SizesTable

FORMAT = 1
_MARK = b"gqa_tvm\n"
_END = struct.Struct("<Q8s")  # bytes of the manifest, mark
_ELF_HEADER = struct.Struct("<4sBB12xH")  # magic, class (2: 64 bit), byte order (1: little), e_machine at byte 18
_MACHINES = {3: "x86 (32 bit)", 40: "arm (32 bit)", 62: "x86-64", 183: "aarch64", 243: "riscv"}


@dataclass(frozen=True)
class TargetKernels:
    """Kernels of one target: block sizes as SizesTable.as_dict gives them, and the symbol of each kernel by name."""

    sizes: dict[str, Any]
    kernels: dict[str, str]

    def table(self) -> SizesTable:
        """The block sizes."""
        return SizesTable.from_dict(self.sizes)


@dataclass(frozen=True)
class Manifest:
    """What a library holds and what it was built from.

    stamp: library_stamp() when it was built. versions: of gqa-tvm, apache-tvm and apache-tvm-ffi. image_bytes: of the
    ELF image. targets: by name, best first.
    """

    architecture: str
    stamp: str
    versions: dict[str, str]
    image_bytes: int
    targets: dict[str, TargetKernels]
    format: int = FORMAT


def current_versions() -> dict[str, str]:
    """Versions of this installation by distribution; apache-tvm is "absent" where kernels are only run."""
    return {name: version(name) for name in ("gqa-tvm", "apache-tvm", "apache-tvm-ffi")}


def append_manifest(image: Path, wanted: str, targets: Mapping[str, TargetKernels]) -> None:
    """Turn an ELF image into a library for an architecture."""
    manifest = Manifest(wanted, library_stamp(), current_versions(), image.stat().st_size, dict(targets))
    content = json.dumps(asdict(manifest), separators=(",", ":")).encode()
    with image.open("ab") as file:
        file.write(content + _END.pack(len(content), _MARK))


def read_manifest(path: Path, *, to_run: bool = True) -> Manifest:
    """The manifest of a library. Raises BuildError with what is wrong and what was wanted.

    Refused: what is no ELF file, a file that is cut off or no library of ours; to_run: also one of another architecture
    or version. The file's code is not touched.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file, to_run)
    except OSError as error:
        raise BuildError(f"{path} cannot be read: {error.strerror or error}") from error


def _read(path: Path, file: BinaryIO, to_run: bool) -> Manifest:
    header = file.read(_ELF_HEADER.size)
    if len(header) < _ELF_HEADER.size or not header.startswith(b"\x7fELF"):
        _refuse(path, "it is no shared object: it does not start with an ELF header")
    _, elf_class, byte_order, machine = _ELF_HEADER.unpack(header)
    found = _MACHINES.get(machine, f"machine {machine}")
    if to_run and ((elf_class, byte_order) != (2, 1) or found != architecture()):
        _refuse(path, f"it is for another architecture: {found}, wanted {architecture()}")
    size = file.seek(0, 2)
    file.seek(max(0, size - _END.size))
    length, mark = _END.unpack(file.read(_END.size))
    if mark != _MARK:
        _refuse(path, f"it does not end with a manifest: a foreign file, or cut off (it has {size} bytes)")
    file.seek(max(0, size - _END.size - length))
    manifest = _parse(path, file.read(min(length, size)))
    image_bytes = size - _END.size - length
    if to_run:
        _check_version(path, manifest)
    if manifest.image_bytes != image_bytes:
        _refuse(path, f"it is damaged: its code has {image_bytes} bytes, wanted {manifest.image_bytes}")
    if manifest.architecture != found or not manifest.targets:
        _refuse(
            path, f"its manifest has {len(manifest.targets)} targets of {manifest.architecture}, its code is {found}"
        )
    return manifest


def _parse(path: Path, content: bytes) -> Manifest:
    try:
        fields = json.loads(content)
        if fields["format"] != FORMAT:
            _refuse(path, f"its manifest has format {fields['format']}, wanted {FORMAT}")
        targets = {name: TargetKernels(**kernels) for name, kernels in fields.pop("targets").items()}
        return Manifest(targets=targets, **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{path} cannot be used: its manifest is broken: {error!r}") from error


def _check_version(path: Path, manifest: Manifest) -> None:
    if manifest.stamp != library_stamp():
        built, here = _list(manifest.versions), _list(current_versions())
        _refuse(
            path,
            f"it was built from other sources: its stamp is {manifest.stamp}, wanted {library_stamp()} "
            f"(built by {built}; here is {here})",
        )


def _list(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _refuse(path: Path, reason: str) -> NoReturn:
    raise BuildError(f"{path} cannot be used: {reason}")
