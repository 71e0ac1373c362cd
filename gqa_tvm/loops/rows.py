"""Query rows of a task: which token and head a row is, which keys it sees, how it is loaded and written back.

The rows of a KV head are its S x G query rows, token-major: row r is token r / G of query head n G + r mod G. A task
owns a block of consecutive rows, so that every key loaded serves all heads of the group. Rows past the last one repeat
it and are not written back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from ..definitions.merge import joint_maximum, normalise, weight
from ..definitions.rotary import rotate_pair
from ..kernel_arguments import (
    ROTARY_HALF_SPLIT,
    ROTARY_INTERLEAVED,
    ROTARY_OFF,
    SINK_HEAD,
    SINK_NONE,
)
from ..kernels import KernelSpec
from .arguments import AttentionBuffers, AttentionScalars


class RowBlock(NamedTuple):
    """Per-row facts of a task, [rows] int32 each; limits [4] int32 = min first, max first, min end, max end."""

    token: Any
    head: Any
    first_key: Any
    end_key: Any
    limits: Any


def i32(value):
    return tirx.Cast("int32", value)


def allocate_row_block(rows: int) -> RowBlock:
    return RowBlock(*(T.sblock_alloc_buffer((n,), "int32") for n in (rows, rows, rows, rows, 4)))


def describe_rows(block: RowBlock, count: int, first_row, total_rows, group, kv_head, past, total, scalars):
    """Fill `block` for the rows first_row .. first_row + count; keys seen are [first_key, end_key).

    Row of token s at position p = past + s: causal rows end after p, others at `total`; a window of W starts at
    p + 1 - W.
    """
    T.buffer_store(block.limits, T.int32(2**31 - 1), [0])
    T.buffer_store(block.limits, T.int32(0), [1])
    T.buffer_store(block.limits, T.int32(2**31 - 1), [2])
    T.buffer_store(block.limits, T.int32(0), [3])
    with T.serial(0, count) as r:
        row = T.bind(tirx.min(first_row + tirx.Cast("int64", r), total_rows - T.int64(1)))
        token = T.bind(i32(T.truncdiv(row, group)))
        position = T.bind(past + token)
        end = T.bind(tirx.Select(scalars.causal != 0, tirx.min(position + 1, total), total))
        begin = T.bind(
            tirx.Select(scalars.window >= 0, tirx.max(position + 1 - scalars.window, T.int32(0)), T.int32(0))
        )
        T.buffer_store(block.token, token, [r])
        T.buffer_store(block.head, i32(kv_head * group + T.truncmod(row, group)), [r])
        T.buffer_store(block.first_key, begin, [r])
        T.buffer_store(block.end_key, end, [r])
        T.buffer_store(block.limits, tirx.min(block.limits[0], begin), [0])
        T.buffer_store(block.limits, tirx.max(block.limits[1], begin), [1])
        T.buffer_store(block.limits, tirx.min(block.limits[2], end), [2])
        T.buffer_store(block.limits, tirx.max(block.limits[3], end), [3])


def load_rotated(source, target, head_size: int, position, cos, sin, rotary):
    """target[h] = source(h) after rotary; `position` is only evaluated when rotary is on."""
    with T.If(rotary == ROTARY_OFF):
        with T.Then():
            with T.serial(0, head_size) as h:
                T.buffer_store(target, source(h), [h])
        with T.Else():
            half = cos.shape[1]
            at = T.bind(position())
            for mode, first, second in (
                (ROTARY_HALF_SPLIT, lambda i: i, lambda i: i + half),
                (ROTARY_INTERLEAVED, lambda i: i * 2, lambda i: i * 2 + 1),
            ):
                with T.If(rotary == mode):
                    with T.Then():
                        with T.serial(0, half) as i:
                            a, b = source(first(i)), source(second(i))
                            re, im = rotate_pair(a, b, cos[at, i], sin[at, i])
                            T.buffer_store(target, re, [first(i)])
                            T.buffer_store(target, im, [second(i)])
            with T.serial(0, T.int64(head_size) - half * 2) as rest:
                T.buffer_store(target, source(half * 2 + rest), [half * 2 + rest])


def fold_scale(target, scale, kv_head, head_size: int, factor):
    """target[h] = factor * scale[kv_head, h]: what leaves the inner loops."""
    with T.serial(0, head_size) as h:
        T.buffer_store(target, scale[kv_head, h] * factor, [h])


def load_query_row(spec: KernelSpec, buffers, scalars, block: RowBlock, b, r, fold, row, store):
    """store(plane, column, value) for row r of the query: rotated, then times fold[h]; odd INT4 heads end in a 0."""
    token, head = block.token[r], block.head[r]
    load_rotated(
        lambda h: buffers.query[b, token, head, h],
        row,
        spec.head_size,
        lambda: buffers.positions[b, token],
        buffers.cos,
        buffers.sin,
        scalars.rotary,
    )
    planes = spec.cache_planes
    for plane in range(planes):
        columns = (spec.head_size - plane + planes - 1) // planes
        with T.serial(0, columns) as c:
            h = c * planes + plane
            store(plane, c, row[h] * fold[h])
        for column in range(columns, spec.cache_columns):
            store(plane, column, T.float32(0))


def row_factor(buffers: AttentionBuffers, scalars: AttentionScalars, head, m, l, state):
    """state[0] = factor that turns acc of a row with state (m, l) into probabilities times values; state: [4] scratch.

    A sink joins the denominator here, once: l' = l exp(m - m') + exp(sink - m') with m' = max(m, sink).
    """
    with T.If(scalars.sink == SINK_NONE):
        with T.Then():
            T.buffer_store(state, normalise(T.float32(1), l), [0])
        with T.Else():
            T.buffer_store(state, T.float32(0), [1])
            with T.If(scalars.sink == SINK_HEAD):
                with T.Then():
                    T.buffer_store(state, buffers.head_sink[tirx.Cast("int64", head)], [1])
            T.buffer_store(state, joint_maximum(m, state[1]), [2])
            T.buffer_store(state, weight(m, state[2]), [0])
            T.buffer_store(state, l * state[0] + weight(state[1], state[2]), [3])
            T.buffer_store(state, normalise(state[0], state[3]), [0])


def store_output_row(spec: KernelSpec, buffers, block: RowBlock, b, r, accumulator, factor, fold):
    """output[b, token, head, h] = accumulator(plane, column) * factor * fold[h]."""
    planes = spec.cache_planes
    for plane in range(planes):
        columns = (spec.head_size - plane + planes - 1) // planes
        with T.serial(0, columns) as c:
            h = c * planes + plane
            T.buffer_store(
                buffers.output,
                accumulator(plane, c) * factor * fold[h],
                [b, tirx.Cast("int64", block.token[r]), tirx.Cast("int64", block.head[r]), h],
            )
