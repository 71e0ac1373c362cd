"""The search space: fields of BlockSizes that make a workload of their own, and fields that a trace samples.

Outer fields change buffers or the carried loops. Inner ones are factors of splits: each becomes a random variable of
the trace that flows into the schedule, so that a mutated or replayed decision stays consistent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..kernels import KernelSpec
from ..loops.split_prefill import tile_rows
from ..lowering import fitted_sizes
from ..schedules.block_sizes import BlockSizes, multiplies_digits
from ..targets import TargetFacts

_Q_BLOCKS = (64, 96, 128)
_KV_BLOCKS = (32, 64, 128)
_DECODE_KV_BLOCKS = (64, 128, 256)
_DECODE_ACCUMULATORS = (8, 16)
# Longer chunks than the default would leave cores without work where there are more of them than here.
_KV_CHUNKS = (256, 512)
# An accumulator tile needs a row of operands and a broadcast besides.
_OPERAND_REGISTERS = 2


class SampledSizes:
    """Stands in for BlockSizes in a schedule: sampled fields are random variables of the trace."""

    def __init__(self, sizes: BlockSizes, sampled: dict[str, Any]) -> None:
        self._sizes, self._sampled = sizes, sampled

    def __getattr__(self, name: str) -> Any:
        return self._sampled[name] if name in self._sampled else getattr(self._sizes, name)


def outer_points(spec: KernelSpec, default: BlockSizes, facts: TargetFacts) -> list[BlockSizes]:
    """Sizes of the outer grid, the default first: each outer field is varied from it alone."""
    found = [fitted_sizes(spec, default)]
    for sizes in _varied(spec, found[0], facts):
        if sizes not in found:
            found.append(sizes)
    return found


def _varied(spec: KernelSpec, default: BlockSizes, facts: TargetFacts) -> Iterator[BlockSizes]:
    if spec.operation == "flash_prefill":
        if not spec.row_tile:
            yield from _valid(default.with_q_block(rows) for rows in _Q_BLOCKS if rows % default.lanes == 0)
        splits = multiplies_digits(spec, default)
        yield from _replaced(default, "split_kv_block" if splits else "kv_block", _KV_BLOCKS)
        yield with_prefill_form(default, spec, not splits) if facts.dot_bytes else default
        return
    splits = default.splits_integers(spec.cache, spec.cache_columns, spec.row_tile)
    yield from _replaced(default, "decode_kv_block", _DECODE_KV_BLOCKS)
    other = with_form(default, spec, not splits) if facts.dot_bytes else default
    if other.splits_integers(spec.cache, spec.cache_columns, spec.row_tile) == splits:
        other = default
    yield other
    for sizes in (other,) if splits else (default,):
        yield from _replaced(sizes, "decode_accumulators", _DECODE_ACCUMULATORS)


def with_form(sizes: BlockSizes, spec: KernelSpec, splits: bool) -> BlockSizes:
    """The sizes with this kernel's products in split integers or in float32."""
    tiles = dict(sizes.split_integers)
    own = set(tiles.get(spec.cache, ())) - {spec.row_tile} | ({spec.row_tile} if splits else set())
    if spec.is_float_cache:
        return sizes
    tiles[spec.cache] = tuple(sorted(own))
    return replace(sizes, split_integers=tuple(sorted(tiles.items())))


def with_prefill_form(sizes: BlockSizes, spec: KernelSpec, splits: bool) -> BlockSizes:
    """As `with_form` for flash_prefill."""
    if spec.is_float_cache:
        return sizes
    others = tuple(cache for cache in sizes.split_prefill if cache != spec.cache)
    return replace(sizes, split_prefill=tuple(sorted((*others, spec.cache))) if splits else others)


def chunk_variants(spec: KernelSpec, sizes: BlockSizes) -> list[BlockSizes]:
    """Other numbers of keys a task of flash decoding: the grain of its parallel loop, the same code."""
    if spec.operation != "flash_decode":
        return []
    return [other for other in _replaced(sizes, "kv_chunk", _KV_CHUNKS) if other != sizes]


def _replaced(sizes: BlockSizes, field: str, values: Sequence[int]) -> Iterator[BlockSizes]:
    for value in values:
        try:
            yield replace(sizes, **{field: value})
        except ValueError:
            continue


def _valid(sizes: Iterator[BlockSizes]) -> Iterator[BlockSizes]:
    while True:
        try:
            yield next(sizes)
        except ValueError:
            return
        except StopIteration:
            return


def inner_candidates(spec: KernelSpec, sizes: BlockSizes) -> dict[str, tuple[int, ...]]:
    """Values of each sampled field, all of which divide what they split; the kernel's own value is among them."""
    if spec.operation == "flash_prefill":
        splits = multiplies_digits(spec, sizes)
        rows = tile_rows(spec, sizes.split_q_block, sizes.lanes) if splits else sizes.q_block
        vectors = rows // sizes.lanes
        columns = sizes.padded_columns(spec.cache_columns) // sizes.lanes
        keys = _divisors(sizes.kv_block, 16)
        candidates = {
            "elementwise_vectors": _divisors(vectors, 4),
            "reduction_vectors": _divisors(vectors, 6),
        }
        if not splits:
            candidates |= {
                "qk_key_tile": keys,
                "qk_row_vectors": _divisors(vectors, 6),
                "sv_row_tile": _divisors(rows, 16),
                "sv_column_vectors": _divisors(columns, 8),
            }
    else:
        candidates = {"key_vectors": _divisors(sizes.decode_kv_block // sizes.lanes, 4)}
        if not sizes.splits_integers(spec.cache, spec.cache_columns, spec.row_tile):
            candidates["decode_sv_unroll"] = _divisors(sizes.decode_kv_block, 8)
    return {field: tuple(values) for field, values in candidates.items() if len(values) > 1}


def _divisors(value: int, limit: int) -> list[int]:
    return [n for n in range(1, limit + 1) if value % n == 0]


def worth_measuring(spec: KernelSpec, sizes: BlockSizes, facts: TargetFacts) -> bool:
    """Whether register tiles fit the registers and are large enough to hide the latency of their additions."""
    if spec.operation != "flash_prefill" or multiplies_digits(spec, sizes):
        return True
    most = facts.vector_registers - _OPERAND_REGISTERS
    tiles = sizes.qk_key_tile * sizes.qk_row_vectors, sizes.sv_row_tile * sizes.sv_column_vectors
    return all(4 <= tile <= most for tile in tiles)
