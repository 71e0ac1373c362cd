"""Products with a cache that lies as integer dot products take it: no byte is moved between load and product.

A row of keys holds 16 keys: byte 64 c + 4 k + q is column 4 c + q of key k, so that a vector is a word of four columns
of each of 16 keys. A row of values holds 4 keys: byte 4 c + k is column c of key k, a vector is 16 columns of four
keys. Digits, joins and bounds are those of `split_integer`; a lane sums a whole head, in int32 and exactly.

Rows past the one with the last key repeat it; bytes of keys past the last one are read, and their scores are masked.
"""

from __future__ import annotations

from tvm import te, tirx

from .split_integer import (
    KEY_OFFSET,
    VALUE_FACTOR,
    fixed_probability,
    join_digits,
    nibble,
    probability_unit,
    signed_nibble,
)
from .split_prefill import byte_of

# Bytes of a dot product and lanes of its sums.
DOT_BYTES = 64
DOT_LANES = 16
# Keys of a row of keys and of a row of values; columns of a word of keys.
KEY_ROW = DOT_LANES
VALUE_ROW = 4
KEY_QUAD = 4
# A lane's sum of one digit is at most 128 * 255 * columns, and the join shifts it by 8 bits.
LARGEST_PACKED_COLUMNS = 256


def _i32(value: int):
    return tirx.const(value, "int32")


def _row_at(cache_rows, last_key, keys: int):
    """Function (row, byte) -> element, with rows clamped to the one that has the last key."""
    last_row = tirx.floordiv(tirx.Cast("int64", last_key), tirx.const(keys, "int64"))
    return lambda t, x: cache_rows[tirx.min(tirx.Cast("int64", t), last_row), x]


def key_words_shape(keys: int, planes: int, columns: int) -> tuple[int, int, int, int]:
    """Of what `key_words` returns."""
    return keys // KEY_ROW, planes, columns // KEY_QUAD, DOT_BYTES


