"""Steps of flash_prefill by integer dot products; the rest of the kernel is `rows_last`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm import te
from tvm.script import tirx as T

from ..definitions import split_integer as si
from ..definitions import split_prefill as sp
from ..definitions.split_vectors import KEYS_PER_DOT, RowVectors
from ..kernels import KernelSpec
from ..schedules.block_sizes import largest_divisor
from ..schedules.steps import FIRST_ROW, LAST_KEY
from .cache_block import CacheBlock, cache_region, match_cache
from .rows_last import RowsLastState
from .score_steps import process_scores
from .splice import alias, make_step, splice, whole
from .split_rows import stored_rows

# Keys that probabilities and values are taken by.
KEY_TILE = KEYS_PER_DOT
# Vectors of rows of a tile, by digits of a query row: those of one register tile, whose sums leave room for 6 words and
# a broadcast. Its scores stay in the first-level cache from one step to the next.
_TILE_VECTORS = {1: 3, 2: 3, 3: 2}


class SoftmaxSteps(NamedTuple):
    """The TE steps of a tile of rows and a block of keys (maximum, denominator), or KEYS_PER_DOT of them."""

    maximum: Any
    probabilities: Any
    denominator: Any


class SplitPrefillSteps(NamedTuple):
    """The TE steps of a block of keys (keys, sv), of a tile of `rows` rows (query) and of a tile for a block of keys.

    digits_axes: of the keys and the rows in the digits of probabilities.
    """

    query: Any
    keys: Any
    qk: Any
    softmax: SoftmaxSteps
    sv: Any
    kv_block: int
    rows: int
    digits_axes: tuple[int, int]


class SplitPrefillState(NamedTuple):
    """What a task of M rows in tiles of R holds besides `RowsLastState`."""

    # Of its rows, tile after tile: words [M / R x D, E, C / 4, R] int32, starts [M / R x D, R] int32, down [M] float32.
    query: tuple[Any, ...]
    # Of a block of keys: its codes [T_block, E, C] uint8, and of its probabilities the weight [M] and the digits
    # [T_block / 4, M / lanes, 4, 4 lanes] uint8.
    codes: Any
    weight: Any
    p_digits: Any


def query_step(spec: KernelSpec, sizes, rows: int, digits: int):
    padded = sizes.padded_columns(spec.cache_columns)
    query_t = te.placeholder((spec.cache_planes, padded, rows), name="query_t")
    return make_step([query_t, *sp.query_words(query_t, spec.cache_columns, spec.cache, digits)])


def query_operands(spec: KernelSpec, rows: int):
    """Tensors of what a tile of rows is multiplied as: words, starts, down."""
    digits, _ = si.prefill_digits(spec.precision)
    words = te.placeholder((digits, spec.cache_planes, spec.cache_columns // 4, rows), "int32", name="words")
    starts = te.placeholder((digits, rows), "int32", name="starts")
    return words, starts, te.placeholder((rows,), name="down")


def _keys_step(spec: KernelSpec, kv_block: int):
    cache_rows, last_row = stored_rows(spec, kv_block)
    return make_step([cache_rows, last_row, sp.key_codes(cache_rows, last_row, spec.cache_planes)])


def _qk_step(spec: KernelSpec, kv_block: int, rows: int):
    codes = te.placeholder((kv_block, spec.cache_planes, spec.cache_columns), "uint8", name="codes")
    operands = query_operands(spec, rows)
    return make_step([codes, *operands, sp.qk_gemm_words(*operands, codes)])


def tile_rows(spec: KernelSpec, rows: int, lanes: int) -> int:
    """Rows of a tile, of a task that has so many."""
    return lanes * largest_divisor(rows // lanes, _TILE_VECTORS[si.prefill_digits(spec.precision)[0]])


def softmax_steps(kv_block: int, rows: int, digits_of) -> SoftmaxSteps:
    """digits_of: function of probabilities [KEYS_PER_DOT, M] to their digits."""
    row = lambda name: te.placeholder((rows,), name=name)  # noqa: E731
    scores = te.placeholder((kv_block, rows), name="scores")
    maximum = [scores, m_old := row("m_old"), *sp.block_start(scores, m_old)]
    some = te.placeholder((KEYS_PER_DOT, rows), name="scores")
    ins = some, row("largest"), row("sum_old")
    p, total = sp.block_probabilities(*ins)
    factors = row("l_old"), row("alpha"), row("total"), row("weight")
    denominator = [*factors, sp.block_denominator(*factors)]
    return SoftmaxSteps(make_step(maximum), make_step([*ins, total, digits_of(p)]), make_step(denominator))


def _sv_step(spec: KernelSpec, sizes, kv_block: int, rows: int):
    vectors = RowVectors(sizes.value_width(spec.cache_columns), spec.cache_columns)
    cache_rows, last_row = stored_rows(spec, kv_block)
    p_words = te.placeholder(sp.probability_shape(kv_block, rows, sizes.lanes), "uint8", name="p_words")
    accumulator = te.placeholder((rows, spec.cache_planes, spec.cache_columns), name="acc_old")
    beta, weight = (te.placeholder((rows,), name=name) for name in ("row_beta", "row_weight"))
    code_at = sp.value_vectors(cache_rows, last_row, spec.cache_planes, vectors)
    digits = si.prefill_digits(spec.precision)[1]
    result = sp.sv_gemm_words(p_words, code_at, digits, accumulator, beta, weight)
    return make_step([cache_rows, last_row, p_words, accumulator, beta, weight, result])


def split_prefill_steps(spec: KernelSpec, sizes, kv_block: int, rows: int) -> SplitPrefillSteps:
    tile = tile_rows(spec, rows, sizes.lanes)
    products = _keys_step(spec, kv_block), _qk_step(spec, kv_block, tile), _sv_step(spec, sizes, kv_block, rows)
    return steps_around(spec, sizes, kv_block, tile, *products)


def steps_around(spec: KernelSpec, sizes, kv_block: int, tile: int, keys, qk, sv) -> SplitPrefillSteps:
    """The steps of a kernel with these products, for tiles of so many rows."""
    query_digits, probability_digits = si.prefill_digits(spec.precision)
    words = lambda p: sp.probability_words(p, probability_digits, sizes.lanes)  # noqa: E731
    query, softmax = query_step(spec, sizes, tile, query_digits), softmax_steps(kv_block, tile, words)
    return SplitPrefillSteps(query, keys, qk, softmax, sv, kv_block, tile, digits_axes=(0, 1))


def allocate_split_state(spec: KernelSpec, sizes, steps: SplitPrefillSteps, rows: int) -> SplitPrefillState:
    digits, _ = si.prefill_digits(spec.precision)
    of_tiles = digits * (rows // steps.rows)
    allocate = T.sblock_alloc_buffer
    words = allocate((of_tiles, spec.cache_planes, spec.cache_columns // 4, steps.rows), "int32")
    return SplitPrefillState(
        (words, allocate((of_tiles, steps.rows), "int32"), allocate((rows,))),
        allocate((steps.kv_block, spec.cache_planes, spec.cache_columns), "uint8"),
        allocate((rows,)),
        allocate(sp.probability_shape(steps.kv_block, rows, sizes.lanes), "uint8"),
    )


def emit_query_digits(steps: SplitPrefillSteps, state: RowsLastState, split: SplitPrefillState) -> None:
    """The digits of the task's rows."""
    tiles = int(state.m.shape[0]) // steps.rows
    with T.serial(0, tiles) as tile:
        with T.sblock("query_digits_step"):
            T.reads(whole(state.query_t))
            T.writes(*(whole(operand) for operand in split.query))
            splice(steps.query, [_part(state.query_t, {2: (tile, tiles)}), *_query_of(split, (tile, tiles))])


