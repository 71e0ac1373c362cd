"""Flash attention with query rows as lanes: many rows per KV head (prompts, chunks)."""

from __future__ import annotations

from tvm import te, tirx
from tvm.script import tirx as T

from ..definitions.kv_quantize import CACHE_DTYPES, kv_dequantize
from ..definitions.qk_gemm import qk_gemm_rows_last
from ..definitions.softmax import online_softmax
from ..definitions.sv_gemm import sv_gemm
from ..kernels import KernelSpec
from .arguments import AttentionScalars, declare_attention
from .row_state import clear_state, write_output
from .rows import (
    allocate_row_block,
    describe_rows,
    fold_scale,
    load_query_row,
)
from .score_steps import process_scores
from .splice import alias, emit_step, make_step, splice, whole


def dequantize_step(spec: KernelSpec, rows: int, columns: int, name: str):
    """TE step: cache rows [rows, C] and the last readable row -> [rows, E, columns] float32."""
    cache_rows = te.placeholder((rows, spec.cache_columns), CACHE_DTYPES[spec.cache], name="rows")
    last_row = te.var("last_row", "int32")
    decoded = kv_dequantize(cache_rows, last_row, columns, spec.cache, name)
    return make_step([cache_rows, last_row, decoded])


def qk_rows_last_step(spec: KernelSpec, kv_block: int, columns: int, rows: int, name: str = "qk"):
    query_t = te.placeholder((spec.cache_planes, columns, rows), name="query_t")
    keys = te.placeholder((kv_block, spec.cache_planes, columns), name="keys")
    return make_step([query_t, keys, qk_gemm_rows_last(query_t, keys, name)])


def softmax_rows_last_step(kv_block: int, rows: int):
    scores = te.placeholder((kv_block, rows), name="scores")
    m_old, l_old = (te.placeholder((rows,), name=name) for name in ("m_old", "l_old"))
    outputs = online_softmax(lambda m, t: scores[t, m], (kv_block, rows), kv_block, m_old, l_old, rows_last=True)
    return make_step([scores, m_old, l_old, *outputs])


def sv_rows_last_step(spec: KernelSpec, kv_block: int, columns: int, rows: int):
    p = te.placeholder((kv_block, rows), name="p")
    values = te.placeholder((kv_block, spec.cache_planes, columns), name="values")
    accumulator = te.placeholder((rows, spec.cache_planes, columns), name="acc_old")
    beta = te.placeholder((rows,), name="row_beta")
    return make_step([p, values, accumulator, beta, sv_gemm(lambda m, t: p[t, m], values, accumulator, beta)])


def emit_dequantize(name: str, step, spec: KernelSpec, cache, b, n, key_begin, last_row, rows, target):
    """Decode cache[b, n, key_begin : key_begin + rows] into `target`, reading no row past `last_row`."""
    begin = tirx.Cast("int64", key_begin)
    region = cache[b, n, begin : begin + rows, 0 : spec.cache_columns]
    with T.sblock(f"{name}_step"):
        T.reads(region)
        T.writes(whole(target))
        stride = T.int64()
        shape = (rows, spec.cache_columns)
        block = T.match_buffer(region, shape, cache.dtype, strides=(stride, 1), offset_factor=1, align=1)
        splice(step, [block, last_row, target])


def emit_softmax(step, scores, m, l, alpha):
    """One online-softmax step in place: scores become p, (m, l) move on, alpha is what acc is rescaled by."""
    with T.sblock("softmax_step"):
        T.reads(whole(scores), whole(m), whole(l))
        T.writes(whole(scores), whole(m), whole(l), whole(alpha))
        splice(step, [scores, m, l, alpha, alias(scores), alias(l), alias(m)])


def emit_sv(step, p, values, acc, beta):
    """acc = beta acc + p V in place."""
    with T.sblock("sv_step"):
        T.reads(whole(p), whole(values), whole(acc), whole(beta))
        T.writes(whole(acc))
        splice(step, [p, values, acc, beta, alias(acc)])


