"""The numbers of the kernels: block sizes, register tiles, chunk lengths."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kernels import KernelSpec
    from ..targets import TargetFacts

# How many stored columns and keys the int32 sums of integer dot products have room for, by bytes of an instruction.
_DOT_COLUMNS = {64: {"i8": 256, "i4": 1024}, 32: {"i8": 256, "i4": 512}, 16: {"i8": 496, "i4": 248}}
_PREFILL_COLUMNS = 256
_PREFILL_PROBABILITY_DIGITS = 3
# Rows that are no multiple of a vector, and QKGemm alone, are there for these instructions: unsigned by signed bytes.
_UNSIGNED_DOT_BYTES = (64, 32)
_DOT_KEYS = 256
# Rows pad their vectors much if more than one byte of so many is padding.
_MOST_PADDING = 8
LONGEST_DOT_BYTES = 64
# Packed caches are read by this instruction; their stored columns come in vectors of so many.
_PACKED_DOT_BYTES = LONGEST_DOT_BYTES
_PACKED_COLUMNS = 16


@dataclass(frozen=True)
class BlockSizes:
    """Sizes a schedule and its kernel agree on. Vectors are `lanes` float32 values.

    Register tiles count accumulators: qk_key_tile x qk_row_vectors and sv_row_tile x sv_column_vectors must leave a
    few registers for operands. decode_rows are the rows of a flash_decode task; several tokens whose rows are more than
    few_rows take flash_prefill. kv_chunk is a multiple of decode_kv_block, q_block of qk_row_vectors x lanes.
    """

    lanes: int
    # flash_prefill and naive: rows are lanes
    q_block: int
    small_q_blocks: tuple[int, ...]
    naive_q_block: int
    kv_block: int
    qk_key_tile: int
    qk_row_vectors: int
    sv_row_tile: int
    sv_column_vectors: int
    # flash_decode: head columns are lanes
    decode_kv_block: int
    decode_rows: int
    few_rows: int
    decode_accumulators: int
    decode_sv_unroll: int
    kv_chunk: int
    # vectors in flight in elementwise loops over rows, in those over keys, and in reductions over the keys
    elementwise_vectors: int = 2
    key_vectors: int = 2
    reduction_vectors: int = 3
    # flash_decode by integer dot products of so many bytes: for these cache formats and row tiles, and for rows that
    # vectors pad much
    split_integers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    split_padded: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # flash_prefill by integer dot products: for these cache formats, in blocks of so many rows and keys
    split_prefill: tuple[str, ...] = ()
    split_q_block: int = 96
    split_kv_block: int = 128
    dot_bytes: int = 64
    # vectors of int32 sums that stay in registers
    dot_sums: int = 24
    # flash_decode of several rows: vectors of the query that stay in registers for a tile of keys, 0 = products take
    # them from memory
    decode_query_vectors: int = 0
    # flash_decode fetches cache rows so many bytes ahead of those that it reads; 0 = none, and flash_prefill does not
    # fetch the next block
    fetch_bytes: int = 0
    # and multiplies keys of at most so many bytes at a time, two at least, 0 = as many as fill the accumulators
    key_tile_bytes: int = 0

    def __post_init__(self) -> None:
        for value, divisor, what in (
            (self.q_block, self.qk_row_vectors * self.lanes, "q_block by qk_row_vectors x lanes"),
            *((block, self.lanes, "small_q_blocks by lanes") for block in self.small_q_blocks),
            (self.split_q_block, self.lanes, "split_q_block by lanes"),
            (self.naive_q_block, self.lanes, "naive_q_block by lanes"),
            (self.q_block, self.sv_row_tile, "q_block by sv_row_tile"),
            (self.kv_block, self.qk_key_tile, "kv_block by qk_key_tile"),
            (self.kv_block, self.lanes, "kv_block by lanes"),
            (self.decode_kv_block, self.lanes, "decode_kv_block by lanes"),
            (
                self.decode_kv_block,
                self.decode_accumulators,
                "decode_kv_block by decode_accumulators",
            ),
            (self.kv_chunk, self.decode_kv_block, "kv_chunk by decode_kv_block"),
        ):
            if value <= 0 or value % divisor:
                raise ValueError(f"block sizes: {what}: {value} is no multiple of {divisor}")

    def padded_columns(self, columns: int) -> int:
        """Columns of a decoded row, padded to whole vectors."""
        return -(-columns // self.lanes) * self.lanes

    def with_q_block(self, rows: int) -> BlockSizes:
        """These sizes for flash_prefill tasks of so many rows, register tiles fitted to them."""
        vectors = largest_divisor(rows // self.lanes, self.qk_row_vectors)
        sv_row_tile = largest_divisor(rows, self.sv_row_tile)
        return replace(self, q_block=rows, split_q_block=rows, qk_row_vectors=vectors, sv_row_tile=sv_row_tile)

    def splits_integers(self, cache: str, columns: int, row_tile: int, precision: str = "") -> bool:
        """Whether flash_decode multiplies a cache of so many stored columns by integer dot products.

        A precision below float32's has fewer of them: they are faster for any number of rows.
        """
        width = self.dot_width(columns)
        if self.decode_kv_block > _DOT_KEYS or not dict(self.split_integers).get(cache) or not width:
            return False
        if not precision and not self._splits_rows(cache, columns, row_tile):
            return False
        return columns <= _DOT_COLUMNS[width][cache]

    def _splits_rows(self, cache: str, columns: int, row_tile: int) -> bool:
        """Whether integer dot products that are as exact as float32 are faster."""
        if cache == "i8" and columns % self.lanes:
            # float32 decodes such rows ahead, element by element at their end.
            return True
        padding = -columns % self.dot_width(columns)
        pads_much = _MOST_PADDING * padding > columns + padding
        return row_tile in dict(self.split_padded if pads_much else self.split_integers).get(cache, ())

    def dot_width(self, columns: int) -> int:
        """Bytes of the vectors in which flash_decode takes rows of so many stored columns, 0 = there are none.

        Those that take the fewest bytes altogether, the widest of them.
        """
        if self.dot_bytes not in _UNSIGNED_DOT_BYTES:
            return self.dot_bytes if columns % self.dot_bytes == 0 else 0
        widths = [width for width in _UNSIGNED_DOT_BYTES if width <= min(columns, self.dot_bytes)]
        return min(widths, key=lambda width: -(-columns // width) * width, default=0)

    def value_width(self, columns: int) -> int:
        """Bytes of the vectors in which flash_prefill takes values of so many stored columns, 0 = there are none.

        A vector has a quarter as many columns. At least two of them must make a register tile: with one, float32 is
        as fast.
        """
        widths = [width for width in _UNSIGNED_DOT_BYTES if width <= min(columns, self.dot_bytes)]
        width = next((width for width in widths if columns % (width // 4) == 0), 0)
        vectors = columns // (width // 4) if width else 0
        return width if largest_divisor(vectors, self.dot_sums // _PREFILL_PROBABILITY_DIGITS) > 1 else 0

    def splits_prefill(self, cache: str, columns: int) -> bool:
        """Whether flash_prefill multiplies a cache of so many stored columns by integer dot products."""
        if cache not in self.split_prefill or columns > min(_PREFILL_COLUMNS, _DOT_COLUMNS[self.dot_bytes][cache]):
            return False
        if self.dot_bytes not in _UNSIGNED_DOT_BYTES:
            return columns % self.dot_bytes == 0
        return self.value_width(columns) > 0

    def reads_packed(self, columns: int) -> bool:
        """Whether there are kernels over packed caches of so many stored columns."""
        has_dots = bool(self.split_prefill) and self.dot_bytes == _PACKED_DOT_BYTES
        return has_dots and columns % _PACKED_COLUMNS == 0 and columns <= _PREFILL_COLUMNS

    def decode_key_tile(self, row_tile: int, key_bytes: int) -> int:
        """Keys whose row_tile partial sums are in registers at a time, a power of two so that it divides the block."""
        keys = max(1, self.decode_accumulators // row_tile)
        if self.key_tile_bytes:
            keys = min(keys, max(2, self.key_tile_bytes // key_bytes))
        return 1 << (keys.bit_length() - 1)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def digest(self) -> str:
        """Eight hexadecimal digits that tell these sizes from others."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:8]


