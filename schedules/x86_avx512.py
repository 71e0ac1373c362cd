"""AVX-512: 32 registers of 16 floats."""

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