def pack_query(spec: KernelSpec, buffers, scalars, rows, b, n, count, columns, query_t):
    fold = T.sblock_alloc_buffer((spec.head_size,))
    row = T.sblock_alloc_buffer((spec.head_size,))
    fold_scale(fold, buffers.k_scale, n, spec.head_size, scalars.softmax_scale)
    with T.serial(0, count) as r:
        load_query_row(
            spec,
            buffers,
            scalars,
            rows,
            b,
            r,
            fold,
            row,
            lambda e, c, value: T.buffer_store(query_t, value, [e, c, r]),
        )
        for padding in range(spec.cache_columns, columns):
            for e in range(spec.cache_planes):
                T.buffer_store(query_t, T.float32(0), [e, padding, r])


def flash_prefill(spec: KernelSpec, sizes):
    """The flash_prefill kernel's PrimFunc: a task is (entry, KV head, block of sizes.q_block rows)."""
    M, BC = sizes.q_block, sizes.kv_block
    E, columns = spec.cache_planes, sizes.padded_columns(spec.cache_columns)
    decode_k = dequantize_step(spec, BC, columns, "dequantize_k")
    decode_v = dequantize_step(spec, BC, columns, "dequantize_v")
    qk = qk_rows_last_step(spec, BC, columns, M)
    softmax = softmax_rows_last_step(BC, M)
    sv = sv_rows_last_step(spec, BC, columns, M)

    @T.prim_func(s_tir=True)
    def kernel(
        query_: T.handle,
        key_cache_: T.handle,
        value_cache_: T.handle,
        past_lengths_: T.handle,
        total_lengths_: T.handle,
        positions_: T.handle,
        cos_: T.handle,
        sin_: T.handle,
        bias_: T.handle,
        head_sink_: T.handle,
        k_scale_: T.handle,
        v_scale_: T.handle,
        output_: T.handle,
        softmax_scale: T.float32,
        softcap: T.float32,
        window: T.int32,
        causal: T.int32,
        rotary: T.int32,
        has_bias: T.int32,
        sink: T.int32,
    ):
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        x = declare_attention(
            spec,
            (
                *(query_, key_cache_, value_cache_, past_lengths_, total_lengths_, positions_, cos_, sin_),
                *(bias_, head_sink_, k_scale_, v_scale_, output_),
            ),
        )
        scalars = T.meta_var(AttentionScalars(softmax_scale, softcap, window, causal, rotary, has_bias, sink))
        group: T.let = T.truncdiv(x.query.shape[2], x.key_cache.shape[1])
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
                rows = T.meta_var(allocate_row_block(M))
                query_t = T.sblock_alloc_buffer((E, columns, M))
                keys = T.sblock_alloc_buffer((BC, E, columns))
                values = T.sblock_alloc_buffer((BC, E, columns))
                scores = T.sblock_alloc_buffer((BC, M))
                acc = T.sblock_alloc_buffer((M, E, columns))
                m = T.sblock_alloc_buffer((M,))
                l = T.sblock_alloc_buffer((M,))
                alpha = T.sblock_alloc_buffer((M,))
                # Later blocks see more keys: handing them out first balances the threads.
                first_row: T.let = (row_blocks - 1 - vi) * M
                total: T.let = x.total_lengths[vb]
                describe_rows(rows, M, first_row, total_rows, group, vn, x.past_lengths[vb], total, scalars)
                pack_query(spec, x, scalars, rows, vb, vn, M, columns, query_t)
                clear_state(m, l, acc, M)
                first_block: T.let = rows.limits[0] // BC
                for blk in T.serial(T.max((rows.limits[3] + (BC - 1)) // BC - first_block, 0)):
                    begin: T.let = (first_block + blk) * BC
                    last: T.let = total - 1 - begin
                    emit_dequantize("dequantize_k", decode_k, spec, x.key_cache, vb, vn, begin, last, BC, keys)
                    emit_step(
                        "qk_step",
                        qk,
                        [query_t, keys, scores],
                        [whole(query_t), whole(keys)],
                        [whole(scores)],
                    )
                    process_scores(scores, x, scalars, rows, 0, vb, begin, True)
                    emit_softmax(softmax, scores, m, l, alpha)
                    emit_dequantize(
                        "dequantize_v",
                        decode_v,
                        spec,
                        x.value_cache,
                        vb,
                        vn,
                        begin,
                        last,
                        BC,
                        values,
                    )
                    emit_sv(sv, scores, values, acc, alpha)
                write_output(spec, x, scalars, rows, vb, vn, T.min(total_rows - first_row, T.int64(M)), m, l, acc)

    return kernel
