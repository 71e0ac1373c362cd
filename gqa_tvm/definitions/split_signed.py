"""Products by integer dot products of signed bytes, with 16-byte vectors: `split_integer` for CPUs that have those.

Digits of a query row are those of `split_integer`. Probabilities are signed digits too, three of 23 bits or two of 15.
 Codes are taken as they are, INT4 codes 16 times as large (a nibble's place in its byte), which the
scales of the sums take back: with signed operands nothing has to be subtracted. Columns keep their order.

No int32 overflows: a lane sums all columns of a key, at most LARGEST_ELEMENTS products of 128 x 128, or LARGEST_KEYS
values; joining digits shifts by 8 bits.
"""

from __future__ import annotations

from tvm import te, tirx

from .split_integer import join_digits, load_rows, signed_nibble

DOT_BYTES = 16
# What so many digits of a probability hold, less the rounding of the scale.
LARGEST_FIXED = {2: 32639, 3: 8355711 - 3}
# Added to an integer, and taken off each byte of the sum but the upper one, it leaves the integer's signed digits.
_DIGIT_BIAS = {1: 0, 2: 0x80, 3: 0x8080}
# A float32 of this magnitude has an integer in its lower bits.
_ONE_IS_LAST_BIT = 2.0**23
LARGEST_ELEMENTS = 496
# Rows of values that are arranged together: as many as a vector holds digits for.
VALUE_ROWS = 16
# What a code is multiplied by in the sums.
CODE_FACTOR = {"i8": 1, "i4": 16}


def _i32(value: int):
    return tirx.const(value, "int32")


def _f32(value: float):
    return tirx.const(value, "float32")


def codes_of_planes(arranged, planes: int, name: str):
    """Codes [t, v, E, ..] int8 of arranged bytes [t, v, ..], which they are where there is one plane."""
    if planes == 1:
        return arranged
    keys, vectors, *inner = arranged.shape
    return te.compute(
        (keys, vectors, planes, *inner),
        lambda t, v, e, *rest: signed_nibble(arranged[(t, v, *rest)], e),
        name=f"nibbles_{name}",
    )


def code_function(codes, planes: int):
    """Function (t, v, e, ..) -> int8 of what `codes_of_planes` returns."""
    if planes == 1:
        return lambda t, v, e, *rest: codes[(t, v, *rest)]
    return lambda *index: codes[index]


