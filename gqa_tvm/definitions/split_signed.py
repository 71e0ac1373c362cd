"""Products by integer dot products of signed bytes, with 16-byte vectors: `split_integer` for CPUs that have those.

Digits of a query row are those of `split_integer`. Probabilities are signed digits too, three of 23 bits or two of 15,
scaled to fill them. Codes are taken as they are, INT4 codes 16 times as large (a nibble's place in its byte), which the
scales of the sums take back: with signed operands nothing has to be subtracted. Columns keep their order.

No int32 overflows: a lane sums all columns of a key, at most LARGEST_ELEMENTS products of 128 x 128, or LARGEST_KEYS
values; joining digits shifts by 8 bits.
"""

from __future__ import annotations

from tvm import te, tirx

from .split_integer import fixed_point, join_digits, load_rows, signed_nibble

DOT_BYTES = 16
# What so many digits of a probability hold, less the rounding of the scale.
LARGEST_FIXED = {2: 32639, 3: 8355711 - 3}
# Smaller probabilities count as this large: the inverse of their scale stays a normal float32.
_SMALLEST_PROBABILITY = 2.0**-96
LARGEST_ELEMENTS = 496
# Rows of values that are arranged together: as many as a vector holds digits for.
VALUE_ROWS = 16
# What a code is multiplied by in the sums.
CODE_FACTOR = {"i8": 1, "i4": 16}


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


def signed_digit(fixed, d, digits: int):
    """Digit d (0 is the most significant) of an int32 >= 0 as int8: the lower ones round up or down."""
    i32 = lambda value: tirx.const(value, "int32")  # noqa: E731 - a typed literal
    below = i32(0)
    for upper in range(digits - 1):
        below = tirx.Select(d == upper, i32(0x808080 >> (8 * (4 - digits + upper))), below)
    shift = i32(8 * (digits - 1)) - tirx.Cast("int32", d) * i32(8)
    return tirx.Cast("int8", (fixed + below) >> shift)


def probability_scales(largest, digits: int):
    """(up, down): what makes the largest probability of a row fill its digits, and its inverse; NaN counts as tiny."""
    f32 = lambda value: tirx.const(value, "float32")  # noqa: E731 - a typed literal
    limit, smallest = LARGEST_FIXED[digits], f32(_SMALLEST_PROBABILITY)
    magnitude = tirx.Select(largest > smallest, largest, smallest)
    return f32(limit) / magnitude, magnitude * f32(1.0 / limit)


def probability_digits(p, digits: int):
    """Digits [M, digits, T_block] int8 of probabilities [M, T_block] >= 0 and the rows' scale [M]; NaN counts as 0."""
    rows, keys = p.shape
    t = te.reduce_axis((0, keys), name="t")
    largest = te.compute((rows,), lambda m: te.max(p[m, t], axis=t), name="p_max")
    up = te.compute((rows,), lambda m: probability_scales(largest[m], digits)[0], name="p_up")
    down = te.compute((rows,), lambda m: probability_scales(largest[m], digits)[1], name="p_down")
    zero = tirx.const(0.0, "float32")
    fixed = te.compute(
        (rows, keys),
        lambda m, key: fixed_point(tirx.Select(p[m, key] > zero, p[m, key], zero), up[m]),
        name="p_fixed",
    )
    shape = (rows, digits, keys)
    return te.compute(shape, lambda m, d, key: signed_digit(fixed[m, key], d, digits), name="p_digits"), down


def sv_gemm_digits(digits, down, code_at, accumulator, row_beta, fmt: str):
    """out[m, e, c] = row_beta[m] * accumulator[m, e, c] + the sum of probabilities times values.

    digits [M, D, T_block] int8 and down [M] of `probability_digits`; code_at: function of `value_codes`; accumulator
    [M, E, C] float32.
    """
    rows, planes, columns = (int(n) for n in accumulator.shape)
    count, keys = (int(n) for n in digits.shape[1:])
    factor = tirx.const(1.0 / CODE_FACTOR[fmt], "float32")
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
        return accumulator[m, e, c] * row_beta[m] + join_digits(sums) * (down[m] * factor)

    return te.compute(accumulator.shape, added, name="sv")
