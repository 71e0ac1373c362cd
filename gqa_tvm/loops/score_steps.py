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


def block_is_visible(rows: RowBlock, key_begin, extent: int):
    """Whether every row of the task sees every key of a block."""
    return tirx.all(rows.limits[1] <= key_begin, rows.limits[2] >= key_begin + extent)


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

    bias_keys = buffers.bias.shape[3]
    # An axis of extent 1 serves all entries or heads.
    entry = tirx.min(tirx.Cast("int64", b), buffers.bias.shape[0] - T.int64(1))
    last_head = buffers.bias.shape[1] - T.int64(1)
    # Bias columns are positions in the sequence, whatever row of the cache holds the key.
    first_column = tirx.Cast("int64", key_begin + buffers.entries[b, ENTRY_ORIGIN])

    def biased(clamp: bool):
        def value(i, j, score):
            r, t = row_and_key(i, j)
            key = first_column + tirx.Cast("int64", t)
            # Keys at or past T are masked below; their bias does not exist.
            key = tirx.min(key, bias_keys - T.int64(1)) if clamp else key
            head = tirx.min(tirx.Cast("int64", rows.head[r]), last_head)
            where = [head, tirx.Cast("int64", rows.token[r]), key]
            return scores.add_bias(score, widen(buffers.bias[entry, where[0], where[1], where[2]], spec.query))

        return value

    row_facts = (rows.head, rows.token, buffers.entries)
    with T.If(scalars.has_bias != 0):
        with T.Then():
            with T.If(first_column + T.int64(extent) <= bias_keys):
                with T.Then():
                    _elementwise(f"bias{suffix}", block_scores, row_facts, biased(clamp=False))
                with T.Else():
                    _elementwise(f"bias_tail{suffix}", block_scores, row_facts, biased(clamp=True))

    with T.If(tirx.Not(block_is_visible(rows, key_begin, extent))):
        with T.Then():

            def masked(i, j, score):
                r, t = row_and_key(i, j)
                return scores.mask(score, key_begin + t, rows.first_key[r], rows.end_key[r])

            _elementwise(f"mask{suffix}", block_scores, (rows.first_key, rows.end_key), masked)
