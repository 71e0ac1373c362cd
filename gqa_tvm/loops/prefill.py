"""Flash attention with query rows as lanes: many rows per KV head (prompts, chunks)."""

from __future__ import annotations

from tvm.script import tirx as T

from ..kernel_arguments import ENTRY_TOTAL
from ..kernels import KernelSpec
from .arguments import AttentionScalars, declare_attention
from .row_state import clear_state, write_output
from .rows import allocate_row_block, describe_rows
from .rows_last import (
    dequantize_step,
    emit_dequantize,
    emit_softmax,
    emit_sv,
    pack_query,
    qk_rows_last_step,
    softmax_rows_last_step,
    sv_rows_last_step,
)
from .score_steps import block_is_visible, process_scores
from .splice import emit_step, whole
from .visible_values import ValueBlock, allocate_value_check, check_values


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
        scalars = T.meta_var(
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
                rows = T.meta_var(allocate_row_block(M))
                query_t = T.sblock_alloc_buffer((E, columns, M))
                keys = T.sblock_alloc_buffer((BC, E, columns))
                values = T.sblock_alloc_buffer((BC, E, columns))
                scores = T.sblock_alloc_buffer((BC, M))
                acc = T.sblock_alloc_buffer((M, E, columns))
                m = T.sblock_alloc_buffer((M,))
                l = T.sblock_alloc_buffer((M,))
                largest = T.meta_var(allocate_value_check(spec))
                alpha = T.sblock_alloc_buffer((M,))
                # Later blocks see more keys: handing them out first balances the threads.
                first_row: T.let = (row_blocks - 1 - vi) * M
                total: T.let = x.entries[vb, ENTRY_TOTAL]
                describe_rows(rows, M, first_row, total_rows, group, vn, x.entries, vb, scalars)
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
                    process_scores(spec, scores, x, scalars, rows, 0, vb, begin, True)
                    emit_softmax(softmax, scores, m, l, alpha)
                    block = T.meta_var(ValueBlock(x.value_cache, vb, vn, begin, last, BC))
                    check_values(spec, block, block_is_visible(rows, begin, BC), largest)
                    emit_sv(spec, decode_v, sv, block, largest, rows, scores, values, acc, alpha)
                write_output(spec, x, scalars, rows, vb, vn, T.min(total_rows - first_row, T.int64(M)), m, l, acc)

    return kernel
