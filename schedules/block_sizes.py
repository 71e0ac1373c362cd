"""The numbers of the kernels: block sizes, register tiles, chunk lengths."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class BlockSizes:
    """Sizes a schedule and its kernel agree on. Vectors are `lanes` float32 values.

    Register tiles count accumulators: qk_key_tile x qk_row_vectors and sv_row_tile x sv_column_vectors must leave a
    few registers for operands. kv_chunk is a multiple of decode_kv_block, q_block of qk_row_vectors x lanes.
    """

    lanes: int
    # flash_prefill and naive: rows are lanes
    q_block: int
    naive_q_block: int
    kv_block: int
    qk_key_tile: int
    qk_row_vectors: int
    sv_row_tile: int
    sv_column_vectors: int
    # flash_decode: head columns are lanes
    decode_kv_block: int
    decode_rows: int
    decode_accumulators: int
    decode_sv_unroll: int
    kv_chunk: int

    def __post_init__(self) -> None:
        for value, divisor, what in (
            (self.q_block, self.qk_row_vectors * self.lanes, "q_block by qk_row_vectors x lanes"),
            (self.naive_q_block, self.lanes, "naive_q_block by lanes"),
            (self.q_block, self.sv_row_tile, "q_block by sv_row_tile"),
            (self.kv_block, self.qk_key_tile, "kv_block by qk_key_tile"),
            (self.decode_kv_block, self.lanes, "decode_kv_block by lanes"),
            (self.decode_kv_block, self.decode_accumulators, "decode_kv_block by decode_accumulators"),
            (self.kv_chunk, self.decode_kv_block, "kv_chunk by decode_kv_block"),
        ):
            if value <= 0 or value % divisor:
                raise ValueError(f"block sizes: {what}: {value} is no multiple of {divisor}")

    def padded_columns(self, columns: int) -> int:
        """Columns of a decoded row, padded to whole vectors."""
        return -(-columns // self.lanes) * self.lanes

    def decode_key_tile(self, row_tile: int) -> int:
        """Keys whose row_tile partial sums fill the accumulators, a power of two so that it divides the block."""
        keys = max(1, self.decode_accumulators // row_tile)
        return 1 << (keys.bit_length() - 1)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def largest_divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` that is at most `limit`."""
    return next(d for d in range(min(value, limit), 0, -1) if value % d == 0)
