"""What is tuned: a kernel for a group size, measured at several lengths and thread counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..build import USUAL_FORMATS
from ..kernels import KernelSpec, decode_row_tile, prefill_row_block
from ..schedules.block_sizes import BlockSizes

# Rows of a flash_prefill call: whole tasks of every usual number of rows.
_PREFILL_ROWS, _PREFILL_STEP = 1152, 96
# From so many keys on, one KV head is work enough for a measurement.
_LONG_TOTAL = 16384


@dataclass(frozen=True)
class Cell:
    """A point that sizes are measured at. total: keys T, a power of two; threads: of the call."""

    total: int
    threads: int


@dataclass(frozen=True)
class Shape:
    """Sizes of one measured call, batch 1."""

    tokens: int
    group_size: int
    kv_heads: int
    total: int
    head_size: int


@dataclass(frozen=True)
class Task:
    """A kernel (without tuned sizes) for G query heads a KV head, at T in totals and thread counts in threads."""

    spec: KernelSpec
    group_size: int
    totals: tuple[int, ...]
    threads: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.spec.name}_g{self.group_size}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(total, threads) for total in self.totals for threads in self.threads)

    @property
    def search_order(self) -> tuple[int, ...]:
        """The totals, the middle one first: there every outer point is searched."""
        middle = self.totals[len(self.totals) // 2]
        return (middle, *(total for total in self.totals if total != middle))

    def shape(self, total: int) -> Shape:
        """The call that stands for T = total: one token, or a chunk of tokens that ends there."""
        spec, group = self.spec, self.group_size
        if spec.operation == "flash_decode":
            return Shape(1, group, 8, total, spec.head_size)
        most = min(_PREFILL_ROWS, total * group)
        rows = spec.row_tile or max(most - most % _PREFILL_STEP, group)
        heads = 1 if total >= _LONG_TOTAL else 2
        return Shape(max(1, min(rows // group, total)), group, heads, total, spec.head_size)

    def measures_itself(self, sizes: BlockSizes) -> bool:
        """Whether the operator runs this kernel for the task's shapes: a block of 32 rows does not suit every G."""
        if self.spec.operation != "flash_prefill":
            return True
        rows = {self.shape(total).tokens * self.group_size for total in self.totals}
        return {prefill_row_block(count, sizes.q_block, sizes.small_q_blocks) for count in rows} == {self.spec.row_tile}


def usual_tasks(
    small_q_blocks: tuple[int, ...],
    head_sizes: tuple[int, ...],
    group_sizes: tuple[int, ...],
    totals: tuple[int, ...],
    threads: tuple[int, ...],
) -> Iterator[Task]:
    """The kernels of a float32 query that are worth a long search; flash_prefill for one group size, near 4."""
    prefill_group = min(group_sizes, key=lambda group: abs(group - 4))
    for head_size, (_, cache) in product(head_sizes, USUAL_FORMATS):
        for group in group_sizes:
            decode = KernelSpec("flash_decode", "f32", cache, head_size, decode_row_tile(1, group))
            yield Task(decode, group, totals, threads)
        for rows in (0, *small_q_blocks):
            prefill = KernelSpec("flash_prefill", "f32", cache, head_size, rows)
            yield Task(prefill, prefill_group, totals, threads)
