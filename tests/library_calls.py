"""What tests of libraries share: the kernels of a small one, calls that it serves, files that claim to be one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from operator_calls import assert_close, expected, make_call

from gqa_tvm import GroupQueryAttention, library_file
from gqa_tvm.kernel_cache import library_stamp
from gqa_tvm.library_file import current_versions
from gqa_tvm.targets import architecture

SMALL_KERNELS = ("append_f32_i8_h64", "flash_decode_f32_i8_h64_r2", "flash_prefill_f32_i8_h64")
MACHINES = {"x86-64": 62, "aarch64": 183, "riscv": 243}


def check_calls(cache: str = "i8", **keywords: Any) -> GroupQueryAttention:
    """Run a decode and a prefill that a small library serves, against the reference; returns the operator."""
    for tokens in (1, 40):
        attributes, inputs = make_call(cache, tokens=tokens, total=70)
        op = GroupQueryAttention(**attributes, **keywords)
        assert_close(op(**inputs).output, expected(attributes, inputs).output)
    return op


def elf(machine: int = MACHINES[architecture()]) -> bytes:
    """The header of a 64-bit little-endian shared object for an ELF machine number."""
    header = bytearray(64)
    header[:7] = b"\x7fELF\x02\x01\x01"
    header[16:24] = (3).to_bytes(2, "little") + machine.to_bytes(2, "little") + (1).to_bytes(4, "little")
    header[52:58] = (64).to_bytes(2, "little") + (56).to_bytes(2, "little") + (0).to_bytes(2, "little")
    return bytes(header)


def write_library(path: Path, image: bytes | None = None, target: str = "generic", **changes: Any) -> Path:
    """A file that claims to be a library of this build, with changes to its manifest."""
    image = elf() if image is None else image
    manifest = {
        "format": library_file.FORMAT,
        "architecture": architecture(),
        "stamp": library_stamp(),
        "versions": current_versions(),
        "image_bytes": len(image),
        "targets": {target: {"sizes": {}, "kernels": {}}},
    }
    return write_manifest(path, image, manifest | changes)


def write_manifest(path: Path, image: bytes, manifest: Any) -> Path:
    """An image with anything as its manifest."""
    content = json.dumps(manifest).encode()
    path.write_bytes(image + content + len(content).to_bytes(8, "little") + b"gqa_tvm\n")
    return path


def with_changed_manifest(library: Path, path: Path, **changes: Any) -> Path:
    """A copy of a real library with changes to its manifest."""
    content = library.read_bytes()
    length = int.from_bytes(content[-16:-8], "little")
    image, manifest = content[: -16 - length], json.loads(content[-16 - length : -16])
    return write_manifest(path, image, manifest | changes)