def _query_of(split: SplitPrefillState, tile):
    return [_part(operand, {0: tile}) for operand in split.query]


def _emit_codes(spec, steps: SplitPrefillSteps, block: CacheBlock, split: SplitPrefillState) -> None:
    region = cache_region(spec, block)
    with T.sblock("codes_step"):
        T.reads(region)
        T.writes(whole(split.codes))
        splice(steps.keys, [match_cache(spec, region, block.cache.dtype, block.kv_block), block.last, split.codes])


def _emit_scores(spec, steps: SplitPrefillSteps, x, scalars, rows, block: CacheBlock, split, tile):
    """Scores [T_block, R] of a tile of rows, (which, of how many)."""
    scores = T.sblock_alloc_buffer((steps.kv_block, steps.rows))
    with T.sblock("qk_step"):
        T.reads(*(whole(operand) for operand in (split.codes, *split.query)))
        T.writes(whole(scores))
        splice(steps.qk, [split.codes, *_query_of(split, tile), scores])
    first_row = T.bind(tile[0] * steps.rows)
    process_scores(spec, scores, x, scalars, rows, first_row, block.b, block.begin, True)
    return scores


def _emit_softmax(steps: SplitPrefillSteps, scores, state: RowsLastState, split: SplitPrefillState, tile) -> None:
    """Scores of a tile of rows become the digits of probabilities."""
    largest, total = (T.sblock_alloc_buffer((steps.rows,)) for _ in range(2))
    states = state.m, state.l, state.alpha, split.weight
    m, l, alpha, weight = (lambda b=buffer: _part(b, {0: tile}) for buffer in states)
    with T.sblock("maximum_step"):
        T.reads(whole(scores), whole(state.m))
        T.writes(*(whole(buffer) for buffer in (largest, state.alpha, split.weight, total, state.m)))
        splice(steps.softmax.maximum, [scores, m(), largest, alpha(), weight(), total, m()])
    quads = steps.kv_block // KEYS_PER_DOT
    with T.serial(0, quads, annotations={LAST_KEY: steps.kv_block}) as quad:
        with T.sblock("probabilities_step"):
            T.reads(*(whole(buffer) for buffer in (scores, largest, total)))
            T.writes(whole(total), whole(split.p_digits))
            some = _part(scores, {0: (quad, quads)})
            digits = _part(split.p_digits, dict(zip(steps.digits_axes, ((quad, quads), tile), strict=True)))
            splice(steps.softmax.probabilities, [some, largest, total, alias(total), digits])
    with T.sblock("denominator_step"):
        T.reads(*(whole(buffer) for buffer in (state.l, state.alpha, total, split.weight)))
        T.writes(whole(state.l))
        splice(steps.softmax.denominator, [l(), alpha(), total, weight(), l()])


