"""Flash attention with head columns as lanes: few rows per KV head, keys split in chunks (flash decoding).

Each task computes the softmax state of one chunk of one entry's keys; where an entry has several chunks, their states
are merged by log-sum-exp in chunk order. Chunks are kv_chunk keys long from the first block that the task's rows see,
so a result depends on neither the number of threads nor the other entries of the batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import te, tirx
from tvm.script import tirx as T

from ..definitions import split_signed
from ..definitions.merge import weight
from ..definitions.qk_gemm import qk_gemm_rows_first
from ..definitions.softmax import block_softmax, online_softmax
from ..definitions.split_vectors import RowVectors
from ..definitions.sv_gemm import sv_gemm
from ..kernels import KernelSpec
from . import packed_rows, split_signed_rows
from .arguments import AttentionScalars, buffer_parameter, declare_attention, dimension
from .cache_block import CacheBlock, cache_region, decoded_cache, match_cache
from .row_state import clear_state, same_position, write_output
from .rows import (
    align_stack,
    allocate_row_block,
    describe_rows,
    fold_scale,
    load_query_row,
)
from .score_steps import process_scores
from .splice import alias, make_step, splice, whole
from .split_rows import SplitRowsForm
from .visible_values import allocate_value_check, check_values, emit_values

_FEW_ROWS = 2
# Vectors to which a stack is aligned anyway: 16 bytes.
_STACK_LANES = 4


class DecodeShape(NamedTuple):
    """Static sizes of a flash_decode kernel."""

    row_tile: int  # R: rows whose accumulators share the registers
    row_tiles: int  # tiles of a task
    kv_block: int
    planes: int
    columns: int  # padded
    lanes: int

    @property
    def rows(self) -> int:
        return self.row_tile * self.row_tiles


class SvSteps(NamedTuple):
    """SV over a block of which some rows may not exist, and where it has code of its own, over one that is whole."""

    some_rows: Any
    all_rows: Any = None


def qk_rows_first_step(spec: KernelSpec, shape: DecodeShape):
    cache_rows, last_row, keys = decoded_cache(spec, shape.kv_block, shape.columns, "dequantize_k")
    query = te.placeholder((shape.row_tile, shape.planes, shape.columns), name="query")
    _, scores = qk_gemm_rows_first(query, keys, shape.lanes)
    return make_step([cache_rows, last_row, query, scores])


def softmax_rows_first_step(shape: DecodeShape, by_block: bool):
    """by_block: with probabilities relative to the block's own maximum, and their weight, which digits want."""
    scores = te.placeholder((shape.row_tile, shape.kv_block), name="scores")
    m_old, l_old = (te.placeholder((shape.row_tile,), name=name) for name in ("m_old", "l_old"))
    if by_block:
        return make_step([scores, m_old, l_old, *block_softmax(scores, m_old, l_old)])
    outputs = online_softmax(lambda m, t: scores[m, t], scores.shape, shape.kv_block, m_old, l_old, rows_last=False)
    return make_step([scores, m_old, l_old, *outputs])


def sv_rows_first_step(spec: KernelSpec, shape: DecodeShape):
    cache_rows, last_row, values = decoded_cache(spec, shape.kv_block, shape.columns, "dequantize_v")
    p = te.placeholder((shape.row_tile, shape.kv_block), name="p")
    accumulator = te.placeholder((shape.row_tile, shape.planes, shape.columns), name="acc_old")
    beta = te.placeholder((shape.row_tile,), name="row_beta")
    result = sv_gemm(lambda m, t: p[m, t], values, accumulator, beta)
    return make_step([cache_rows, last_row, p, accumulator, beta, result])


def _tile(buffer, tile, row_tile: int):
    """View of the rows of one tile of a [rows, ...] buffer, inside the current block."""
    region = buffer[(slice(tile * row_tile, (tile + 1) * row_tile), *(slice(0, n) for n in buffer.shape[1:]))]
    return T.match_buffer(region, (row_tile, *buffer.shape[1:]), buffer.dtype, offset_factor=1)


