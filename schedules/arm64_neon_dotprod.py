"""AArch64 with 8-bit dot products: int8 and int4 decode by integer dot products where that is less work, else NEON."""

from . import generic, split_steps, split_steps_neon, steps
from .block_sizes import BlockSizes
from .generic import *  # noqa: F403


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
