"""Which fields of BlockSizes tuning may change."""

from __future__ import annotations

from typing import Any

from ..kernels import KernelSpec
from ..schedules.block_sizes import BlockSizes

# By operation; records hold all of them, so that they mean the same beside other defaults.
TUNED_FIELDS = {
    "flash_prefill": (
        *("q_block", "kv_block", "split_prefill", "split_q_block", "split_kv_block"),
        *("qk_key_tile", "qk_row_vectors", "sv_row_tile", "sv_column_vectors"),
        *("elementwise_vectors", "reduction_vectors"),
    ),
    "flash_decode": (
        *("decode_kv_block", "decode_accumulators", "kv_chunk", "split_integers"),
        *("decode_sv_unroll", "key_vectors"),
    ),
}


def recorded_fields(spec: KernelSpec, sizes: BlockSizes) -> dict[str, Any]:
    """What a record holds: every field that tuning may change."""
    fields = TUNED_FIELDS[spec.operation]
    return {f: getattr(sizes, f) for f in fields if not (spec.is_float_cache and f.startswith("split_"))}