def _emit_qk(spec, shape, step, split, keys: CacheBlock, operands, tile, scores, seen):
    """scores of a tile of rows; those of keys after the `seen` ones of the block may be left as they are."""
    if split:
        _emit_split_qk(spec, shape, step, split, keys, operands, tile, scores, seen)
        return
    region = cache_region(spec, keys)
    with T.sblock("qk_step"):
        T.reads(region, *(whole(operand) for operand in operands))
        T.writes(whole(scores))
        rows = match_cache(spec, region, keys.cache.dtype, keys.kv_block)
        splice(step, [rows, keys.last, *(_tile(operand, tile, shape.row_tile) for operand in operands), scores])


def _emit_split_qk(spec, shape: DecodeShape, steps, split, keys: CacheBlock, operands, tile, scores, seen):
    """Without the last digit where no row of the tile needs it."""

    def emit(step, taken) -> None:
        tile_of = lambda operand: _tile(operand, tile, shape.row_tile)  # noqa: E731
        split.emit_qk_split(spec, shape, step, keys, taken, tile_of, scores, seen)

    if steps.short is None:
        emit(steps.all_digits, operands.of_step(short=False))
        return
    first = tile * shape.row_tile
    needs_all = [operands.needs_all[first + r] for r in range(shape.row_tile)]
    with T.If(sum(needs_all[1:], needs_all[0]) == T.int32(0)):
        with T.Then():
            emit(steps.short, operands.of_step(short=True))
        with T.Else():
            emit(steps.all_digits, operands.of_step(short=False))


def _emit_softmax(shape, step, scores, m, l, factors, tile):
    """factors: alpha of the tile's rows, and the weight of their probabilities where the step has one."""
    with T.sblock("softmax_step"):
        T.reads(whole(scores), whole(m), whole(l))
        T.writes(*(whole(buffer) for buffer in (scores, m, l, *factors)))
        R = shape.row_tile
        ins = [scores, _tile(m, tile, R), _tile(l, tile, R)]
        splice(step, [*ins, *factors, alias(scores), _tile(l, tile, R), _tile(m, tile, R)])


def _emit_sv(spec, shape, steps: SvSteps, block: CacheBlock, largest, rows, p, acc, factors, tile):
    R, alpha = shape.row_tile, factors[0]

    def emit(step) -> None:
        region = cache_region(spec, block)
        with T.sblock("sv_step"):
            T.reads(region, whole(p), whole(acc), *(whole(factor) for factor in factors))
            T.writes(whole(acc))
            cache_rows = match_cache(spec, region, block.cache.dtype, block.kv_block)
            splice(step, [cache_rows, block.last, p, _tile(acc, tile, R), *factors, _tile(acc, tile, R)])

    def blocked() -> None:
        if steps.all_rows is None:
            emit(steps.some_rows)
            return
        with T.If(block.last >= block.kv_block - 1):
            with T.Then():
                emit(steps.all_rows)
            with T.Else():
                emit(steps.some_rows)

    emit_values(spec, block, largest, rows, lambda r, t: p[r, t], acc, alpha, (tile * R, R), blocked)


def _load_queries(spec, shape: DecodeShape, buffers, scalars, rows, b, n, count, query, position):
    """query [rows, E, columns], column c at position(c); zeros elsewhere."""
    fold = T.sblock_alloc_buffer((spec.head_size,))
    row = T.sblock_alloc_buffer((spec.head_size,))
    fold_scale(fold, buffers.k_scale, n, spec.head_size, scalars.softmax_scale)
    with T.serial(0, count) as r:
        for e in range(shape.planes):
            _clear_padding(spec, shape, query, r, e, position)
        load_query_row(
            spec,
            buffers,
            scalars,
            rows,
            b,
            r,
            fold,
            row,
            lambda e, c, value: T.buffer_store(query, value, [r, e, position(c)]),
        )


