"""Score processing of a block as schedulable steps; each runs only when its feature needs it."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ..definitions import scores
from ..definitions.half import widen
from ..kernel_arguments import ENTRY_ORIGIN
from ..kernels import KernelSpec
from .arguments import AttentionBuffers, AttentionScalars
from .rows import RowBlock
from .splice import alias, whole


def _elementwise(name: str, block_scores, reads, value) -> None:
    """scores[i, j] = value(i, j, scores[i, j]) as a block that a schedule can vectorise."""
    with T.sblock(f"{name}_step"):
        T.reads(whole(block_scores), *(whole(buffer) for buffer in reads))
        T.writes(whole(block_scores))
        target = alias(block_scores)
        with T.grid(*block_scores.shape) as (i, j):
            with T.sblock(name):
                vi = T.axis.spatial(block_scores.shape[0], i)
                vj = T.axis.spatial(block_scores.shape[1], j)
                T.buffer_store(target, value(vi, vj, block_scores[vi, vj]), [vi, vj])


def _bias_at(spec: KernelSpec, buffers: AttentionBuffers, scalars: AttentionScalars, rows: RowBlock, b, first_column):
    """Function (row, key of the block, clamp) -> bias; clamped keys repeat the last column, for the mask to drop."""
    last_column = buffers.bias.shape[3] - T.int64(1)
    # An axis of extent 1 serves all entries or heads.
    entry = tirx.min(tirx.Cast("int64", b), buffers.bias.shape[0] - T.int64(1))
    last_head = buffers.bias.shape[1] - T.int64(1)

    def bias(r, t, clamp: bool):
        column = first_column + tirx.Cast("int64", t)
        column = tirx.min(column, last_column) if clamp else column
        head = tirx.min(tirx.Cast("int64", rows.head[r]), last_head)
        return scalars.unit(widen(buffers.bias[entry, head, tirx.Cast("int64", rows.token[r]), column], spec.query))

    return bias


def _add_bias(
    spec: KernelSpec, block_scores, buffers, scalars, rows: RowBlock, first_row, b, key_begin, rows_last, suffix
):
    """The bias of the block's keys; one block of statements for whole blocks, one for the last keys."""
    keys, count = block_scores.shape if rows_last else reversed(block_scores.shape)
    # Bias columns are positions in the sequence, whatever row of the cache holds the key.
    first_column = T.bind(tirx.Cast("int64", key_begin + buffers.entries[b, ENTRY_ORIGIN]))
    bias = _bias_at(spec, buffers, scalars, rows, b, first_column)
    row_facts = (rows.head, rows.token)
    gathered = T.sblock_alloc_buffer((count, keys)) if rows_last else None

    def add(name: str, clamp: bool) -> None:
        if gathered is None:
            value = lambda i, j, s: scores.add_bias(s, bias(first_row + i, j, clamp))  # noqa: E731
            _elementwise(name, block_scores, row_facts, value)
        else:
            # Row by row, as the bias lies in memory; a transpose follows.
            value = lambda i, j, _: bias(first_row + i, j, clamp)  # noqa: E731
            _elementwise(name.replace("bias", "bias_rows", 1), gathered, row_facts, value)

    with T.If(first_column + T.int64(int(keys)) <= buffers.bias.shape[3]):
        with T.Then():
            add(f"bias{suffix}", clamp=False)
        with T.Else():
            add(f"bias_clamped{suffix}", clamp=True)
    if gathered is not None:
        value = lambda i, j, s: scores.add_bias(s, gathered[j, i])  # noqa: E731
        _elementwise(f"bias{suffix}", block_scores, (gathered,), value)


def block_is_visible(rows: RowBlock, key_begin, extent: int):
    """Whether every row of the task sees every key of a block."""
    return tirx.all(rows.limits[1] <= key_begin, rows.limits[2] >= key_begin + extent)


def rows_see_alike(rows: RowBlock, key_begin, extent: int):
    """Whether every row of the task sees every key of a block that any of them sees, and none that comes before."""
    end = tirx.min(rows.limits[3], key_begin + extent)
    return tirx.all(rows.limits[1] <= key_begin, rows.limits[2] >= end)


def process_scores(
    spec: KernelSpec,
    block_scores,
    buffers: AttentionBuffers,
    scalars: AttentionScalars,
    rows: RowBlock,
    first_row,
    b,
    key_begin,
    rows_last: bool,
    suffix: str = "",
) -> None:
    """softcap, bias and mask in place on scores [T_block, M] (rows_last) or [M, T_block] of the keys from key_begin.

    The mask is skipped when every row of the task sees the whole block. `suffix` keeps block names unique.
    """
    extent = int(block_scores.shape[0 if rows_last else 1])
    key_begin = T.bind(key_begin)
    row_and_key = (lambda i, j: (first_row + j, i)) if rows_last else (lambda i, j: (first_row + i, j))

    with T.If(scalars.softcap > T.float32(0)):
        with T.Then():
            _elementwise(
                f"softcap{suffix}",
                block_scores,
                (),
                lambda i, j, s: scores.softcap(s, scalars.softcap),
            )

    with T.If(scalars.has_bias != 0):
        with T.Then():
            _add_bias(spec, block_scores, buffers, scalars, rows, first_row, b, key_begin, rows_last, suffix)

    with T.If(tirx.Not(block_is_visible(rows, key_begin, extent))):
        with T.Then():

            def masked(i, j, score):
                r, t = row_and_key(i, j)
                return scores.mask(score, key_begin + t, rows.first_key[r], rows.end_key[r])

            _elementwise(f"mask{suffix}", block_scores, (rows.first_key, rows.end_key), masked)
