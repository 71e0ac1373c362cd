"""Integer dot products with the query rows as lanes: many rows per KV head.

As `split_integer`, with a query row in `digits` of 8 bits and the probabilities of a block of keys relative to the
largest of them, in fixed point of 2^23 (three digits) or 2^15 (two). A dot product takes 4 columns (QK) or 4 keys (SV):
of one operand 4 bytes that serve 16 lanes, of the other 4 bytes in each lane.

A query vector is a word of 4 columns in each lane. Probabilities [T_block / 4, M / 16, 4, 64]: row 16 R + 4 L + j of
four keys t is at [t / 4, R, j, 16 L + 4 s + key], s = 0 the least significant digit: what two rounds of unpack
instructions make of four vectors of 16 rows. All this with 8 rows and 32 bytes where vectors are half as long; values
may come in other vectors than rows.
"""

from __future__ import annotations

from tvm import te, tirx

from .half import magnitude_bits
from .softmax import block_maximum, shifted_exp
from .split_integer import (
    KEY_OFFSET,
    fixed_point,
    fixed_probability,
    is_finite,
    join_digits,
    nibble,
    probability_unit,
    row_scales,
    signed_digits,
)
from .split_vectors import KEYS_PER_DOT, RowVectors

# A lane's sum of one digit is at most 128 * 255 * columns, and the join shifts it by 8 bits.
LARGEST_PREFILL_COLUMNS = 256


def _i32(value: int):
    return tirx.const(value, "int32")


def _f32(value: float):
    return tirx.const(value, "float32")


def byte_of(word, index):
    """Byte `index` (0 is the least significant) of an int32 as int8."""
    return tirx.Cast("int8", word >> (tirx.Cast("int32", index) * _i32(8)))


def query_words(query_t, columns: int, fmt: str, digits: int):
    """Digits of rows as lanes.

    query_t [E, padded C, M] float32, columns: C, a multiple of 4. Returns words [digits, E, C / 4, M] int32 of 4
    columns each, starts [digits, M] int32: less the dot product of a row's digits with the code of zero, and down [M]
    float32: what the joined sums are multiplied by, NaN for a row that is not finite.
    """
    planes, _, rows = (int(n) for n in query_t.shape)
    e, c = te.reduce_axis((0, planes), name="e"), te.reduce_axis((0, columns), name="c")
    largest = te.compute((rows,), lambda m: te.max(magnitude_bits(query_t[e, c, m]), axis=[e, c]), name="query_largest")
    up = te.compute((rows,), lambda m: row_scales(largest[m], digits)[0], name="query_up")
    down = te.compute((rows,), lambda m: row_scales(largest[m], digits)[1], name="query_down")
    zero = _f32(0.0)
    fixed = te.compute(
        (planes, columns, rows),
        lambda e, c, m: fixed_point(tirx.Select(is_finite(largest[m]), query_t[e, c, m], zero), up[m]),
        name="query_fixed",
    )
    quads = columns // KEYS_PER_DOT

    def word(d, e, c, m):
        bytes_ = (signed_digits(fixed[e, c * 4 + q, m], digits) for q in range(4))
        result = None
        for q, row_digits in enumerate(bytes_):
            digit = tirx.Select(d == _i32(0), row_digits[0], row_digits[-1])
            if digits == 3:
                digit = tirx.Select(d == _i32(1), row_digits[1], digit)
            shifted = (tirx.Cast("int32", digit) & _i32(255)) << _i32(8 * q)
            result = shifted if result is None else result | shifted
        return result

    words = te.compute((digits, planes, quads, rows), word, name="query_words")
    e2, c2 = te.reduce_axis((0, planes), name="e"), te.reduce_axis((0, quads), name="c")

    def digit_sum(word_):
        total = tirx.Cast("int32", byte_of(word_, _i32(0)))
        for q in range(1, 4):
            total = total + tirx.Cast("int32", byte_of(word_, _i32(q)))
        return total

    sums = te.compute(
        (digits, rows), lambda d, m: te.sum(digit_sum(words[d, e2, c2, m]), axis=[e2, c2]), name="query_sums"
    )
    starts = te.compute((digits, rows), lambda d, m: sums[d, m] * _i32(-KEY_OFFSET[fmt]), name="query_starts")
    return words, starts, down


def key_codes(cache_rows, last_row, planes: int):
    """Unsigned codes [T_block, E, C] of cache rows; rows past the last valid one repeat it."""
    keys, columns = (int(n) for n in cache_rows.shape)

    def code(t, e, c):
        element = cache_rows[tirx.min(tirx.Cast("int64", t), tirx.Cast("int64", last_row)), c]
        if planes == 1:
            return tirx.reinterpret("uint8", element) ^ tirx.const(128, "uint8")
        return nibble(element, e)

    return te.compute((keys, planes, columns), code, name="codes_k")


def qk_gemm_words(words, starts, down, codes):
    """Scores [T_block, M] float32 of query digits (`query_words`) against codes [T_block, E, C]."""
    digits, planes, quads, rows = (int(n) for n in words.shape)
    e, c = te.reduce_axis((0, planes), name="e"), te.reduce_axis((0, quads), name="c")
    q = te.reduce_axis((0, 4), name="q")
    as_i32 = lambda byte: tirx.Cast("int32", byte)  # noqa: E731
    sums = te.compute(
        (codes.shape[0], digits, rows),
        lambda t, d, m: te.sum(
            as_i32(codes[t, e, c * 4 + q]) * as_i32(byte_of(words[d, e, c, m], q)), axis=[e, c, q], init=starts[d, m]
        ),
        name="qk_sums",
    )
    return te.compute(
        (codes.shape[0], rows),
        lambda t, m: join_digits([sums[t, d, m] for d in range(digits)]) * down[m],
        name="qk",
    )


