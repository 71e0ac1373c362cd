"""Attention without an online softmax: one pass for the row maxima, a second for probabilities and values.

Scores are computed twice rather than stored, so that scratch stays one block whatever T is. The only path that gives
output_qk.
"""

from __future__ import annotations

from tvm import te, tirx
from tvm.script import tirx as T

from ..kernel_arguments import ENTRY_TOTAL, QK_AFTER_SOFTMAX, QK_BEFORE_SOFTMAX
from ..kernels import KernelSpec
from .arguments import AttentionScalars, buffer_parameter, declare_attention, dimension
from .cache_block import CacheBlock
from .row_state import clear_state, write_output
from .rows import allocate_row_block, describe_rows, row_factor
from .rows_last import (
    allocate_state,
    emit_scores,
    emit_softmax,
    emit_sv,
    pack_query,
    rows_last_steps,
)
from .splice import alias, make_step, splice, whole


def row_maximum_step(kv_block: int, rows: int):
    """TE step: running maximum [M] over a block of scores [T_block, M]."""
    scores = te.placeholder((kv_block, rows), name="scores")
    m_old = te.placeholder((rows,), name="m_old")
    t = te.reduce_axis((0, kv_block), name="t")
    block = te.compute((rows,), lambda m: te.max(scores[t, m], axis=t), name="row_max")
    m_new = te.compute((rows,), lambda m: tirx.max(m_old[m], block[m]), name="row_m_new")
    return make_step([scores, m_old, m_new])


def _emit_maximum(step, scores, m):
    with T.sblock("row_max_step"):
        T.reads(whole(scores), whole(m))
        T.writes(whole(m))
        splice(step, [scores, m, alias(m)])


def _store_qk(rows, count, begin, kv_block: int, b, scores, output_qk):
    """Copy the visible scores or probabilities of a block; masked columns keep the caller's zeros."""
    with T.serial(0, count) as r:
        first = T.bind(tirx.max(rows.first_key[r], begin))
        end = T.bind(tirx.min(rows.end_key[r], begin + kv_block))
        with T.serial(0, tirx.max(end - first, T.int32(0))) as i:
            key = first + i
            where = [b, *_row_index(rows, r), tirx.Cast("int64", key)]
            T.buffer_store(output_qk, scores[key - begin, r], where)


def _row_index(rows, r):
    return tirx.Cast("int64", rows.head[r]), tirx.Cast("int64", rows.token[r])


def _normalise_qk(spec, buffers, scalars, rows, count, b, m, l, output_qk):
    state = T.sblock_alloc_buffer((4,))
    with T.serial(0, count) as r:
        row_factor(spec, buffers, scalars, rows.head[r], m[r], l[r], state)
        first = T.bind(rows.first_key[r])
        with T.serial(0, tirx.max(rows.end_key[r] - first, T.int32(0))) as i:
            where = (b, *_row_index(rows, r), tirx.Cast("int64", first + i))
            T.buffer_store(output_qk, output_qk[where] * state[0], list(where))


def _declare_output_qk(handle):
    axes = ("batch", "heads", "tokens", "keys")
    return buffer_parameter("output_qk", handle, tuple(dimension(f"qk_{axis}") for axis in axes))


def naive(spec: KernelSpec, sizes):
    """The naive kernel's PrimFunc; parameters as `AttentionBuffers`, output_qk [B, N, S, T], scalars, qk_output."""
    M, BC = sizes.naive_q_block, sizes.kv_block
    columns = sizes.padded_columns(spec.cache_columns)
    first_pass = rows_last_steps(spec, BC, columns, M, "_max", bits=False)
    second_pass = rows_last_steps(spec, BC, columns, M, bits=False)
    maximum = row_maximum_step(BC, M)

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
        output_qk_: T.handle,
        softmax_scale: T.float32,
        softcap: T.float32,
        window: T.int32,
        causal: T.int32,
        norm_epsilon: T.float32,
        rotary: T.int32,
        has_bias: T.int32,
        sink: T.int32,
        qk_output: T.int32,
    ):
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        x = declare_attention(
            spec,
            (
                *(query_, key_cache_, value_cache_, entries_, positions_, cos_, sin_),
                *(bias_, head_sink_, norm_weight_, k_scale_, v_scale_, output_),
            ),
        )
        output_qk = T.meta_var(_declare_output_qk(output_qk_))
        scalars = T.meta_var(
            AttentionScalars(softmax_scale, softcap, window, causal, norm_epsilon, rotary, has_bias, sink)
        )
        group: T.let = T.truncdiv(x.output.shape[2], x.key_cache.shape[1])
        total_rows: T.let = x.query.shape[1] * group
        for b, n, i in T.grid(x.query.shape[0], x.key_cache.shape[1], (total_rows + (M - 1)) // M):
            with T.sblock("task"):
                ab, an, ai = T.axis.remap("SSS", [b, n, i])
                T.reads()
                T.writes()
                vb: T.let = ab
                vn: T.let = an
                first_row: T.let = ai * M
                rows = T.meta_var(allocate_row_block(M))
                # With the final maximum in m the online step leaves m alone, and its alpha is 1.
                state = T.meta_var(allocate_state(spec, M, columns, columns))
                total: T.let = x.entries[vb, ENTRY_TOTAL]
                valid: T.let = T.min(total_rows - first_row, T.int64(M))
                describe_rows(rows, M, first_row, total_rows, group, vn, x.entries, vb, scalars)
                pack_query(spec, x, scalars, rows, vb, vn, M, columns, state.query_t)
                clear_state(state.m, state.l, state.acc, M)
                first_block: T.let = rows.limits[0] // BC
                blocks: T.let = T.max((rows.limits[3] + (BC - 1)) // BC - first_block, 0)
                for blk in T.serial(blocks):
                    begin: T.let = (first_block + blk) * BC
                    block = T.meta_var(CacheBlock(x.key_cache, vb, vn, begin, total - 1 - begin, BC))
                    scores = T.meta_var(emit_scores(spec, first_pass, x, scalars, rows, block, state))
                    _emit_maximum(maximum, scores, state.m)
                for blk in T.serial(blocks):
                    begin: T.let = (first_block + blk) * BC
                    block = T.meta_var(CacheBlock(x.key_cache, vb, vn, begin, total - 1 - begin, BC))
                    scores = T.meta_var(emit_scores(spec, second_pass, x, scalars, rows, block, state))
                    if qk_output == QK_BEFORE_SOFTMAX:
                        _store_qk(rows, valid, begin, BC, vb, scores, output_qk)
                    emit_softmax(second_pass, scores, state)
                    if qk_output == QK_AFTER_SOFTMAX:
                        _store_qk(rows, valid, begin, BC, vb, scores, output_qk)
                    values = T.meta_var(block._replace(cache=x.value_cache))
                    emit_sv(spec, second_pass, values, rows, scores, state)
                if qk_output == QK_AFTER_SOFTMAX:
                    _normalise_qk(spec, x, scalars, rows, valid, vb, state.m, state.l, output_qk)
                write_output(spec, x, scalars, rows, vb, vn, valid, state.m, state.l, state.acc)

    return kernel
