"""Steps with query rows as lanes, shared by flash prefill and naive."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import te
from tvm.script import tirx as T

from ..definitions.qk_gemm import qk_gemm_rows_last
from ..definitions.softmax import online_softmax
from ..definitions.sv_gemm import sv_gemm
from ..kernels import KernelSpec
from .cache_block import CacheBlock, cache_region, decoded_cache, match_cache
from .rows import fold_scale, load_query_row
from .score_steps import process_scores
from .splice import alias, make_step, splice, whole
from .visible_values import allocate_value_check, check_values, emit_values


class RowsLastSteps(NamedTuple):
    """The TE steps of a block of keys: QK, online softmax, SV; QK and SV decode the cache rows they take.

    suffix: ends the names of their blocks, which a schedule finds them by.
    """

    qk: Any
    softmax: Any
    sv: Any
    kv_block: int
    suffix: str


def _qk_step(spec: KernelSpec, kv_block: int, columns: int, rows: int, suffix: str):
    cache_rows, last_row, keys = decoded_cache(spec, kv_block, columns, "dequantize_k")
    query_t = te.placeholder((spec.cache_planes, columns, rows), name="query_t")
    return make_step([cache_rows, last_row, query_t, qk_gemm_rows_last(query_t, keys)], suffix)


def _softmax_step(kv_block: int, rows: int, suffix: str, bits: bool):
    scores = te.placeholder((kv_block, rows), name="scores")
    m_old, l_old = (te.placeholder((rows,), name=name) for name in ("m_old", "l_old"))
    at = lambda m, t: scores[t, m]  # noqa: E731
    outputs = online_softmax(at, (kv_block, rows), kv_block, m_old, l_old, rows_last=True, bits=bits)
    return make_step([scores, m_old, l_old, *outputs], suffix)


def _sv_step(spec: KernelSpec, kv_block: int, columns: int, rows: int, suffix: str):
    cache_rows, last_row, values = decoded_cache(spec, kv_block, columns, "dequantize_v")
    p = te.placeholder((kv_block, rows), name="p")
    accumulator = te.placeholder((rows, spec.cache_planes, columns), name="acc_old")
    beta = te.placeholder((rows,), name="row_beta")
    result = sv_gemm(lambda m, t: p[t, m], values, accumulator, beta)
    return make_step([cache_rows, last_row, p, accumulator, beta, result], suffix)


def rows_last_steps(
    spec: KernelSpec, kv_block: int, columns: int, rows: int, suffix: str = "", bits: bool = True
) -> RowsLastSteps:
    """The steps of blocks of so many keys; bits: the unit of scores."""
    return RowsLastSteps(
        _qk_step(spec, kv_block, columns, rows, suffix),
        _softmax_step(kv_block, rows, suffix, bits),
        _sv_step(spec, kv_block, columns, rows, suffix),
        kv_block,
        suffix,
    )


class RowsLastState(NamedTuple):
    """Buffers of a task: query_t [E, columns, M], m, l, alpha [M], acc [M, E, value columns], the check of values."""

    query_t: Any
    m: Any
    l: Any
    alpha: Any
    acc: Any
    largest: Any


def allocate_state(spec: KernelSpec, rows: int, columns: int, value_columns: int) -> RowsLastState:
    E = spec.cache_planes
    m, l, alpha = (T.sblock_alloc_buffer((rows,)) for _ in range(3))
    return RowsLastState(
        T.sblock_alloc_buffer((E, columns, rows)),
        m,
        l,
        alpha,
        T.sblock_alloc_buffer((rows, E, value_columns)),
        allocate_value_check(spec),
    )


def emit_scores(spec, steps: RowsLastSteps, x, scalars, rows, block: CacheBlock, state: RowsLastState):
    """Allocate and fill scores [T_block, M] of a block: QK, softcap, bias, mask."""
    scores = T.sblock_alloc_buffer((steps.kv_block, state.m.shape[0]))
    region = cache_region(spec, block)
    with T.sblock(f"qk{steps.suffix}_step"):
        T.reads(region, whole(state.query_t))
        T.writes(whole(scores))
        splice(
            steps.qk, [match_cache(spec, region, block.cache.dtype, block.kv_block), block.last, state.query_t, scores]
        )
    process_scores(spec, scores, x, scalars, rows, 0, block.b, block.begin, True, steps.suffix)
    return scores


def emit_softmax(steps: RowsLastSteps, scores, state: RowsLastState):
    """One online-softmax step in place: scores become p, (m, l) move on, alpha is what acc is rescaled by."""
    m, l, alpha = state.m, state.l, state.alpha
    with T.sblock(f"softmax{steps.suffix}_step"):
        T.reads(whole(scores), whole(m), whole(l))
        T.writes(whole(scores), whole(m), whole(l), whole(alpha))
        splice(steps.softmax, [scores, m, l, alpha, alias(scores), alias(l), alias(m)])


def emit_sv(spec: KernelSpec, steps: RowsLastSteps, block: CacheBlock, rows, p, state: RowsLastState):
    """acc = alpha acc + p V in place."""
    acc, alpha = state.acc, state.alpha

    def blocked() -> None:
        region = cache_region(spec, block)
        with T.sblock(f"sv{steps.suffix}_step"):
            T.reads(region, whole(p), whole(acc), whole(alpha))
            T.writes(whole(acc))
            splice(
                steps.sv,
                [match_cache(spec, region, block.cache.dtype, block.kv_block), block.last, p, acc, alpha, alias(acc)],
            )

    check_values(spec, block, rows, state.largest)
    tile = (0, int(acc.shape[0]))
    emit_values(spec, block, state.largest, rows, lambda r, t: p[t, r], acc, alpha, tile, blocked)


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
