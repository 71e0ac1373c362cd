"""Steps of flash_prefill by integer dot products; the rest of the kernel is `rows_last`."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import te
from tvm.script import tirx as T

from ..definitions import split_integer as si
from ..definitions import split_prefill as sp
from ..definitions.split_vectors import RowVectors
from ..kernels import KernelSpec
from .cache_block import CacheBlock, cache_region, match_cache
from .rows_last import RowsLastState
from .score_steps import process_scores
from .splice import alias, make_step, splice, whole
from .split_rows import stored_rows


class SplitPrefillSteps(NamedTuple):
    """The TE steps of a task (query) and of a block of keys."""

    query: Any
    qk: Any
    softmax: Any
    sv: Any
    kv_block: int


class SplitPrefillState(NamedTuple):
    """What a task holds besides `RowsLastState`: its rows' digits, and the weight of a block's probabilities [M]."""

    words: Any  # [D, E, C / 4, M] int32
    offsets: Any  # [D, M] int32
    down: Any  # [M] float32
    weight: Any  # [M] float32


def query_step(spec: KernelSpec, sizes, rows: int, digits: int):
    padded = sizes.padded_columns(spec.cache_columns)
    query_t = te.placeholder((spec.cache_planes, padded, rows), name="query_t")
    return make_step([query_t, *sp.query_words(query_t, spec.cache_columns, spec.cache, digits)])


def _qk_step(spec: KernelSpec, kv_block: int, rows: int, digits: int):
    cache_rows, last_row = stored_rows(spec, kv_block)
    words = te.placeholder((digits, spec.cache_planes, spec.cache_columns // 4, rows), "int32", name="words")
    offsets = te.placeholder((digits, rows), "int32", name="offsets")
    down = te.placeholder((rows,), name="down")
    scores = sp.qk_gemm_words(words, offsets, down, sp.key_codes(cache_rows, last_row, spec.cache_planes))
    return make_step([cache_rows, last_row, words, offsets, down, scores])


def softmax_step(kv_block: int, rows: int):
    scores = te.placeholder((kv_block, rows), name="scores")
    m_old, l_old = (te.placeholder((rows,), name=name) for name in ("m_old", "l_old"))
    return make_step([scores, m_old, l_old, *sp.block_softmax(scores, m_old, l_old)])


def _sv_step(spec: KernelSpec, sizes, kv_block: int, rows: int, digits: int):
    vectors = RowVectors(sizes.value_width(spec.cache_columns), spec.cache_columns)
    cache_rows, last_row = stored_rows(spec, kv_block)
    p = te.placeholder((kv_block, rows), name="p")
    accumulator = te.placeholder((rows, spec.cache_planes, spec.cache_columns), name="acc_old")
    beta, weight = (te.placeholder((rows,), name=name) for name in ("row_beta", "row_weight"))
    code_at = sp.value_vectors(cache_rows, last_row, spec.cache_planes, vectors)
    p_words = sp.probability_words(p, digits, sizes.lanes)
    result = sp.sv_gemm_words(p_words, code_at, digits, accumulator, beta, weight)
    return make_step([cache_rows, last_row, p, accumulator, beta, weight, result])


def split_prefill_steps(spec: KernelSpec, sizes, kv_block: int, rows: int) -> SplitPrefillSteps:
    query_digits, probability_digits = si.prefill_digits(spec.precision)
    return SplitPrefillSteps(
        query_step(spec, sizes, rows, query_digits),
        _qk_step(spec, kv_block, rows, query_digits),
        softmax_step(kv_block, rows),
        _sv_step(spec, sizes, kv_block, rows, probability_digits),
        kv_block,
    )


def allocate_split_state(spec: KernelSpec, rows: int) -> SplitPrefillState:
    digits, _ = si.prefill_digits(spec.precision)
    shape = (digits, spec.cache_planes, spec.cache_columns // 4, rows)
    return SplitPrefillState(
        T.sblock_alloc_buffer(shape, "int32"),
        T.sblock_alloc_buffer((digits, rows), "int32"),
        T.sblock_alloc_buffer((rows,)),
        T.sblock_alloc_buffer((rows,)),
    )


def emit_query_words(steps: SplitPrefillSteps, state: RowsLastState, split: SplitPrefillState) -> None:
    """The digits of the task's rows."""
    with T.sblock("query_words_step"):
        T.reads(whole(state.query_t))
        T.writes(*(whole(operand) for operand in split[:-1]))
        splice(steps.query, [state.query_t, *split[:-1]])


def _emit_scores(spec, steps: SplitPrefillSteps, x, scalars, rows, block: CacheBlock, split: SplitPrefillState):
    scores = T.sblock_alloc_buffer((steps.kv_block, split.down.shape[0]))
    region = cache_region(spec, block)
    # All but the weight.
    operands = split[:-1]
    with T.sblock("qk_step"):
        T.reads(region, *(whole(operand) for operand in operands))
        T.writes(whole(scores))
        cache_rows = match_cache(spec, region, block.cache.dtype, block.kv_block)
        splice(steps.qk, [cache_rows, block.last, *operands, scores])
    process_scores(spec, scores, x, scalars, rows, 0, block.b, block.begin, True)
    return scores


def _emit_softmax(steps: SplitPrefillSteps, scores, state: RowsLastState, split: SplitPrefillState) -> None:
    m, l, alpha = state.m, state.l, state.alpha
    with T.sblock("softmax_step"):
        T.reads(whole(scores), whole(m), whole(l))
        T.writes(whole(scores), whole(m), whole(l), whole(alpha), whole(split.weight))
        splice(steps.softmax, [scores, m, l, alpha, split.weight, alias(scores), alias(l), alias(m)])


def _emit_sv(spec, steps: SplitPrefillSteps, block: CacheBlock, p, state: RowsLastState, split: SplitPrefillState):
    region = cache_region(spec, block)
    acc, alpha, weight = state.acc, state.alpha, split.weight
    with T.sblock("sv_step"):
        T.reads(region, *(whole(operand) for operand in (p, acc, alpha, weight)))
        T.writes(whole(acc))
        cache_rows = match_cache(spec, region, block.cache.dtype, block.kv_block)
        splice(steps.sv, [cache_rows, block.last, p, acc, alpha, weight, alias(acc)])


def emit_split_block(
    spec, steps: SplitPrefillSteps, x, scalars, rows, b, n, begin, end, state: RowsLastState, split: SplitPrefillState
) -> None:
    """The online softmax over the keys begin .. begin + steps.kv_block, which no row sees from `end` on."""
    keys = CacheBlock(x.key_cache, b, n, begin, end - 1 - begin, steps.kv_block)
    scores = _emit_scores(spec, steps, x, scalars, rows, keys, split)
    _emit_softmax(steps, scores, state, split)
    _emit_sv(spec, steps, keys._replace(cache=x.value_cache), scores, state, split)
