"""Query rows of a task: which token and head a row is, which keys it sees, how it is loaded and written back.

The rows of a KV head are its S x G query rows, token-major: row r is token r / G of query head n G + r mod G. A task
owns a block of consecutive rows, so that every key loaded serves all heads of the group. Rows past the last one repeat
it and are not written back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from ..definitions import rms_norm
from ..definitions.half import narrow, widen
from ..definitions.merge import joint_maximum, normalise, weight
from ..definitions.rotary import rotate_pair
from ..kernel_arguments import (
    ENTRY_NEW,
    ENTRY_PAST,
    ENTRY_TOTAL,
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


def describe_rows(block: RowBlock, count: int, first_row, total_rows, group, kv_head, entries, b, scalars):
    """Fill `block` for the rows first_row .. first_row + count; keys seen are the cache rows [first_key, end_key).

    Row of token s in cache row p = past + s: causal rows end after p, others at `total`; a window of W starts at
    p + 1 - W. Tokens of query padding see nothing.
    """
    past, total = T.bind(entries[b, ENTRY_PAST]), T.bind(entries[b, ENTRY_TOTAL])
    new_tokens = T.bind(entries[b, ENTRY_NEW])
    T.buffer_store(block.limits, T.int32(2**31 - 1), [0])
    T.buffer_store(block.limits, T.int32(0), [1])
    T.buffer_store(block.limits, T.int32(2**31 - 1), [2])
    T.buffer_store(block.limits, T.int32(0), [3])
    with T.serial(0, count) as r:
        row = T.bind(tirx.min(first_row + tirx.Cast("int64", r), total_rows - T.int64(1)))
        token = T.bind(i32(T.truncdiv(row, group)))
        position = T.bind(past + token)
        last = T.bind(tirx.Select(scalars.causal != 0, tirx.min(position + 1, total), total))
        end = T.bind(tirx.Select(token < new_tokens, last, T.int32(0)))
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


def first_row_seeing(scalars: AttentionScalars, token, group, first_row):
    """The first row of a task that may see the keys from those of `token` on; rows before it end earlier."""
    row = tirx.Cast("int64", token) * group - first_row
    return i32(tirx.Select(scalars.causal != 0, tirx.max(row, T.int64(0)), T.int64(0)))


# All loops over the probabilities of a block take so many keys, or a part of them, at a time.
_TILE_KEYS = 16


class VisibleTiles(NamedTuple):
    """Where loops over rows and the keys of a block begin and end, int32 (`visible_tiles`): see `describe_visible`."""

    task_rows: Any  # [1]
    first_seeing_row: Any  # [1]
    block_keys: Any  # [1]
    row_keys: Any  # [M]


def describe_visible(visible: VisibleTiles, rows: RowBlock, first_seeing_row, begin, kv_block: int, key_tile: int):
    """Fill `visible` for the keys from `begin` on: the first row that sees one, the keys up to the last one that a row
    sees, in whole tiles, and those up to the last one that a row or one before it sees, by `key_tile`.

    Rows of query padding see no key, and come after those that do.
    """
    T.buffer_store(visible.first_seeing_row, first_seeing_row, [0])
    keys = T.bind(tirx.min(_whole_tiles(rows.limits[3] - begin, _TILE_KEYS), T.int32(kv_block)))
    T.buffer_store(visible.block_keys, keys, [0])
    last = T.sblock_alloc_buffer((1,), "int32")
    T.buffer_store(last, T.int32(0), [0])
    with T.serial(0, int(visible.row_keys.shape[0])) as r:
        own = _whole_tiles(tirx.max(rows.end_key[r] - begin, T.int32(0)), key_tile)
        T.buffer_store(last, tirx.max(last[0], tirx.min(own, keys)), [0])
        T.buffer_store(visible.row_keys, last[0], [r])


def _whole_tiles(keys, tile: int):
    return tirx.truncdiv(keys + (tile - 1), T.int32(tile)) * tile if tile > 1 else keys


def align_stack(block: RowBlock, count, lanes: int):
    """Let LLVM align the task's stack to vectors; those that it spills there would straddle cache lines.

    It does so for whole vectors with a run-time index only: the rows' tokens pass through such.
    """
    tokens = T.sblock_alloc_buffer((int(block.token.shape[0]),), f"int32x{lanes}")
    with T.serial(0, count) as r:
        T.buffer_store(tokens, tirx.Broadcast(block.token[r], lanes), [r])
    with T.serial(0, count) as r:
        T.buffer_store(block.token, tirx.Shuffle([tokens[r]], [T.int32(0)]), [r])


def head_column(spec: KernelSpec, head, h):
    """Column of element h of a head in a [.., hidden] row."""
    return tirx.Cast("int64", head) * T.int64(spec.head_size) + tirx.Cast("int64", h)


class RowTransform(NamedTuple):
    """What happens to a query or key row between input and use: RMS norm, then rotary."""

    norm_weight: Any  # [H] query dtype
    norm_epsilon: Any  # float32, 0 = no norm
    cos: Any  # [max positions, R / 2] query dtype
    sin: Any
    rotary: Any  # int32 ROTARY_*


def load_row(spec: KernelSpec, source, row, transform: RowTransform, position):
    """row[h] = source(h), widened, normed and rotated, rounded to the query format; row: [H] float32.

    `position` is only evaluated when rotary is on.
    """
    with T.serial(0, spec.head_size) as h:
        T.buffer_store(row, widen(source(h), spec.query), [h])
    _norm_row(spec, row, transform)
    _rotate_row(spec, row, transform, position)
    if spec.query != "f32":
        with T.serial(0, spec.head_size) as h:
            T.buffer_store(row, widen(narrow(row[h], spec.query), spec.query), [h])


def _norm_row(spec: KernelSpec, row, transform: RowTransform):
    with T.If(transform.norm_epsilon > T.float32(0)):
        with T.Then():
            # Independent partial sums: one chain of additions would take longer than the rest of the row.
            lanes = min(_NORM_LANES, spec.head_size)
            sums = T.sblock_alloc_buffer((lanes,), "float64")
            with T.serial(0, lanes) as lane:
                T.buffer_store(sums, rms_norm.square(row[lane]), [lane])
            with T.serial(0, spec.head_size - lanes) as i:
                lane = T.truncmod(i, lanes)
                T.buffer_store(sums, sums[lane] + rms_norm.square(row[i + lanes]), [lane])
            with T.serial(0, lanes - 1) as lane:
                T.buffer_store(sums, sums[0] + sums[lane + 1], [0])
            inverse = T.bind(rms_norm.inverse_rms(sums[0], spec.head_size, transform.norm_epsilon))
            with T.serial(0, spec.head_size) as h:
                weight = widen(transform.norm_weight[h], spec.query)
                T.buffer_store(row, rms_norm.normalise(row[h], inverse, weight), [h])


_NORM_LANES = 8


def _rotate_row(spec: KernelSpec, row, transform: RowTransform, position):
    half = transform.cos.shape[1]
    with T.If(transform.rotary != ROTARY_OFF):
        with T.Then():
            at = T.bind(position())
            for mode, first, second in (
                (ROTARY_HALF_SPLIT, lambda i: i, lambda i: i + half),
                (ROTARY_INTERLEAVED, lambda i: i * 2, lambda i: i * 2 + 1),
            ):
                with T.If(transform.rotary == mode):
                    with T.Then():
                        with T.serial(0, half) as i:
                            cos, sin = (widen(t[at, i], spec.query) for t in (transform.cos, transform.sin))
                            re, im = rotate_pair(row[first(i)], row[second(i)], cos, sin)
                            # Both are computed before the first overwrites its input.
                            re, im = T.bind(re), T.bind(im)
                            T.buffer_store(row, re, [first(i)])
                            T.buffer_store(row, im, [second(i)])


def for_each_scale(scale, kv_head, head_size: int, store):
    """store(h, scale of column h of a KV head) for all columns, whether there is one scale or one for each."""
    with T.If(scale.shape[0] == T.int64(1)):
        with T.Then():
            with T.serial(0, head_size) as h:
                store(h, scale[0])
        with T.Else():
            with T.serial(0, head_size) as h:
                store(h, scale[tirx.Cast("int64", kv_head) * T.int64(head_size) + tirx.Cast("int64", h)])


def fold_scale(target, scale, kv_head, head_size: int, factor):
    """target[h] = factor * the scale of column h: what leaves the inner loops."""
    for_each_scale(scale, kv_head, head_size, lambda h, value: T.buffer_store(target, value * factor, [h]))


def load_query_row(spec: KernelSpec, buffers, scalars, block: RowBlock, b, r, fold, row, store):
    """store(plane, column, value) for row r of the query, normed, rotated, times fold[h]; odd INT4 heads end in 0."""
    token, head = block.token[r], block.head[r]
    load_row(
        spec,
        lambda h: buffers.query[b, token, head_column(spec, head, h)],
        row,
        RowTransform(buffers.norm_weight, scalars.norm_epsilon, buffers.cos, buffers.sin, scalars.rotary),
        lambda: buffers.positions[b, token],
    )
    planes = spec.cache_planes
    for plane in range(planes):
        columns = (spec.head_size - plane + planes - 1) // planes
        with T.serial(0, columns) as c:
            h = c * planes + plane
            store(plane, c, row[h] * fold[h])
        for column in range(columns, spec.cache_columns):
            store(plane, column, T.float32(0))


def row_factor(spec: KernelSpec, buffers: AttentionBuffers, scalars: AttentionScalars, head, m, l, state):
    """state[0] = factor that turns acc of a row with state (m, l) into probabilities times values; state: [4] scratch.

    A sink joins the denominator here, once: l' = l exp(m - m') + exp(sink - m') with m' = max(m, sink). A row that has
    seen nothing (l = 0) has factor 0 whatever its sink is.
    """
    with T.If(scalars.sink == SINK_NONE):
        with T.Then():
            T.buffer_store(state, normalise(T.float32(1), l), [0])
        with T.Else():
            T.buffer_store(state, T.float32(0), [1])
            with T.If(scalars.sink == SINK_HEAD):
                with T.Then():
                    value = widen(buffers.head_sink[tirx.Cast("int64", head)], spec.query)
                    T.buffer_store(state, scalars.unit(value), [1])
            T.buffer_store(state, joint_maximum(m, state[1]), [2])
            T.buffer_store(state, weight(m, state[2], scalars.bits), [0])
            T.buffer_store(state, l * state[0] + weight(state[1], state[2], scalars.bits), [3])
            T.buffer_store(state, normalise(state[0], state[3]), [0])
            T.buffer_store(state, tirx.Select(l == T.float32(0), T.float32(0), state[0]), [0])


def store_output_row(spec: KernelSpec, buffers, block: RowBlock, b, r, accumulator, factor, fold):
    """output[b, token, head, h] = accumulator(plane, column) * factor * fold[h], 0 where nothing was seen (factor 0).

    A row whose scores are all -inf has NaN in its accumulator when a value is not finite: 0 * NaN.
    """
    planes = spec.cache_planes
    for plane in range(planes):
        columns = (spec.head_size - plane + planes - 1) // planes
        with T.serial(0, columns) as c:
            h = c * planes + plane
            T.buffer_store(
                buffers.output,
                narrow(
                    tirx.Select(factor == T.float32(0), T.float32(0), accumulator(plane, c) * factor * fold[h]),
                    spec.query,
                ),
                [b, tirx.Cast("int64", block.token[r]), tirx.Cast("int64", block.head[r]), h],
            )