def _clear_padding(spec, shape: DecodeShape, query, r, e, position):
    # Positions are those of the columns, with one gap that padding fills.
    gap = shape.columns - spec.cache_columns
    begin = next((c for c in range(spec.cache_columns) if int(position(c)) != c), spec.cache_columns)
    with T.serial(0, gap) as padding:
        T.buffer_store(query, T.float32(0), [r, e, padding + begin])


def split_form(spec: KernelSpec, sizes):
    """What multiplies by integer dot products, None = float32."""
    if spec.layout:
        return packed_rows
    if not sizes.splits_integers(spec.cache, spec.cache_columns, spec.row_tile, spec.precision):
        return None
    if sizes.dot_bytes == split_signed.DOT_BYTES:
        return split_signed_rows
    values = RowVectors(sizes.dot_width(spec.cache_columns), spec.cache_columns)
    # Half as many instructions for keys that fill half a vector.
    keys = RowVectors(sizes.dot_bytes, spec.cache_columns, 2) if 2 * values.columns == sizes.dot_bytes else values
    return SplitRowsForm(keys, values, sizes.lanes)


def _layout(spec: KernelSpec, sizes, split):
    """Columns of a padded row, where the query has a column of the cache, and where the accumulator has it."""
    if isinstance(split, SplitRowsForm):
        return split.columns, split.query_position, split.accumulator_position
    return sizes.padded_columns(spec.cache_columns), same_position, same_position


def _query_operands(spec: KernelSpec, shape: DecodeShape, split, query):
    """What the QK step takes of the rows: the rows, or their digits."""
    return split.allocate_split_rows(spec, shape.rows) if split else (query,)


def _split_queries(spec: KernelSpec, split, query, count, operands):
    if split:
        split.split_rows(spec, query, count, operands)


def _align_stack(shape: DecodeShape, split, rows, count):
    # `split_rows` does so too. Few rows keep their vectors in registers, and need the one that an aligned stack takes.
    if not split and shape.row_tile > _FEW_ROWS and shape.lanes > _STACK_LANES:
        align_stack(rows, count, shape.lanes)


def _save_partial(shape: DecodeShape, partial, where, valid, m, l, acc):
    """partial[where, row] = (acc, m, l)."""
    width = shape.planes * shape.columns
    with T.serial(0, valid) as r:
        with T.grid(shape.planes, shape.columns) as (e, c):
            T.buffer_store(partial, acc[r, e, c], [*where, tirx.Cast("int64", r), e * shape.columns + c])
        T.buffer_store(partial, m[r], [*where, tirx.Cast("int64", r), width])
        T.buffer_store(partial, l[r], [*where, tirx.Cast("int64", r), width + 1])


def _merge_partials(shape: DecodeShape, partial, where, chunks, valid, m, l, acc):
    """Join the states of all chunks into (m, l, acc), in chunk order."""
    width = shape.planes * shape.columns
    with T.serial(0, valid) as r:
        row = tirx.Cast("int64", r)
        with T.serial(0, chunks) as c:
            T.buffer_store(m, tirx.max(m[r], partial[(*where, c, row, width)]), [r])
        factor = T.sblock_alloc_buffer((1,))
        with T.serial(0, chunks) as c:
            T.buffer_store(factor, weight(partial[(*where, c, row, width)], m[r]), [0])
            T.buffer_store(l, l[r] + partial[(*where, c, row, width + 1)] * factor[0], [r])
            with T.grid(shape.planes, shape.columns) as (e, col):
                value = partial[(*where, c, row, e * shape.columns + col)]
                T.buffer_store(acc, acc[r, e, col] + value * factor[0], [r, e, col])


