"""Any CPU: 16 registers of 4 floats, no assumption about fused multiply-add."""

from __future__ import annotations

from .attention import (
    schedule_append,
    schedule_flash_decode,
    schedule_flash_prefill,
    schedule_naive,
)

__all__ = [
    "schedule_append",
    "schedule_flash_decode",
    "schedule_flash_prefill",
    "schedule_naive",
]
