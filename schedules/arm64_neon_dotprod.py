"""AArch64 with 8-bit dot products: int8 and int4 attention by dot products where that is less work, else NEON."""

from . import generic, split_prefill_steps, split_prefill_steps_neon, split_steps, split_steps_neon, steps
from .block_sizes import BlockSizes
from .generic import *  # noqa: F403


def schedule_flash_prefill(sch: steps.Schedule, sizes: BlockSizes) -> None:
    """As generic, with the products of a split-integer kernel on byte dot products."""
    if not split_steps.multiplies_digits(sch):
        generic.schedule_flash_prefill(sch, sizes)
        return
    generic._schedule_rows_last_task(sch, sizes)
    split_prefill_steps_neon.digits_of_rows(sch, sizes)
    split_prefill_steps_neon.tile_qk_for_rows(sch)
    generic._schedule_rows_last_bias(sch, sizes)
    split_prefill_steps.softmax_by_rows(sch, sizes)
    split_prefill_steps_neon.probabilities_by_vectors(sch)
    split_prefill_steps_neon.tile_sv_for_rows(sch)


def schedule_flash_decode(sch: steps.Schedule, sizes: BlockSizes, row_tile: int, columns: int) -> None:
    """As generic, with the products of a split-integer kernel on byte dot products."""
    if not split_steps.multiplies_digits(sch):
        generic.schedule_flash_decode(sch, sizes, row_tile, columns)
        return
    steps.parallelize_tasks(sch)
    steps.parallelize_tasks(sch, "merge")
    split_steps_neon.tile_qk_for_dots(sch, row_tile)
    generic._schedule_few_rows_softmax(sch, sizes)
    for suffix in ("", "_whole"):
        split_steps_neon.digits_by_vectors(sch, sizes.lanes, suffix)
        split_steps_neon.tile_sv_for_dots(sch, row_tile, suffix)
