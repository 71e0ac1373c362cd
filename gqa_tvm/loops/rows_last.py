"""Steps with query rows as lanes, shared by flash prefill and naive."""

from __future__ import annotations

from tvm import te
from tvm.script import tirx as T

from ..definitions.qk_gemm import qk_gemm_rows_last
from ..definitions.softmax import online_softmax
from ..definitions.sv_gemm import sv_gemm
from ..kernels import KernelSpec
from .cache_block import cache_region, decoded_cache, match_cache
from .rows import fold_scale, load_query_row
from .splice import alias, make_step, splice, whole
from .visible_values import ValueBlock, emit_values


def dequantize_step(spec: KernelSpec, rows: int, columns: int, name: str):
    """TE step: cache rows [rows, C] and the last readable row -> [rows, E, columns] float32."""
    return make_step([*decoded_cache(spec, rows, columns, name)])


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
    region = cache_region(spec, cache, b, n, key_begin, rows)
    with T.sblock(f"{name}_step"):
        T.reads(region)
        T.writes(whole(target))
        splice(step, [match_cache(spec, region, cache.dtype, rows), last_row, target])


def emit_softmax(step, scores, m, l, alpha):
    """One online-softmax step in place: scores become p, (m, l) move on, alpha is what acc is rescaled by."""
    with T.sblock("softmax_step"):
        T.reads(whole(scores), whole(m), whole(l))
        T.writes(whole(scores), whole(m), whole(l), whole(alpha))
        splice(step, [scores, m, l, alpha, alias(scores), alias(l), alias(m)])


def emit_sv(spec: KernelSpec, decode_v, sv, block: ValueBlock, largest, rows, p, values, acc, beta):
    """acc = beta acc + p V in place; `values` is scratch for the decoded block."""

    def blocked() -> None:
        where = (block.cache, block.b, block.n, block.begin, block.last, block.kv_block)
        emit_dequantize("dequantize_v", decode_v, spec, *where, values)
        with T.sblock("sv_step"):
            T.reads(whole(p), whole(values), whole(acc), whole(beta))
            T.writes(whole(acc))
            splice(sv, [p, values, acc, beta, alias(acc)])

    tile = (0, int(acc.shape[0]))
    emit_values(spec, block, largest, rows, lambda r, t: p[t, r], acc, beta, tile, blocked)


def pack_query(spec: KernelSpec, buffers, scalars, rows, b, n, count, columns, query_t):
    """query_t [E, columns, rows]: the task's rows, ready to be multiplied by decoded keys."""
    E = spec.cache_planes
    fold = T.sblock_alloc_buffer((spec.head_size,))
    row = T.sblock_alloc_buffer((spec.head_size,))
    query = T.sblock_alloc_buffer((E, count, columns))
    fold_scale(fold, buffers.k_scale, n, spec.head_size, scalars.softmax_scale)
    with T.serial(0, count) as r:
        store = lambda e, c, value: T.buffer_store(query, value, [e, r, c])  # noqa: E731
        load_query_row(spec, buffers, scalars, rows, b, r, fold, row, store)
        for padding in range(spec.cache_columns, columns):
            for e in range(E):
                store(e, padding, T.float32(0))
    with T.sblock("transpose_query_step"):
        T.reads(whole(query))
        T.writes(whole(query_t))
        with T.grid(E, columns, count) as (e, c, r):
            with T.sblock("transpose_query"):
                ve, vc, vr = T.axis.spatial(E, e), T.axis.spatial(columns, c), T.axis.spatial(count, r)
                T.buffer_store(query_t, query[ve, vr, vc], [ve, vc, vr])