# Where integer dot products are faster than float32: measured with 64 and 32 bytes (Zen 4), with 16 fewer instructions.
_ROW_TILES = tuple(range(1, 9))
_SPLIT_INTEGERS = (("i8", _ROW_TILES), ("i4", _ROW_TILES))
_SPLIT_PREFILL = ("i8", "i4")
# The same for rows whose vectors are padded much, by bytes of a dot product.
_SPLIT_PADDED = {64: (("i4", (1, 2, 3, 4)),), 32: (("i4", _ROW_TILES),)}
# A task of twice as many rows has half as many keys and values to arrange; many cores need many tasks.
_FEW_CORES = 8
# Arranged keys and values of blocks of 256 and what a task keeps take 2/3 of it.
_LARGE_L2_BYTES = 1 << 20
# Longer blocks gain nothing more from their decoded rows.
_LONGEST_KV_BLOCK = 96
_LARGEST_USUAL_HEAD = 256
# Where a multiply-add takes no operand from memory: with a load for each, decoding took a quarter more instructions.
_LOADS_OPERANDS = ("aarch64",)
# Where fetching ahead was measured: with caches that come from memory decoding takes 0.55 to 0.75 of the time (Zen 5).
_FETCHES_AHEAD = ("x86-64",)
# 6 KiB are slower from memory, 12 KiB from the third-level cache.
_FETCH_BYTES = 8192
# LLVM mixes the loads of a tile's keys, and the prefetchers of the CPU lose rows that are read so: float32 from memory
# takes 0.76 of the time with tiles of two keys instead of eight (Zen 5).
_KEY_TILE_BYTES = 1024


