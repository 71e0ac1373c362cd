"""AVX-512: 32 registers of 16 floats."""

from __future__ import annotations

from .attention import (
    schedule_append,
    schedule_flash_decode,
    schedule_flash_prefill,
    schedule_naive,
)
from .block_sizes import BlockSizes

__all__ = [
    "default_block_sizes",
    "schedule_append",
    "schedule_flash_decode",
    "schedule_flash_prefill",
    "schedule_naive",
]


def default_block_sizes(lanes: int) -> BlockSizes:
    """8 x 3 and 6 x 4 accumulators of 32 registers leave room for a row of operands and a broadcast."""
    return BlockSizes(
        lanes=lanes,
        q_block=96,
        naive_q_block=2 * lanes,
        kv_block=64,
        qk_key_tile=8,
        qk_row_vectors=3,
        sv_row_tile=6,
        sv_column_vectors=4,
        decode_kv_block=64,
        decode_rows=32,
        decode_accumulators=16,
        decode_sv_unroll=4,
        kv_chunk=1024,
    )
