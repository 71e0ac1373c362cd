"""AArch64 with NEON: the generic schedules with this target's block sizes."""

from .generic import (
    schedule_append,
    schedule_flash_decode,
    schedule_flash_prefill,
    schedule_kv_dequantize,
    schedule_kv_quantize,
    schedule_naive,
    schedule_qk_gemm,
    schedule_sv_gemm,
)

__all__ = [
    "schedule_append",
    "schedule_flash_decode",
    "schedule_flash_prefill",
    "schedule_kv_dequantize",
    "schedule_kv_quantize",
    "schedule_naive",
    "schedule_qk_gemm",
    "schedule_sv_gemm",
]
