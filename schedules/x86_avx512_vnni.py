"""AVX-512 with VNNI: int8 and int4 decode by integer dot products where that is faster, else as AVX-512."""

from . import fetch, generic, packed_steps, split_prefill_steps, split_steps, steps
from .block_sizes import BlockSizes
from .generic import *  # noqa: F403


def schedule_flash_prefill(sch: steps.Schedule, sizes: BlockSizes) -> None:
    """As generic, with the products of a split-integer kernel on byte dot products."""
    if packed_steps.reads_packed(sch):
        packed_steps.schedule_prefill(sch, sizes)
        return
    if not split_steps.multiplies_digits(sch):
        generic.schedule_flash_prefill(sch, sizes)
        return
    generic._schedule_rows_last_task(sch, sizes)
    split_prefill_steps.digits_of_rows(sch, sizes)
    split_prefill_steps.codes_by_vectors(sch, "codes_k", sizes.lanes)
    split_prefill_steps.tile_qk_for_rows(sch, sizes)
    generic._schedule_rows_last_bias(sch, sizes)
    split_prefill_steps.softmax_by_rows(sch, sizes)
    split_prefill_steps.probabilities_by_vectors(sch, sizes.lanes)
    split_prefill_steps.values_by_vectors(sch)
    split_prefill_steps.tile_sv_for_rows(sch, sizes)


def schedule_flash_decode(sch: steps.Schedule, sizes: BlockSizes, row_tile: int, columns: int) -> None:
    """As generic, with the products of a split-integer kernel on byte dot products."""
    if packed_steps.reads_packed(sch):
        packed_steps.schedule_decode(sch, sizes)
        return
    if not split_steps.multiplies_digits(sch):
        generic.schedule_flash_decode(sch, sizes, row_tile, columns)
        return
    steps.parallelize_tasks(sch)
    steps.parallelize_tasks(sch, "merge")
    for suffix in split_steps.qk_suffixes(sch):
        split_steps.tile_qk_for_dots(sch, row_tile, sizes.dot_sums, suffix)
    generic._schedule_few_rows_softmax(sch, sizes)
    split_steps.digits_by_vectors(sch, sizes.lanes)
    split_steps.tile_sv_for_dots(sch, row_tile, sizes.dot_sums)
    fetch.fetch_ahead(sch, sizes)


def schedule_qk_gemm(sch: steps.Schedule, sizes: BlockSizes, row_tile: int, columns: int) -> None:
    """QKGemm as in flash_decode."""
    if not split_steps.multiplies_digits(sch):
        generic.schedule_qk_gemm(sch, sizes, row_tile, columns)
        return
    steps.parallelize_tasks(sch)
    split_steps.tile_qk_for_dots(sch, row_tile, sizes.dot_sums, suffix="")
