"""Names of kernels: one string is symbol, tuning task, log key, bench row and test id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

Operation = Literal[
    "append", "flash_prefill", "flash_decode", "naive", "kv_quantize", "kv_dequantize", "qk_gemm", "sv_gemm"
]
FloatFormat = Literal["f32", "f16", "bf16"]
Precision = Literal["", "fast", "balanced", "approximate"]
CacheFormat = Literal["f32", "f16", "bf16", "i8", "i4"]
Layout = Literal["", "packed"]

FLOAT_FORMATS: tuple[FloatFormat, ...] = ("f32", "f16", "bf16")
CACHE_FORMATS: tuple[CacheFormat, ...] = (*FLOAT_FORMATS, "i8", "i4")
# Formats by the name of the NumPy dtype that holds them.
FORMATS: dict[str, CacheFormat] = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int8": "i8",
    "uint8": "i4",
}
# flash_decode and the GEMMs keep this many rows in registers at once; what fits no tile exactly takes several.
ROW_TILES = (1, 2, 3, 4, 5, 6, 7, 8)

_NAME = re.compile(
    r"(?P<operation>append|flash_prefill|flash_decode|naive|kv_quantize|kv_dequantize|qk_gemm|sv_gemm)"
    r"_(?P<query>f32|f16|bf16)_(?P<cache>f32|f16|bf16|i8|i4)(_(?P<layout>packed))?"
    r"_h(?P<head>\d+)(_r(?P<rows>\d+))?(_(?P<precision>fast|balanced|approximate))?(_t(?P<tuned>[0-9a-f]{6}))?"
)


@dataclass(frozen=True)
class KernelSpec:
    """What is fixed when a kernel is compiled; every other size is a run-time number.

    query: format of query, key, value, output and what comes with them; cache: format of the stored rows.
    head_size: H. row_tile: rows that share a register tile in flash_decode and the GEMMs, rows of a task in
    flash_prefill where it is not the usual q_block (0 elsewhere). tuned: digest of block sizes that tuning found for it
    (`tuned_sizes.TunedRecord.digest`), "" = the target's default. precision: "" = as float32; others need integer dot
    products. layout: of the cache, "" = BNSH, "packed" = as integer dot products take it (`kv_layout`).
    """

    operation: Operation
    query: FloatFormat
    cache: CacheFormat
    head_size: int
    row_tile: int = 0
    tuned: str = ""
    precision: Precision = ""
    layout: Layout = ""

    @property
    def name(self) -> str:
        suffix = "".join(
            f"_{mark}{value}"
            for mark, value in (("r", self.row_tile), ("", self.precision), ("t", self.tuned))
            if value
        )
        layout = f"_{self.layout}" if self.layout else ""
        return f"{self.operation}_{self.query}_{self.cache}{layout}_h{self.head_size}{suffix}"

    @property
    def cache_planes(self) -> int:
        """Values per stored element: 2 nibbles a byte for int4."""
        return 2 if self.cache == "i4" else 1

    @property
    def is_float_cache(self) -> bool:
        return self.cache in FLOAT_FORMATS

    @property
    def cache_columns(self) -> int:
        """Stored elements per cache row: H, or (H + 1) / 2 bytes for int4."""
        return -(-self.head_size // self.cache_planes)

    @staticmethod
    def parse(name: str) -> KernelSpec:
        """The spec of a kernel name; ValueError for anything else."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is not a kernel name such as flash_decode_f32_i8_h128_r2")
        fields: dict[str, Any] = match.groupdict()
        formats = fields["query"], fields["cache"]
        numbers = int(fields["head"]), int(fields["rows"] or 0)
        marks: list[Any] = [fields[name] or "" for name in ("tuned", "precision", "layout")]
        return KernelSpec(fields["operation"], *formats, *numbers, *marks)


def row_tile_for(rows: int) -> int:
    """Row tile for so many rows: all of them, or an even share."""
    largest = max(ROW_TILES)
    if rows <= largest:
        return rows
    tiles = -(-rows // largest)
    return -(-rows // tiles)


# Tiles for the rows of several tokens, whose number is anything: few sizes, so that few kernels are compiled.
TOKEN_TILES = (8, 6, 4)


def decode_row_tile(tokens: int, group_size: int) -> int:
    """Row tile of flash_decode: fitted to the group for one token, else the one that pads the fewest rows."""
    if tokens == 1:
        return row_tile_for(group_size)
    rows = tokens * group_size
    return min(TOKEN_TILES, key=lambda tile: _padded(rows, tile))


def prefill_row_block(rows: int, q_block: int, small_q_blocks: tuple[int, ...]) -> int:
    """The rows of a flash_prefill task as a KernelSpec has them: a small number where it leaves fewer rows empty."""
    # Larger tasks decode every key for more rows: a small gain is none.
    small = min(small_q_blocks, key=lambda block: _padded(rows, block), default=q_block)
    return small if 10 * _padded(rows, small) <= 9 * _padded(rows, q_block) else 0


def _padded(rows: int, block: int) -> int:
    return -(-rows // block) * block
