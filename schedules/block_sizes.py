"""The numbers of the kernels: block sizes, register tiles, chunk lengths."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

# Bytes of a cache row that one vector of the integer dot product takes, and how many its sums have room for.
_DOT_BYTES = 64
_DOT_COLUMNS = 1024
_DOT_KEYS = 256


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
    kv_tail_block: int
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
    # vectors in flight in elementwise loops and in reductions over the keys
    elementwise_vectors: int = 2
    reduction_vectors: int = 3
    # flash_decode by integer dot products: for these cache formats and row tiles
    split_integers: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        for value, divisor, what in (
            (self.q_block, self.qk_row_vectors * self.lanes, "q_block by qk_row_vectors x lanes"),
            *((block, self.lanes, "small_q_blocks by lanes") for block in self.small_q_blocks),
            (self.naive_q_block, self.lanes, "naive_q_block by lanes"),
            (self.q_block, self.sv_row_tile, "q_block by sv_row_tile"),
            (self.kv_block, self.qk_key_tile, "kv_block by qk_key_tile"),
            (self.kv_block, self.lanes, "kv_block by lanes"),
            (self.kv_tail_block, self.qk_key_tile, "kv_tail_block by qk_key_tile"),
            (self.kv_tail_block, self.lanes, "kv_tail_block by lanes"),
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
        return replace(self, q_block=rows, qk_row_vectors=vectors, sv_row_tile=largest_divisor(rows, self.sv_row_tile))

    def splits_integers(self, cache: str, columns: int, row_tile: int) -> bool:
        """Whether flash_decode multiplies a cache of so many stored columns by integer dot products."""
        fits = columns % _DOT_BYTES == 0 and columns <= _DOT_COLUMNS and self.decode_kv_block <= _DOT_KEYS
        return fits and row_tile in dict(self.split_integers).get(cache, ())

    def decode_key_tile(self, row_tile: int) -> int:
        """Keys whose row_tile partial sums fill the accumulators, a power of two so that it divides the block."""
        keys = max(1, self.decode_accumulators // row_tile)
        return 1 << (keys.bit_length() - 1)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def _sizes(
    lanes: int,
    q_blocks: tuple[int, int],
    kv_blocks: tuple[int, int],
    qk: tuple[int, int],
    sv: tuple[int, int],
    decode: int,
) -> BlockSizes:
    return BlockSizes(
        lanes=lanes,
        q_block=q_blocks[0],
        small_q_blocks=q_blocks[1:],
        naive_q_block=2 * lanes,
        kv_block=kv_blocks[0],
        kv_tail_block=kv_blocks[1],
        qk_key_tile=qk[0],
        qk_row_vectors=qk[1],
        sv_row_tile=sv[0],
        sv_column_vectors=sv[1],
        decode_kv_block=64,
        decode_rows=32,
        few_rows=16,
        decode_accumulators=decode,
        decode_sv_unroll=4,
        kv_chunk=1024,
    )


# Untuned sizes. 32 registers hold 8 x 3 or 6 x 4 accumulators, a row of operands and a broadcast; 16 hold 6 x 2.
# Columns: lanes, (q_block, *small_q_blocks), (kv_block, kv_tail_block), (qk keys, row vectors), (sv rows, column
# vectors), decode accumulators.
DEFAULT_BLOCK_SIZES = {
    "x86-avx512": _sizes(16, (96, 64, 48, 32), (64, 16), (8, 3), (6, 4), 16),
    "x86-avx2": _sizes(8, (48, 32), (96, 24), (6, 2), (6, 2), 8),
    "generic": _sizes(4, (48, 32), (64, 16), (4, 2), (4, 2), 8),
}
# Where they are faster than float32; measured on Zen 4.
DEFAULT_BLOCK_SIZES["x86-avx512-vnni"] = replace(
    DEFAULT_BLOCK_SIZES["x86-avx512"],
    split_integers=(("i8", (1, 3, 4, 5, 6, 7, 8)), ("i4", (1, 2, 3, 4, 5, 6, 7, 8))),
)


def largest_divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` that is at most `limit`."""
    return next(d for d in range(min(value, limit), 0, -1) if value % d == 0)