def _part(buffer, parts):
    """View inside the current block of one of equal parts of a buffer; parts: {axis: (which part, of how many)}."""
    extents = [int(extent) for extent in buffer.shape]
    strides = tuple(math.prod(extents[axis + 1 :]) for axis in range(len(extents)))
    region = []
    for axis, extent in enumerate(extents):
        i, count = parts.get(axis, (0, 1))
        extents[axis] = extent // count
        region.append(slice(i * extents[axis], (i + 1) * extents[axis]))
    return T.match_buffer(buffer[tuple(region)], tuple(extents), buffer.dtype, strides=strides, offset_factor=1)


def _emit_sv(spec, steps: SplitPrefillSteps, block: CacheBlock, state: RowsLastState, split: SplitPrefillState):
    region = cache_region(spec, block)
    acc, alpha, weight = state.acc, state.alpha, split.weight
    with T.sblock("sv_step"):
        T.reads(region, *(whole(operand) for operand in (split.p_digits, acc, alpha, weight)))
        T.writes(whole(acc))
        cache_rows = match_cache(spec, region, block.cache.dtype, block.kv_block)
        splice(steps.sv, [cache_rows, block.last, split.p_digits, acc, alpha, weight, alias(acc)])


def emit_split_block(
    spec, steps: SplitPrefillSteps, x, scalars, rows, b, n, begin, end, state: RowsLastState, split: SplitPrefillState
) -> None:
    """The online softmax over the keys begin .. begin + steps.kv_block, which no row sees from `end` on."""
    keys = CacheBlock(x.key_cache, b, n, begin, end - 1 - begin, steps.kv_block)
    _emit_codes(spec, steps, keys, split)
    count = int(state.m.shape[0])
    with T.serial(0, count // steps.rows, annotations={FIRST_ROW: count}) as i:
        tile = i, count // steps.rows
        scores = _emit_scores(spec, steps, x, scalars, rows, keys, split, tile)
        _emit_softmax(steps, scores, state, split, tile)
    _emit_sv(spec, steps, keys._replace(cache=x.value_cache), state, split)
