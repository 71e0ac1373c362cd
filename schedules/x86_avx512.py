"""AVX-512: the generic schedules with this target's block sizes."""

from .generic import schedule_append, schedule_flash_decode, schedule_flash_prefill, schedule_naive

__all__ = ["schedule_append", "schedule_flash_decode", "schedule_flash_prefill", "schedule_naive"]