def flash_decode(spec: KernelSpec, sizes):
    """The flash_decode kernel's PrimFunc; parameters as `AttentionBuffers`, then partial, the scalars and kv_chunk.

    partial: [B, N_kv, row groups, chunks, rows, planes x columns + 2] float32 scratch, read only with several chunks.
    kv_chunk: int64, keys of a chunk, a multiple of the KV block.
    """
    tiles = -(-sizes.decode_rows // spec.row_tile)
    split = split_form(spec, sizes)
    columns, query_position, position = _layout(spec, sizes, split)
    shape = DecodeShape(spec.row_tile, tiles, sizes.decode_kv_block, spec.cache_planes, columns, sizes.lanes)
    rows_per_task, R, BC = shape.rows, shape.row_tile, shape.kv_block
    softmax = softmax_rows_first_step(shape, by_block=bool(split))
    qk = split.qk_split_steps(spec, R, BC) if split else qk_rows_first_step(spec, shape)
    sv = SvSteps(*split.sv_split_steps(spec, R, BC)) if split else SvSteps(sv_rows_first_step(spec, shape))

    @T.prim_func(s_tir=True)
    def kernel(
        query_: T.handle,
        key_cache_: T.handle,
        value_cache_: T.handle,
        entries_: T.handle,
        positions_: T.handle,
        cos_: T.handle,
        sin_: T.handle,
        bias_: T.handle,
        head_sink_: T.handle,
        norm_weight_: T.handle,
        k_scale_: T.handle,
        v_scale_: T.handle,
        output_: T.handle,
        partial_: T.handle,
        softmax_scale: T.float32,
        softcap: T.float32,
        window: T.int32,
        causal: T.int32,
        norm_epsilon: T.float32,
        rotary: T.int32,
        has_bias: T.int32,
        sink: T.int32,
        kv_chunk: T.int64,
    ):
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        x = declare_attention(
            spec,
            (
                *(query_, key_cache_, value_cache_, entries_, positions_, cos_, sin_),
                *(bias_, head_sink_, norm_weight_, k_scale_, v_scale_, output_),
            ),
        )
        in_nats = T.meta_var(
            AttentionScalars(softmax_scale, softcap, window, causal, norm_epsilon, rotary, has_bias, sink)
        )
        partial = T.meta_var(_declare_partial(partial_, shape))
        chunks = T.meta_var(partial.shape[3])
        group: T.let = T.truncdiv(x.output.shape[2], x.key_cache.shape[1])
        total_rows: T.let = x.query.shape[1] * group
        row_groups: T.let = (total_rows + (rows_per_task - 1)) // rows_per_task
        for b, n, g, k in T.grid(x.query.shape[0], x.key_cache.shape[1], row_groups, chunks):
            with T.sblock("task"):
                ab, an, ag, ak = T.axis.remap("SSSS", [b, n, g, k])
                T.reads()
                T.writes()
                # Bound once: a block axis stands for divisions by run-time sizes wherever it is used.
                vb: T.let = ab
                vn: T.let = an
                vg: T.let = ag
                vk: T.let = ak
                scalars = T.meta_var(in_nats.in_bits())
                rows = T.meta_var(allocate_row_block(rows_per_task))
                query = T.sblock_alloc_buffer((rows_per_task, shape.planes, columns))
                operands = T.meta_var(_query_operands(spec, shape, split, query))
                acc = T.sblock_alloc_buffer((rows_per_task, shape.planes, columns))
                m = T.sblock_alloc_buffer((rows_per_task,))
                l = T.sblock_alloc_buffer((rows_per_task,))
                scores = T.sblock_alloc_buffer((R, BC))
                factors = T.meta_var([T.sblock_alloc_buffer((R,)) for _ in range(2 if split else 1)])
                largest = T.meta_var(allocate_value_check(spec))
                block_keys = T.sblock_alloc_buffer((1,), "int32")
                first_row: T.let = vg * rows_per_task
                valid: T.let = T.min(total_rows - first_row, T.int64(rows_per_task))
                active: T.let = (valid + (R - 1)) // R
                describe_rows(rows, active * R, first_row, total_rows, group, vn, x.entries, vb, scalars)
                clear_state(m, l, acc, active * R)
                # Chunks count from the first block that is seen: a window has no empty ones before it.
                chunk_begin: T.let = T.Cast("int64", rows.limits[0] // BC * BC) + vk * kv_chunk
                chunk_end: T.let = T.Cast("int32", T.min(chunk_begin + kv_chunk, T.Cast("int64", rows.limits[3])))
                first_block: T.let = T.Cast("int32", chunk_begin) // BC
                blocks: T.let = T.max((chunk_end + (BC - 1)) // BC - first_block, 0)
                if blocks > 0:
                    _align_stack(shape, split, rows, active * R)
                    _load_queries(spec, shape, x, scalars, rows, vb, vn, active * R, query, query_position)
                    _split_queries(spec, split, query, active * R, operands)
                for blk in T.serial(blocks):
                    begin: T.let = (first_block + blk) * BC
                    last: T.let = rows.limits[3] - 1 - begin
                    block_keys[0] = T.min(rows.limits[3] - begin, BC)
                    keys = T.meta_var(CacheBlock(x.key_cache, vb, vn, begin, last, BC))
                    values = T.meta_var(keys._replace(cache=x.value_cache))
                    check_values(spec, values, rows, largest)
                    for tile in T.serial(T.Cast("int32", active)):
                        tile_row: T.let = tile * R
                        _emit_qk(spec, shape, qk, split, keys, operands, tile, scores, block_keys[0])
                        process_scores(spec, scores, x, scalars, rows, tile_row, vb, begin, False)
                        _emit_softmax(shape, softmax, scores, m, l, factors, tile)
                        _emit_sv(spec, shape, sv, values, largest, rows, scores, acc, factors, tile)
                if chunks == T.int64(1):
                    write_output(spec, x, scalars, rows, vb, vn, valid, m, l, acc, position)
                else:
                    _save_partial(shape, partial, (vb, vn, vg, vk), valid, m, l, acc)
        if chunks > T.int64(1):
            for b, n, g in T.grid(x.query.shape[0], x.key_cache.shape[1], row_groups):
                with T.sblock("merge"):
                    ab, an, ag = T.axis.remap("SSS", [b, n, g])
                    T.reads()
                    T.writes()
                    vb: T.let = ab
                    vn: T.let = an
                    vg: T.let = ag
                    rows = T.meta_var(allocate_row_block(rows_per_task))
                    acc = T.sblock_alloc_buffer((rows_per_task, shape.planes, columns))
                    m = T.sblock_alloc_buffer((rows_per_task,))
                    l = T.sblock_alloc_buffer((rows_per_task,))
                    first_row: T.let = vg * rows_per_task
                    valid: T.let = T.min(total_rows - first_row, T.int64(rows_per_task))
                    scalars = T.meta_var(in_nats.in_bits())
                    describe_rows(rows, valid, first_row, total_rows, group, vn, x.entries, vb, scalars)
                    clear_state(m, l, acc, valid)
                    seen: T.let = T.Cast("int64", T.max(rows.limits[3] - rows.limits[0] // BC * BC, 0))
                    own_chunks: T.let = T.min(
                        (seen + kv_chunk - T.int64(1)) // kv_chunk,
                        chunks,
                    )
                    _merge_partials(shape, partial, (vb, vn, vg), own_chunks, valid, m, l, acc)
                    write_output(spec, x, scalars, rows, vb, vn, valid, m, l, acc, position)

    return kernel


def _declare_partial(handle, shape: DecodeShape):
    outer = tuple(dimension(f"partial_{axis}") for axis in ("batch", "heads", "groups", "chunks", "rows"))
    return buffer_parameter("partial", handle, (*outer, shape.planes * shape.columns + 2))