def default_block_sizes(facts: TargetFacts) -> BlockSizes:
    """Untuned sizes, from what the target offers.

    Register tiles are those with the fewest loads for their products; blocks of keys are as long as scores and decoded
    values of a task take half the second-level cache; tasks have whole tiles of rows.
    """
    lanes = facts.lanes()
    # Without fused multiply-add a product needs a register before it is added.
    registers = facts.vector_registers if facts.fused_multiply_add else facts.vector_registers - 4
    qk, sv = _tile(_QK_TILES, registers), _tile(_SV_TILES, registers)
    row_block = math.lcm(qk[1] * lanes, sv[0])
    q_block = row_block * max(1, (48 if facts.vector_registers * lanes < 512 else 96) // row_block)
    key_step = math.lcm(lanes, qk[0])
    kv_block = _kv_block(facts, key_step, q_block)
    return BlockSizes(
        lanes=lanes,
        q_block=q_block,
        small_q_blocks=tuple(rows for rows in (64, 48, 32) if rows < q_block),
        naive_q_block=2 * lanes,
        kv_block=kv_block,
        qk_key_tile=qk[0],
        qk_row_vectors=qk[1],
        sv_row_tile=sv[0],
        sv_column_vectors=sv[1],
        decode_kv_block=128,
        decode_rows=32,
        few_rows=16,
        decode_accumulators=16 if facts.vector_registers >= 32 else 8,
        decode_sv_unroll=4,
        kv_chunk=1024,
        split_integers=_SPLIT_INTEGERS if facts.dot_bytes else (),
        split_padded=_SPLIT_PADDED.get(facts.dot_bytes, ()),
        split_prefill=_SPLIT_PREFILL if facts.dot_bytes else (),
        split_q_block=q_block if facts.cores > _FEW_CORES else 2 * q_block,
        split_kv_block=256 if facts.l2_bytes >= _LARGE_L2_BYTES else 128,
        dot_bytes=facts.dot_bytes or 64,
        dot_sums=24 if facts.vector_registers >= 32 else 12,
        decode_query_vectors=8 if facts.architecture in _LOADS_OPERANDS else 0,
        fetch_bytes=min(_FETCH_BYTES, facts.l1_bytes // 4) if facts.architecture in _FETCHES_AHEAD else 0,
        key_tile_bytes=_KEY_TILE_BYTES if facts.architecture in _FETCHES_AHEAD else 0,
    )


# Accumulators by registers: keys x vectors of rows, rows x vectors of columns. They leave room for a row of operands
# and a broadcast, and divide the usual blocks.
_QK_TILES = {32: (8, 3), 16: (6, 2), 12: (4, 2), 0: (2, 2)}
_SV_TILES = {32: (6, 4), 16: (6, 2), 12: (4, 2), 0: (2, 2)}


def _tile(tiles: dict[int, tuple[int, int]], registers: int) -> tuple[int, int]:
    """The largest tile for so many registers."""
    return tiles[max(needed for needed in tiles if needed <= registers)]


def _kv_block(facts: TargetFacts, step: int, q_block: int) -> int:
    """The longest block, a multiple of `step`, whose scores and decoded values of a task take half the second-level
    cache."""
    row_bytes = 4 * (q_block + _LARGEST_USUAL_HEAD)
    longest = min(_LONGEST_KV_BLOCK, facts.l2_bytes // 2 // row_bytes)
    return max(1, longest // step) * step


def multiplies_digits(spec: KernelSpec, sizes: BlockSizes) -> bool:
    """Whether a kernel is made with split-integer products.

    Its small buffers must keep storage of their own: shared with one that is indexed at run time, vectors of digits
    would go through memory.
    """
    if spec.layout:
        return spec.operation in ("flash_prefill", "flash_decode")
    if spec.operation == "flash_prefill":
        return sizes.splits_prefill(spec.cache, spec.cache_columns)
    if spec.operation == "qk_gemm" and sizes.dot_bytes not in _UNSIGNED_DOT_BYTES:
        return False
    return spec.operation in ("flash_decode", "qk_gemm") and sizes.splits_integers(
        spec.cache, spec.cache_columns, spec.row_tile, spec.precision
    )


def decode_columns(spec: KernelSpec, sizes: BlockSizes) -> int:
    """Columns of a row of flash_decode's accumulators: those of the cache, padded to whole vectors."""
    columns = spec.cache_columns
    split = not spec.layout and multiplies_digits(spec, sizes) and sizes.dot_bytes in _UNSIGNED_DOT_BYTES
    width = sizes.dot_width(columns) if split else sizes.lanes
    return -(-columns // width) * width


def largest_divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` that is at most `limit`; 0 of 0."""
    return next((d for d in range(min(value, limit), 0, -1) if value % d == 0), 0)