def key_codes(cache_rows, last_row, planes: int):
    """Function (t, v, e, j, x): of the keys 4 t .. 4 t + 3, in lane x / 4 of 4 bytes columns 16 v + 4 j .. + 3."""
    rows, columns = (int(n) for n in cache_rows.shape)
    loaded = load_rows(cache_rows, last_row, "load_k")
    arranged = te.compute(
        (rows // 4, columns // DOT_BYTES, 4, DOT_BYTES),
        lambda t, v, j, x: loaded[t * 4 + x // 4, v * DOT_BYTES + j * 4 + x % 4],
        name="arrange_k",
    )
    return code_function(codes_of_planes(arranged, planes, "k"), planes)


def value_codes(cache_rows, last_row, planes: int):
    """Function (t, v, e, i, j, x): in lane x / 4 the values 16 t + 4 j .. + 3 of column 16 v + 4 i + x / 4."""
    rows, columns = (int(n) for n in cache_rows.shape)
    loaded = load_rows(cache_rows, last_row, "load_v")
    arranged = te.compute(
        (rows // VALUE_ROWS, columns // DOT_BYTES, DOT_BYTES // 4, VALUE_ROWS // 4, DOT_BYTES),
        lambda t, v, i, j, x: loaded[t * VALUE_ROWS + j * 4 + x % 4, v * DOT_BYTES + i * 4 + x // 4],
        name="arrange_v",
    )
    return code_function(codes_of_planes(arranged, planes, "v"), planes)


def qk_gemm_digits(digits, down, code_at, shape):
    """Scores [M, T_block] float32 of query digits against codes.

    digits [M, D, C / 16, E, 16] int8; down [M] float32: scale of a row's sums; code_at: function of `key_codes`;
    shape: (T_block, C / 16, E).
    """
    rows, count = (int(n) for n in digits.shape[:2])
    keys, vectors, planes = shape
    v, e = te.reduce_axis((0, vectors), name="v"), te.reduce_axis((0, planes), name="e")
    j, q = te.reduce_axis((0, 4), name="j"), te.reduce_axis((0, 4), name="q")
    as_i32 = lambda byte: tirx.Cast("int32", byte)  # noqa: E731
    sums = te.compute(
        (keys // 4, rows, count, 4),
        lambda t, m, d, key: te.sum(
            as_i32(code_at(t, v, e, j, key * 4 + q)) * as_i32(digits[m, d, v, e, j * 4 + q]), axis=[v, e, j, q]
        ),
        name="qk_sums",
    )
    joined = lambda m, t: join_digits([sums[t // 4, m, d, t % 4] for d in range(count)])  # noqa: E731
    return te.compute((rows, keys), lambda m, t: joined(m, t) * down[m], name="qk")


def word_digit(word, d, digits: int):
    """Digit d (0 is the most significant) of a `digit_word` as int8."""
    if digits == 1:
        return tirx.Cast("int8", word)
    return tirx.Cast("int8", word >> (_i32(8 * (digits - 1)) - tirx.Cast("int32", d) * _i32(8)))


def digit_word(fixed, digits: int):
    """The signed digits of an int32 as bytes of a word, the least significant one first."""
    bias = _i32(_DIGIT_BIAS[digits])
    return (fixed + bias) ^ bias


def probability_word(p, digits: int):
    """As `digit_word` for p * LARGEST_FIXED[digits], p in [0, 1]; some digits for NaN, whose row's sum is NaN."""
    bias = _DIGIT_BIAS[digits]
    shifted = p * _f32(LARGEST_FIXED[digits]) + _f32(_ONE_IS_LAST_BIT + bias)
    return tirx.reinterpret("int32", shifted) ^ _i32(bias)


def probability_digits(p, digits: int):
    """Digits [M, digits, T_block] int8 of probabilities [M, T_block] in [0, 1]."""
    rows, keys = p.shape
    words = te.compute((rows, keys), lambda m, key: probability_word(p[m, key], digits), name="p_fixed")
    shape = (rows, digits, keys)
    return te.compute(shape, lambda m, d, key: word_digit(words[m, key], d, digits), name="p_digits")


def sv_gemm_digits(digits, code_at, accumulator, row_beta, weight, fmt: str):
    """out[m, e, c] = row_beta[m] * accumulator[m, e, c] + weight[m] * sum_t p[m, t] * values[t, e, c].

    digits [M, D, T_block] int8 of `probability_digits`; code_at: function of `value_codes`; accumulator [M, E, C]
    float32.
    """
    rows, planes, columns = (int(n) for n in accumulator.shape)
    count, keys = (int(n) for n in digits.shape[1:])
    unit = tirx.const(1.0 / (LARGEST_FIXED[count] * CODE_FACTOR[fmt]), "float32")
    t = te.reduce_axis((0, keys // VALUE_ROWS), name="t")
    j, b = te.reduce_axis((0, VALUE_ROWS // 4), name="j"), te.reduce_axis((0, 4), name="b")
    as_i32 = lambda byte: tirx.Cast("int32", byte)  # noqa: E731
    product = te.compute(
        (rows, count, columns // DOT_BYTES, planes, DOT_BYTES // 4, 4),
        lambda m, d, v, e, i, lane: te.sum(
            as_i32(code_at(t, v, e, i, j, lane * 4 + b)) * as_i32(digits[m, d, t * VALUE_ROWS + j * 4 + b]),
            axis=[t, j, b],
        ),
        name="sv_product",
    )

    def added(m, e, c):
        sums = [product[m, d, c // DOT_BYTES, e, c // 4 % (DOT_BYTES // 4), c % 4] for d in range(count)]
        return accumulator[m, e, c] * row_beta[m] + join_digits(sums) * (weight[m] * unit)

    return te.compute(accumulator.shape, added, name="sv")
