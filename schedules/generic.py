"""Any CPU: 16 registers of 4 floats, no assumption about fused multiply-add."""

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
    """Small tiles that fit 16 registers."""
    return BlockSizes(
        lanes=lanes,
        q_block=48,
        naive_q_block=2 * lanes,
        kv_block=64,
        qk_key_tile=4,
        qk_row_vectors=2,
        sv_row_tile=4,
        sv_column_vectors=2,
        decode_kv_block=64,
        decode_rows=32,
        decode_accumulators=8,
        decode_sv_unroll=4,
        kv_chunk=1024,
    )
