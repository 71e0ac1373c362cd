"""Flash attention with query rows as lanes: many rows per KV head (prompts, chunks)."""

from __future__ import annotations

from tvm.script import tirx as T

from ..definitions import split_signed
from ..kernel_arguments import ENTRY_PAST
from ..kernels import KernelSpec
from . import packed_prefill, split_prefill, split_signed_prefill
from .arguments import AttentionScalars, declare_attention
from .cache_block import CacheBlock
from .row_state import clear_state, write_output
from .rows import VisibleTiles, allocate_row_block, describe_rows, describe_visible, first_row_seeing
from .rows_last import (
    RowsLastState,
    allocate_state,
    emit_scores,
    emit_softmax,
    emit_sv,
    pack_query,
    rows_last_steps,
)
from .split_prefill import emit_query_digits, emit_split_block


def _emit_block(spec, steps, x, scalars, rows, b, n, begin, end, state: RowsLastState, split) -> None:
    """The online softmax over the keys begin .. begin + steps.kv_block, which no row sees from `end` on."""
    if split is not None:
        emit_split_block(spec, steps, x, scalars, rows, b, n, begin, end, state, split)
        return
    last = end - 1 - begin
    scores = emit_scores(
        spec, steps, x, scalars, rows, CacheBlock(x.key_cache, b, n, begin, last, steps.kv_block), state
    )
    emit_softmax(steps, scores, state)
    emit_sv(spec, steps, CacheBlock(x.value_cache, b, n, begin, last, steps.kv_block), rows, scores, state)


def _split_form(spec: KernelSpec, sizes):
    """The module that multiplies by integer dot products, None = float32."""
    if spec.layout:
        return packed_prefill
    if not sizes.splits_prefill(spec.cache, spec.cache_columns):
        return None
    return split_signed_prefill if sizes.dot_bytes == split_signed.DOT_BYTES else split_prefill


def _steps(spec: KernelSpec, sizes, form):
    """The steps of a block of keys."""
    if form:
        return form.split_prefill_steps(spec, sizes, sizes.split_kv_block, sizes.split_q_block)
    return rows_last_steps(spec, sizes.kv_block, sizes.padded_columns(spec.cache_columns), sizes.q_block)


def _prepare_rows(spec: KernelSpec, sizes, steps, form, state: RowsLastState):
    """The digits of the rows, where the products take them."""
    if not form:
        return None
    split = form.allocate_split_state(spec, sizes, steps, int(state.m.shape[0]))
    emit_query_digits(steps, state, split)
    return split


def flash_prefill(spec: KernelSpec, sizes):
    """The flash_prefill kernel's PrimFunc: a task is (entry, KV head, block of rows)."""
    form = _split_form(spec, sizes)
    M = sizes.split_q_block if form else sizes.q_block
    columns = sizes.padded_columns(spec.cache_columns)
    value_columns = spec.cache_columns if form else columns
    steps = _steps(spec, sizes, form)
    BC, key_tile = steps.kv_block, form.KEY_TILE if form else 1

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
        softmax_scale: T.float32,
        softcap: T.float32,
        window: T.int32,
        causal: T.int32,
        norm_epsilon: T.float32,
        rotary: T.int32,
        has_bias: T.int32,
        sink: T.int32,
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
        group: T.let = T.truncdiv(x.output.shape[2], x.key_cache.shape[1])
        total_rows: T.let = x.query.shape[1] * group
        row_blocks: T.let = (total_rows + (M - 1)) // M
        for b, n, i in T.grid(x.query.shape[0], x.key_cache.shape[1], row_blocks):
            with T.sblock("task"):
                ab, an, ai = T.axis.remap("SSS", [b, n, i])
                T.reads()
                T.writes()
                # Bound once: a block axis stands for divisions by run-time sizes wherever it is used.
                vb: T.let = ab
                vn: T.let = an
                vi: T.let = ai
                scalars = T.meta_var(in_nats.in_bits())
                rows = T.meta_var(allocate_row_block(M))
                state = T.meta_var(allocate_state(spec, M, columns, value_columns))
                # Later blocks see more keys: handing them out first balances the threads.
                first_row: T.let = (row_blocks - 1 - vi) * M
                describe_rows(rows, M, first_row, total_rows, group, vn, x.entries, vb, scalars)
                pack_query(spec, x, scalars, rows, vb, vn, M, columns, state.query_t)
                split = T.meta_var(_prepare_rows(spec, sizes, steps, form, state))
                # Found by these names; set here as well, so that their storage is the task's.
                task_rows = T.sblock_alloc_buffer((1,), "int32")
                first_seeing_row = T.sblock_alloc_buffer((1,), "int32")
                block_keys = T.sblock_alloc_buffer((1,), "int32")
                row_keys = T.sblock_alloc_buffer((M,), "int32")
                visible = T.meta_var(VisibleTiles(task_rows, first_seeing_row, block_keys, row_keys))
                valid: T.let = T.min(total_rows - first_row, T.int64(M))
                task_rows[0] = T.Cast("int32", valid)
                first_seeing_row[0] = 0
                block_keys[0] = 0
                row_keys[0] = 0
                past: T.let = x.entries[vb, ENTRY_PAST]
                clear_state(state.m, state.l, state.acc, M)
                first_key: T.let = rows.limits[0] // BC * BC
                end_key: T.let = rows.limits[3]
                for blk in T.serial((T.max(end_key - first_key, 0) + (BC - 1)) // BC):
                    begin: T.let = first_key + blk * BC
                    first_seeing: T.let = first_row_seeing(scalars, begin - past, group, first_row)
                    describe_visible(visible, rows, first_seeing, begin, BC, key_tile)
                    _emit_block(spec, steps, x, scalars, rows, vb, vn, begin, end_key, state, split)
                write_output(spec, x, scalars, rows, vb, vn, valid, state.m, state.l, state.acc)

    return kernel