def block_start(scores, m_old):
    """The first part of a step of the online softmax with probabilities relative to the block's own maximum.

    scores [T_block, M], m_old [M]. Returns b, alpha, w of `block_maximum`, 0, from where the sum of probabilities
    starts, and m, which may overwrite m_old; all [M].
    """
    keys, rows = scores.shape
    block_max, m_new, alpha, weight = block_maximum(lambda m, t: scores[t, m], keys, m_old)
    start = te.compute((rows,), lambda m: _f32(0.0), name="sum_start")
    m_out = te.compute((rows,), lambda m: m_new[m], name="m_out")
    return block_max, alpha, weight, start, m_out


def block_probabilities(scores, block_max, sum_old):
    """p = exp(s - b) of some keys of a block, scores [T, M], and its sum [M] over the block so far."""
    keys, rows = scores.shape
    t = te.reduce_axis((0, keys), name="t")
    p = te.compute((keys, rows), lambda key, m: shifted_exp(scores[key, m], block_max[m]), name="p")
    some = te.compute((rows,), lambda m: te.sum(p[t, m], axis=t), name="p_sum")
    return p, te.compute((rows,), lambda m: sum_old[m] + some[m], name="block_sum")


def block_denominator(l_old, alpha, block_sum, weight):
    """l = alpha l_old + w sum_t p, all [M]."""
    return te.compute(l_old.shape, lambda m: l_old[m] * alpha[m] + block_sum[m] * weight[m], name="l_new")


def probability_shape(keys: int, rows: int, lanes: int) -> tuple[int, int, int, int]:
    """Of what `probability_words` returns."""
    return keys // KEYS_PER_DOT, rows // lanes, 4, 4 * lanes


def probability_words(p, digits: int, lanes: int):
    """Probabilities [T_block, M] in [0, 1] as bytes [T_block / 4, M / lanes, 4, 4 lanes] uint8.

    The fourth byte of each is no digit.
    """
    keys, rows = (int(n) for n in p.shape)
    fixed = te.compute((keys, rows), lambda t, m: fixed_probability(p[t, m], digits), name="p_fixed")

    def byte(t, block, j, x):
        word = fixed[t * 4 + x % 4, block * lanes + x // 16 * 4 + j]
        return tirx.reinterpret("uint8", byte_of(word, x // 4 % 4))

    return te.compute(probability_shape(keys, rows, lanes), byte, name="arrange_p")


def value_vectors(cache_rows, last_row, planes: int, vectors: RowVectors):
    """Values as signed codes: a function (t / 4, e, c, key of the 4) -> int8 of vectors of `lanes` columns x 4 keys.

    The columns are a multiple of the lanes.
    """
    lanes, size = vectors.lanes, vectors.size
    loaded = vectors.load(cache_rows, last_row, "load_v")
    shape = (int(cache_rows.shape[0]) // KEYS_PER_DOT, vectors.count, 4, size)
    quads = te.compute(shape, lambda t, v, j, x: loaded[t * 4 + x % 4, v * size + j * lanes + x // 4], name="arrange_v")

    def at(c, key):
        vector = vectors.position(c // lanes * lanes) // lanes
        return vector // 4, vector % 4, c % lanes * 4 + key

    if planes == 1:
        return lambda t, e, c, key: quads[(t, *at(c, key))]
    offset = tirx.const(KEY_OFFSET["i4"], "uint8")
    codes = te.compute(
        (shape[0], vectors.count, planes, 4, size),
        lambda t, v, e, j, x: tirx.reinterpret("int8", nibble(quads[t, v, j, x], e) - offset),
        name="nibbles_v",
    )

    def code(t, e, c, key):
        v, j, x = at(c, key)
        return codes[t, v, e, j, x]

    return code


def sv_gemm_words(p_words, code_at, digits: int, accumulator, row_beta, weight):
    """out[m, e, c] = row_beta[m] * accumulator[m, e, c] + weight[m] * sum_t p[m, t] * values[t, e, c].

    accumulator [M, E, C]; code_at: function of `value_vectors`.
    """
    rows, planes, columns = (int(n) for n in accumulator.shape)
    row_lanes = int(p_words.shape[3]) // 4
    t, b = te.reduce_axis((0, int(p_words.shape[0])), name="t"), te.reduce_axis((0, 4), name="b")
    as_i32 = lambda byte: tirx.Cast("int32", byte)  # noqa: E731

    def probability(m, d, key):
        slot = _i32(digits - 1) - tirx.Cast("int32", d)
        return p_words[t, m // row_lanes, m % 4, m % row_lanes // 4 * 16 + slot * 4 + key]

    product = te.compute(
        (rows, digits, planes, columns),
        lambda m, d, e, c: te.sum(as_i32(probability(m, d, b)) * as_i32(code_at(t, e, c, b)), axis=[t, b]),
        name="sv_product",
    )
    unit = _f32(probability_unit(digits))

    def added(m, e, c):
        sums = join_digits([product[m, d, e, c] for d in range(digits)])
        return accumulator[m, e, c] * row_beta[m] + sums * (weight[m] * unit)

    return te.compute(accumulator.shape, added, name="sv")