def key_words(cache_rows, last_key, planes: int):
    """Keys [T_block / 16, 16 C] as unsigned codes [T_block / 16, E, C / 4, 64] uint8: lane the key, byte the column."""
    rows, width = (int(n) for n in cache_rows.shape)
    at = _row_at(cache_rows, last_key, KEY_ROW)

    def code(t, e, c, x):
        element = at(t, c * DOT_BYTES + x)
        if planes == 1:
            return tirx.reinterpret("uint8", element) ^ tirx.const(128, "uint8")
        return nibble(element, e)

    return te.compute(key_words_shape(rows * KEY_ROW, planes, width // KEY_ROW), code, name="packed_k")


def qk_gemm_packed(digits, offsets, down, codes, dropped: int = 0):
    """Scores [M, T_block] float32 of query digits [M, E, C / 4, D, 4] int8 against codes of `key_words`.

    offsets [M, D] int32: the dot product of a row's digits with the code of zero; down [M] float32.
    dropped: so many of the last digits are left out.
    """
    rows, planes, quads, count, _ = (int(n) for n in digits.shape)
    count -= dropped
    keys = int(codes.shape[0]) * KEY_ROW
    e, c = te.reduce_axis((0, planes), name="e"), te.reduce_axis((0, quads), name="c")
    q = te.reduce_axis((0, KEY_QUAD), name="q")
    as_i32 = lambda byte: tirx.Cast("int32", byte)  # noqa: E731
    sums = te.compute(
        (keys // KEY_ROW, rows, count, DOT_LANES),
        lambda t, m, d, lane: te.sum(as_i32(codes[t, e, c, lane * 4 + q]) * as_i32(digits[m, e, c, d, q]), [e, c, q]),
        name="packed_sums",
    )
    unit = tirx.const(256.0**dropped, "float32")

    def score(m, t):
        products = [sums[t // KEY_ROW, m, d, t % KEY_ROW] - offsets[m, d] for d in range(count)]
        return join_digits(products) * (down[m] * unit)

    return te.compute((rows, keys), score, name="qk")


def qk_gemm_packed_words(words, starts, down, codes):
    """As `split_prefill.qk_gemm_words`, against codes of `key_words`."""
    digits, planes, quads, rows = (int(n) for n in words.shape)
    keys = int(codes.shape[0]) * KEY_ROW
    e, c = te.reduce_axis((0, planes), name="e"), te.reduce_axis((0, quads), name="c")
    q = te.reduce_axis((0, KEY_QUAD), name="q")

    def product(t, d, m):
        code = tirx.Cast("int32", codes[t // KEY_ROW, e, c, t % KEY_ROW * 4 + q])
        byte = tirx.Cast("int8", words[d, e, c, m] >> (tirx.Cast("int32", q) * _i32(8)))
        return te.sum(code * tirx.Cast("int32", byte), axis=[e, c, q], init=starts[d, m])

    sums = te.compute((keys, digits, rows), product, name="qk_sums")
    return te.compute(
        (keys, rows),
        lambda t, m: join_digits([sums[t, d, m] for d in range(digits)]) * down[m],
        name="qk",
    )


def value_codes(cache_rows, last_key, planes: int, scaled: bool = False):
    """Values [T_block / 4, 4 C] as signed codes: a function (t / 4, e, c, key of the 4) -> int8.

    scaled: nibbles 16 times as large, which takes fewer instructions.
    """
    rows, width = (int(n) for n in cache_rows.shape)
    at = _row_at(cache_rows, last_key, VALUE_ROW)
    if planes == 1:
        return lambda t, e, c, key: at(t, c * VALUE_ROW + key)
    offset = tirx.const(KEY_OFFSET["i4"], "uint8")

    def code(t, e, x):
        if not scaled:
            return tirx.reinterpret("int8", nibble(at(t, x), e) - offset)
        return signed_nibble(at(t, x), e)

    codes = te.compute((rows, planes, width), code, name="packed_v")
    return lambda t, e, c, key: codes[t, e, c * VALUE_ROW + key]


def probability_bytes(p, count: int):
    """Digits of probabilities [M, T_block] in [0, 1].

    Bytes [M, T_block / 16, 64] uint8 as they lie in integers of 16 keys, by fours: 16 L + 4 s + key is byte s (0 is the
    least significant) of key 4 L + key, so that the digits of four keys are words.
    """
    rows, keys = (int(n) for n in p.shape)
    fixed = te.compute((rows, keys), lambda m, key: fixed_probability(p[m, key], count), name="p_fixed")

    def byte(m, t, x):
        return tirx.reinterpret("uint8", byte_of(fixed[m, t * DOT_LANES + x // 16 * 4 + x % 4], x // 4 % 4))

    return te.compute((rows, keys // DOT_LANES, DOT_BYTES), byte, name="packed_p")


def sv_gemm_packed(p_bytes, count: int, code_at, accumulator, row_beta, weight):
    """out[m, e, c] = row_beta[m] * accumulator[m, e, c] + weight[m] * sum_t p[m, t] * values[t, e, c].

    p_bytes: `probability_bytes` of `count` digits; code_at: function of `value_codes`, scaled.
    """
    rows, planes, columns = (int(n) for n in accumulator.shape)
    keys = int(p_bytes.shape[1]) * DOT_LANES
    t, b = te.reduce_axis((0, keys // VALUE_ROW), name="t"), te.reduce_axis((0, VALUE_ROW), name="b")
    as_i32 = lambda byte: tirx.Cast("int32", byte)  # noqa: E731

    def probability(m, d):
        return p_bytes[m, t // 4, t % 4 * 16 + (_i32(count - 1) - tirx.Cast("int32", d)) * 4 + b]

    product = te.compute(
        (rows, count, planes, columns),
        lambda m, d, e, c: te.sum(as_i32(probability(m, d)) * as_i32(code_at(t, e, c, b)), axis=[t, b]),
        name="sv_product",
    )

    # Exact: powers of two.
    unit = tirx.const(probability_unit(count) / VALUE_FACTOR[planes], "float32")

    def added(m, e, c):
        sums = join_digits([product[m, d, e, c] for d in range(count)])
        return accumulator[m, e, c] * row_beta[m] + sums * (weight[m] * unit)

    return te.compute(accumulator.shape, added, name="sv")
