"""Integer dot products of signed bytes with the query rows as lanes: `split_prefill` for CPUs that have those.

A dot product takes 4 columns (QK) or 4 keys (SV) of 4 rows, one row in each lane, or of 4 columns of values, and for
each of its 4 lanes one dword of another vector: vectors hold 4 rows x 4 columns or keys on both sides, and 4 dot
products multiply all of one by all of the other. Codes are as in `split_signed`. Two vectors of codes that one tile of
sums takes together lie side by side.

No int32 overflows: a lane sums at most `split_signed.LARGEST_ELEMENTS` products or `split_integer.LARGEST_KEYS` keys.
"""

from __future__ import annotations

from tvm import te, tirx

from .half import magnitude_bits
from .split_integer import fixed_point, is_finite, join_digits, load_rows, row_scales
from .split_signed import (
    CODE_FACTOR,
    DOT_BYTES,
    LARGEST_FIXED,
    VALUE_ROWS,
    code_function,
    codes_of_planes,
    digit_word,
    probability_word,
    word_digit,
)

# Keys of a tile of scores, rows of a vector.
TILE_KEYS, ROWS = 8, 4


def _f32(value: float):
    return tirx.const(value, "float32")


def _as_i32(byte):
    return tirx.Cast("int32", byte)


def query_digits(query_t, digits: int):
    """Digits of rows as lanes.

    query_t [E, C, M] float32. Returns digits [M / 4, C / 16, E, 4, D, 16] int8: lane x / 4 is row 4 m + x / 4, its
    bytes 4 columns; and down [M] float32: what the joined sums are multiplied by, NaN for a row that is not finite.
    """
    planes, columns, rows = (int(n) for n in query_t.shape)
    e, c = te.reduce_axis((0, planes), name="e"), te.reduce_axis((0, columns), name="c")
    largest = te.compute((rows,), lambda m: te.max(magnitude_bits(query_t[e, c, m]), axis=[e, c]), name="query_largest")
    up = te.compute((rows,), lambda m: row_scales(largest[m], digits)[0], name="query_up")
    down = te.compute((rows,), lambda m: row_scales(largest[m], digits)[1], name="query_down")

    def word(e, c, m):
        element = tirx.Select(is_finite(largest[m]), query_t[e, c, m], _f32(0.0))
        return digit_word(fixed_point(element, up[m]), digits)

    words = te.compute(query_t.shape, word, name="query_words")
    arranged = te.compute(
        (rows // ROWS, columns // DOT_BYTES, planes, 4, digits, DOT_BYTES),
        lambda m, v, e, j, d, x: word_digit(words[e, v * DOT_BYTES + j * 4 + x % 4, m * ROWS + x // 4], d, digits),
        name="arrange_query",
    )
    return arranged, down


def key_codes_shape(keys: int, columns: int, planes: int) -> tuple[int, ...]:
    """Of what `key_codes` returns."""
    inner = (4, 2, DOT_BYTES)
    return keys // TILE_KEYS, columns // DOT_BYTES, *((planes, *inner) if planes > 1 else inner)


def key_codes(cache_rows, last_row, planes: int):
    """Codes [t, v, e, j, h, x] int8: of the keys 8 t + 4 h .. + 3, in lane x / 4, columns 16 v + 4 j .. + 3.

    There is no axis e of one plane.
    """
    keys, columns = (int(n) for n in cache_rows.shape)
    loaded = load_rows(cache_rows, last_row, "load_k")
    arranged = te.compute(
        (keys // TILE_KEYS, columns // DOT_BYTES, 4, 2, DOT_BYTES),
        lambda t, v, j, h, x: loaded[t * TILE_KEYS + h * 4 + x // 4, v * DOT_BYTES + j * 4 + x % 4],
        name="arrange_k",
    )
    return codes_of_planes(arranged, planes, "k")


def value_codes(cache_rows, last_row, planes: int):
    """Function (t, v, e, i, j, h, x): values 16 t + 4 j .. + 3 of column 16 v + 8 i + 4 h + x / 4."""
    keys, columns = (int(n) for n in cache_rows.shape)
    loaded = load_rows(cache_rows, last_row, "load_v")
    arranged = te.compute(
        (keys // VALUE_ROWS, columns // DOT_BYTES, 2, 4, 2, DOT_BYTES),
        lambda t, v, i, j, h, x: loaded[t * VALUE_ROWS + j * 4 + x % 4, v * DOT_BYTES + i * 8 + h * 4 + x // 4],
        name="arrange_v",
    )
    return code_function(codes_of_planes(arranged, planes, "v"), planes)


def qk_gemm_rows(digits, down, code_at, keys: int, fmt: str):
    """Scores [T_block, M] float32 of query digits (`query_digits`) against codes of `keys` keys.

    code_at: function (t, v, e, j, h, x) of `key_codes`.
    """
    row_vectors, vectors, planes, _, count, _ = (int(n) for n in digits.shape)
    v, e = te.reduce_axis((0, vectors), name="v"), te.reduce_axis((0, planes), name="e")
    j, q = te.reduce_axis((0, 4), name="j"), te.reduce_axis((0, 4), name="q")
    sums = te.compute(
        (keys // TILE_KEYS, row_vectors, count, 2, 4, ROWS),
        lambda t, m, d, h, key, lane: te.sum(
            _as_i32(digits[m, v, e, j, d, lane * 4 + q]) * _as_i32(code_at(t, v, e, j, h, key * 4 + q)),
            axis=[v, e, j, q],
        ),
        name="qk_sums",
    )
    factor = _f32(1.0 / CODE_FACTOR[fmt])

    def score(t, m):
        parts = [sums[t // TILE_KEYS, m // ROWS, d, t % TILE_KEYS // 4, t % 4, m % ROWS] for d in range(count)]
        return join_digits(parts) * (down[m] * factor)

    return te.compute((keys, row_vectors * ROWS), score, name="qk")


def probability_shape(keys: int, rows: int, digits: int) -> tuple[int, int, int, int]:
    """Of what `probability_digits` returns."""
    return rows // ROWS, keys // 4, digits, DOT_BYTES


def probability_digits(p, digits: int):
    """Digits [M / 4, T_block / 4, D, 16] int8 of probabilities [T_block, M] in [0, 1]: lane x / 4 is a row."""
    keys, rows = (int(n) for n in p.shape)
    words = te.compute((keys, rows), lambda t, m: probability_word(p[t, m], digits), name="p_words")
    return te.compute(
        probability_shape(keys, rows, digits),
        lambda m, t, d, x: word_digit(words[t * 4 + x % 4, m * ROWS + x // 4], d, digits),
        name="arrange_p",
    )


def sv_gemm_rows(digits, code_at, accumulator, row_beta, weight, fmt: str):
    """out[m, e, c] = row_beta[m] * accumulator[m, e, c] + weight[m] * sum_t p[m, t] * values[t, e, c].

    digits: of `probability_digits`; accumulator [M, E, C]; code_at: function of `value_codes`.
    """
    rows, planes, columns = (int(n) for n in accumulator.shape)
    row_vectors, quads, count, _ = (int(n) for n in digits.shape)
    t = te.reduce_axis((0, quads * 4 // VALUE_ROWS), name="t")
    j, b = te.reduce_axis((0, 4), name="j"), te.reduce_axis((0, 4), name="b")
    product = te.compute(
        (row_vectors, columns // DOT_BYTES, planes, 2, count, 2, ROWS, 4),
        lambda m, v, e, i, d, h, row, lane: te.sum(
            _as_i32(code_at(t, v, e, i, j, h, lane * 4 + b)) * _as_i32(digits[m, t * 4 + j, d, row * 4 + b]),
            axis=[t, j, b],
        ),
        name="sv_product",
    )
    unit = _f32(1.0 / (LARGEST_FIXED[count] * CODE_FACTOR[fmt]))

    def added(m, e, c):
        at = (m // ROWS, c // DOT_BYTES, e, c % DOT_BYTES // 8)
        sums = [product[(*at, d, c % 8 // 4, m % ROWS, c % 4)] for d in range(count)]
        return accumulator[m, e, c] * row_beta[m] + join_digits(sums) * (weight[m] * unit)

    return te.compute((rows, planes, columns), added, name="sv")
