"""The softmax state (m, l, acc) of a task's rows: its start, and how it becomes output."""

from __future__ import annotations

from tvm.script import tirx as T

from ..definitions.softmax import empty_maximum
from ..kernels import KernelSpec
from .rows import fold_scale, row_factor, store_output_row


def clear_state(m, l, acc, count):
    """State of `count` rows that have seen no key; acc: [rows, E, C]."""
    with T.serial(0, count) as r:
        T.buffer_store(m, empty_maximum(), [r])
        T.buffer_store(l, T.float32(0), [r])
        with T.grid(*acc.shape[1:]) as (e, c):
            T.buffer_store(acc, T.float32(0), [r, e, c])


def same_position(column):
    """acc holds the columns in order."""
    return column


def write_output(spec: KernelSpec, buffers, scalars, rows, b, n, count, m, l, acc, position=same_position):
    """Normalise `count` rows, join their sinks, apply the value scale and store them.

    position: function from a column to where acc holds it.
    """
    fold = T.sblock_alloc_buffer((spec.head_size,))
    state = T.sblock_alloc_buffer((4,))
    fold_scale(fold, buffers.v_scale, n, spec.head_size, T.float32(1))
    with T.serial(0, count) as r:
        row_factor(spec, buffers, scalars, rows.head[r], m[r], l[r], state)
        store_output_row(spec, buffers, rows, b, r, lambda e, c: acc[r, e, position(c)], state[0], fold)
