"""Schedules of every kernel, written over block sizes alone: right for any CPU, the base of every other target."""

from __future__ import annotations

from . import fetch, intrinsics, steps
from .block_sizes import BlockSizes

# What every target file has: its own functions, and these for the rest.
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

Schedule = steps.Schedule


def schedule_append(sch: Schedule, sizes: BlockSizes) -> None:
    """Tokens in parallel; the loops over a row are left to LLVM's vectoriser."""
    steps.parallelize_tasks(sch)


def _schedule_elementwise(sch: Schedule, sizes: BlockSizes, vectors: int, names: tuple[str, ...]) -> None:
    for name in names:
        steps.vectorize_last(sch, name, sizes.lanes, vectors)


def _schedule_rows_last_scores(sch: Schedule, sizes: BlockSizes, suffix: str = "") -> None:
    steps.decode_once(sch, f"dequantize_k{suffix}", sizes)
    steps.tile_qk_for_registers(sch, sizes, f"qk{suffix}")
    _schedule_rows_last_bias(sch, sizes, suffix)


def _schedule_rows_last_bias(sch: Schedule, sizes: BlockSizes, suffix: str = "") -> None:
    # The bias of a row is contiguous along the keys, where the rows are lanes here.
    _schedule_elementwise(sch, sizes, sizes.key_vectors, (f"bias_rows{suffix}",))
    over_keys = (f"softcap{suffix}", f"mask{suffix}")
    _schedule_elementwise(sch, sizes, sizes.elementwise_vectors, over_keys)
    steps.end_elementwise_at_last_key(sch, over_keys)
    keys = int(sch.get(sch.get_sblock(f"bias{suffix}")).writes[0].source.shape[0])
    add = intrinsics.register_transpose_add(sizes.lanes)
    steps.transpose_by_tiles(sch, f"bias{suffix}", add, sizes.lanes, keys)


def _schedule_rows_last_block(sch: Schedule, sizes: BlockSizes) -> None:
    _schedule_rows_last_scores(sch, sizes)
    _schedule_elementwise(sch, sizes, sizes.elementwise_vectors, ("m_new", "alpha", "p", "l_new", "m_out"))
    steps.end_elementwise_at_last_key(sch, ("p",))
    for name in ("block_max", "block_sum"):
        steps.reduce_down_columns(sch, name, sizes.lanes, sizes.reduction_vectors)
    steps.decode_once(sch, "dequantize_v", sizes)
    steps.tile_sv_for_registers(sch, sizes)


def _schedule_rows_last_task(sch: Schedule, sizes: BlockSizes) -> None:
    steps.parallelize_tasks(sch)
    copy = intrinsics.register_transpose(sizes.lanes)
    steps.transpose_by_tiles(sch, "transpose_query", copy, sizes.lanes)


def schedule_flash_prefill(sch: Schedule, sizes: BlockSizes) -> None:
    """Rows as lanes: register tiles for both products, vertical softmax."""
    _schedule_rows_last_task(sch, sizes)
    _schedule_rows_last_block(sch, sizes)
    fetch.fetch_next_block(sch, sizes)


def schedule_naive(sch: Schedule, sizes: BlockSizes) -> None:
    """As flash_prefill, with a first pass for the maxima."""
    _schedule_rows_last_task(sch, sizes)
    _schedule_rows_last_scores(sch, sizes, "_max")
    _schedule_rows_last_block(sch, sizes)
    steps.reduce_down_columns(sch, "row_max", sizes.lanes, sizes.reduction_vectors)
    _schedule_elementwise(sch, sizes, sizes.elementwise_vectors, ("row_m_new",))


def _is_padded(sizes: BlockSizes, columns: int) -> bool:
    return sizes.padded_columns(columns) != columns


def _schedule_few_rows_qk(sch: Schedule, sizes: BlockSizes, row_tile: int, columns: int) -> None:
    keys = sizes.decode_key_tile(row_tile, steps.cache_row_bytes(sch, "dequantize_k"))
    lane_sum = intrinsics.register_lane_sum(row_tile, keys, sizes.lanes)
    steps.tile_qk_for_lane_sums(sch, sizes, row_tile, keys, lane_sum, _is_padded(sizes, columns))


def _schedule_few_rows_softmax(sch: Schedule, sizes: BlockSizes) -> None:
    """Scores and softmax of flash_decode: the keys of a row as lanes."""
    _schedule_elementwise(sch, sizes, sizes.key_vectors, ("softcap", "mask", "bias", "p"))
    for name in ("block_max", "block_sum"):
        steps.reduce_along_row(sch, name, sizes.lanes)


def schedule_flash_decode(sch: Schedule, sizes: BlockSizes, row_tile: int, columns: int) -> None:
    """Head columns as lanes: partial sums of few rows in registers, lane sums by a shuffle tree."""
    steps.parallelize_tasks(sch)
    steps.parallelize_tasks(sch, "merge")
    _schedule_few_rows_qk(sch, sizes, row_tile, columns)
    _schedule_few_rows_softmax(sch, sizes)
    steps.tile_sv_for_few_rows(sch, sizes, row_tile, _is_padded(sizes, columns))
    fetch.fetch_ahead(sch, sizes)


def schedule_kv_quantize(sch: Schedule, sizes: BlockSizes) -> None:
    """As append: the loops over a row are left to LLVM's vectoriser."""
    steps.parallelize_tasks(sch)


def schedule_kv_dequantize(sch: Schedule, sizes: BlockSizes) -> None:
    """As kv_quantize."""
    steps.parallelize_tasks(sch)


def schedule_qk_gemm(sch: Schedule, sizes: BlockSizes, row_tile: int, columns: int) -> None:
    """QKGemm as in flash_decode."""
    steps.parallelize_tasks(sch)
    _schedule_few_rows_qk(sch, sizes, row_tile, columns)


def schedule_sv_gemm(sch: Schedule, sizes: BlockSizes, row_tile: int, columns: int) -> None:
    """SVGemm as in flash_decode."""
    steps.parallelize_tasks(sch)
    steps.parallelize_tasks(sch, "merge")
    steps.tile_sv_for_few_rows(sch, sizes, row_tile, _is_padded(sizes, columns))
