"""Products with integer codes by exact integer dot products, as accurate as float32.

A float32 row is scaled to integers, each written as digits of 8 bits, most significant first: signed ones for a query
row, unsigned ones for probabilities. Each digit row has an exact int32 dot product with the codes; these are joined in
float32. How many digits there are is the precision (`decode_digits`, `prefill_digits`): as exact as float32 with four
(or three, where float32 itself sums a head in one chain, or a row has no large element: `needs_last_digit`) and three.
An integer dot product multiplies unsigned by signed bytes: keys are taken as code + offset >= 0, values as they are.

No int32 overflows: a head is summed in int32 before anything is rounded, at most LARGEST_PRODUCTS products of 255 * 128
(of INT4 codes 16 times as many), and LARGEST_KEYS of as much for values; pairs of digits shift the first by 8 bits.

The last of four digits of a query row stands for 2^-31 of its largest magnitude, the last of three of a block's
probabilities for 2^-23 of the largest of them, which is 1: errors are relative to that, not to each element.

Rows of vectors (`RowVectors`, here of 64 bytes): 64 columns are 4 vectors j of 16 lanes of 4 bytes. Column
16 L + 4 j + q of the 64 is lane group L of vector j: what two unpack instructions make of 4 rows. For keys a lane is
(L, key) and its bytes the q, for values a lane is (L, q) and its bytes the keys.
"""

from __future__ import annotations

from tvm import te, tirx
from tvm.tirx import op as tirx_op

from .split_vectors import KEYS_PER_DOT, RowVectors

LARGEST_PRODUCTS = 256
LARGEST_KEYS = 256
# What a value is multiplied by in the sums, by planes of a byte.
VALUE_FACTOR = {1: 1, 2: 16}
# Zero of an unsigned key code.
KEY_OFFSET = {"i8": 128, "i4": 8}

# Digits of query rows and probabilities where the rows are lanes, by precision: sums over a head in one chain round
# as much as the third digit of a query row does.
_PREFILL_DIGITS = {"": (3, 3), "balanced": (3, 2), "fast": (2, 2), "approximate": (1, 3)}
_DECODE_DIGITS = {"": (4, 3), "balanced": (3, 2), "fast": (2, 2), "approximate": (1, 3)}

_MANTISSA_BITS = 23
# What fits the digits of a query row, less the rounding of the scale.
_LARGEST_FIXED = {1: 127, 2: 32639, 3: 8355711 - 3, 4: 2139062143 - 511}
# Smaller rows count as this large: the inverse of their scale stays a normal float32.
_SMALLEST_ROW = 2.0**-95
# A row whose largest element is at most so many root mean squares does without the last of four digits: its rounding is
# then below twice that of float32 sums in 16 lanes and a tree, half of theirs for each root mean square (measured).
_BLUNT_RATIO = 3.5
_INFINITY_BITS = 0x7F800000


def prefill_digits(precision: str) -> tuple[int, int]:
    """Digits of a query row and of a probability in flash_prefill."""
    return _PREFILL_DIGITS[precision]


def _i32(value: int):
    return tirx.const(value, "int32")


def decode_digits(precision: str) -> tuple[int, int]:
    """Digits of a query row and of a probability in flash_decode."""
    return _DECODE_DIGITS[precision]


def is_finite(largest_bits):
    """Whether a row whose largest magnitude has these bits is finite."""
    return largest_bits < _i32(_INFINITY_BITS)


def row_scales(largest_bits, digits: int):
    """(up, down) of a query row: the factor that makes its elements integers, and its inverse, NaN if not finite.

    largest_bits: of its largest magnitude, which fills the digits.
    """
    finite = is_finite(largest_bits)
    smallest, one = tirx.const(_SMALLEST_ROW, "float32"), tirx.const(1.0, "float32")
    magnitude = tirx.Select(finite, tirx.max(tirx.reinterpret("float32", largest_bits), smallest), one)
    limit = tirx.const(_LARGEST_FIXED[digits], "float32")
    up, down = limit / magnitude, magnitude / limit
    return up, tirx.Select(finite, down, tirx.reinterpret("float32", _i32(0x7FC00000)))


def needs_last_digit(first_digits_squared, head_size: int):
    """Whether a row of four digits needs the last one, from the sum of the squares of its first digits.

    The error of three digits grows with the largest element of a row, that of float32 sums with its root mean square.
    A row of zeros, or one that is not finite, does not need it, so that it has no say in what others of its tile take.
    """
    few = first_digits_squared < _i32(int(head_size * (127 / _BLUNT_RATIO) ** 2))
    return tirx.all(first_digits_squared > _i32(0), few)


def fixed_point(x, up):
    """x * up rounded to an integer, halves to even; int32."""
    return tirx.Cast("int32", tirx_op.round(x * up))


def signed_digits(fixed, count: int):
    """The int8 digits of an int32 of at most 127 (1 + 256 + ...) in magnitude, most significant first."""
    digits = [fixed]
    for _ in range(count - 1):
        digits.insert(0, (digits[0] + _i32(128)) >> _i32(8))
    return tuple(tirx.Cast("int8", digit) for digit in digits)


def unsigned_digit(fixed, d, digits: int):
    """Digit d (0 is the most significant) of the low `digits` bytes of an int32 as uint8."""
    shift = _i32(8 * (digits - 1)) - tirx.Cast("int32", d) * _i32(8)
    return tirx.Cast("uint8", (fixed >> shift) & _i32(255))


def digit_pairs(count: int) -> int:
    """Of so many digits, the last of which may be alone."""
    return -(-count // 2)


def join_digits(sums):
    """Exact int32 sums of 1 to 4 digits, most significant first, as float32 of their weighted sum; two roundings."""
    return join_pairs([join_pair(sums[i : i + 2]) for i in range(0, len(sums), 2)], len(sums))


def join_pair(sums):
    """256 times the first of two int32 sums and the second, or one alone."""
    return sums[0] if len(sums) == 1 else (sums[0] << _i32(8)) + sums[1]


def join_pairs(pairs, count: int):
    """As `join_digits`, of int32 sums of pairs of `count` digits: 256 times the first digit and the second."""
    upper = tirx.Cast("float32", pairs[0])
    if len(pairs) == 1:
        return upper
    weight = 256.0 ** (2 - count % 2)
    return upper * tirx.const(weight, "float32") + tirx.Cast("float32", pairs[1])


def load_rows(cache_rows, last_row, name: str):
    """Rows as they are stored; rows past the last valid one repeat it."""
    return te.compute(
        cache_rows.shape,
        lambda t, c: cache_rows[tirx.min(tirx.Cast("int64", t), tirx.Cast("int64", last_row)), c],
        name=name,
    )


def nibble(byte, plane):
    """The stored code of a plane, 8 more than its value."""
    return (byte >> (tirx.Cast("uint8", plane) * tirx.const(4, "uint8"))) & tirx.const(15, "uint8")


def signed_nibble(byte, plane):
    """16 times the value of a plane as int8: fewer instructions than the value itself."""
    upper = byte << (tirx.const(4, "uint8") - tirx.Cast("uint8", plane) * tirx.const(4, "uint8"))
    return tirx.reinterpret("int8", (upper & tirx.const(0xF0, "uint8")) ^ tirx.const(0x80, "uint8"))


def key_vectors(cache_rows, last_row, planes: int, vectors: RowVectors):
    """Keys as unsigned codes [T_block / 4, V, E, 4, size] uint8: lane (L, key), byte q."""
    loaded = vectors.load(cache_rows, last_row, "load_k")
    flip = tirx.const(128 if planes == 1 else 0, "uint8")

    def arranged(t, v, j, x):
        element = loaded[t * 4 + x // 4 % 4, v * vectors.size + x // 16 * 16 + j * 4 + x % 4]
        return element if planes > 1 else tirx.reinterpret("uint8", element) ^ flip

    shape = (int(cache_rows.shape[0]) // vectors.quad, vectors.count, planes, 4, vectors.size)
    quads = te.compute((*shape[:2], *shape[3:]), arranged, name="arrange_k")
    if planes == 1:
        return lambda t, v, e, j, x: quads[t, v, j, x]
    codes = te.compute(shape, lambda t, v, e, j, x: nibble(quads[t, v, j, x], e), name="nibbles_k")
    return lambda t, v, e, j, x: codes[t, v, e, j, x]


def value_vectors(cache_rows, last_row, planes: int, vectors: RowVectors):
    """Values as signed codes [T_block / 4, V, E, 4, size] int8: lane (L, q), byte the key. INT4: 16 times as large."""
    loaded = vectors.load(cache_rows, last_row, "load_v")
    shape = (int(cache_rows.shape[0]) // KEYS_PER_DOT, vectors.count, planes, 4, vectors.size)
    quads = te.compute(
        (*shape[:2], *shape[3:]),
        lambda t, v, j, x: loaded[t * 4 + x % 4, v * vectors.size + x // 16 * 16 + j * 4 + x // 4 % 4],
        name="arrange_v",
    )
    if planes == 1:
        return lambda t, v, e, j, x: quads[t, v, j, x]
    codes = te.compute(shape, lambda t, v, e, j, x: signed_nibble(quads[t, v, j, x], e), name="nibbles_v")
    return lambda t, v, e, j, x: codes[t, v, e, j, x]


def qk_gemm_digits(digits, starts, down, code_at, keys: int, vectors: RowVectors, dropped: int = 0):
    """Scores [M, keys] float32 of query digits against unsigned key codes.

    digits [M, D, V, E, 4, size] int8, repeated for each key of a lane group; starts [M, pairs of D] int32: less the
    dot product of all digits with the code of zero; down [M] float32; code_at: function of `key_vectors`.
    dropped: so many of the last digits are left out, of `starts` too.
    """
    rows, count, _, planes = (int(n) for n in digits.shape[:4])
    count -= dropped
    lanes, quad = vectors.lanes, vectors.quad
    v, e = te.reduce_axis((0, vectors.count), name="v"), te.reduce_axis((0, planes), name="e")
    j, q = te.reduce_axis((0, 4), name="j"), te.reduce_axis((0, 4), name="q")
    as_i32 = lambda byte: tirx.Cast("int32", byte)  # noqa: E731
    sums = te.compute(
        (keys // quad, rows, count, lanes),
        lambda t, m, d, lane: te.sum(
            as_i32(code_at(t, v, e, j, lane * 4 + q)) * as_i32(digits[m, d, v, e, j, lane * 4 + q]),
            axis=[v, e, j, q],
        ),
        name="qk_sums",
    )

    def paired(m, i, t, lane):
        first, second = (sums[t, m, tirx.min(2 * i + j, count - 1), lane] for j in range(2))
        pair = (first << _i32(8)) + second
        return pair if count % 2 == 0 else tirx.Select(i < count // 2, pair, first)

    pairs = digit_pairs(count)
    joined = te.compute((rows, pairs, keys // quad, lanes), paired, name="qk_join")
    group = te.reduce_axis((0, vectors.row_groups), name="group")

    def lane_of(t):
        lane = group * 4 + t % 4
        return lane if vectors.shared == 1 else t % quad // 4 * vectors.row_size // 4 + lane

    total = te.compute(
        (rows, pairs, keys),
        lambda m, i, t: te.sum(joined[m, i, t // quad, lane_of(t)], axis=group, init=starts[m, i]),
        name="qk_total",
    )
    unit = tirx.const(256.0**dropped, "float32")
    score = lambda m, t: join_pairs([total[m, i, t] for i in range(pairs)], count) * (down[m] * unit)  # noqa: E731
    return te.compute((rows, keys), score, name="qk")


def fixed_probability(p, digits: int):
    """The bits of a probability in [0, 1] in fixed point, in the low bytes of an int32; halves are rounded to even.

    At 2^23 and above a float32 is an integer, whose low 23 bits it ends with; 1 ends with the bits of 2^23. Those of
    NaN are anything: it is in the sum of its row, which makes that NaN.
    """
    one = tirx.const(1 / probability_unit(digits), "float32")
    return tirx.reinterpret("int32", p * one + tirx.const(2.0**_MANTISSA_BITS, "float32"))


def probability_unit(digits: int) -> float:
    """What the last digit of a probability stands for."""
    return 2.0 ** (1 - 8 * digits)


def probability_digits(p, count: int):
    """Digits [M, count, T_block] uint8 of probabilities [M, T_block] in [0, 1]."""
    rows, keys = p.shape
    fixed = te.compute((rows, keys), lambda m, key: fixed_probability(p[m, key], count), name="p_fixed")
    return te.compute((rows, count, keys), lambda m, d, key: unsigned_digit(fixed[m, key], d, count), name="p_digits")


def sv_gemm_digits(digits, code_at, accumulator, row_beta, weight, vectors: RowVectors):
    """out[m, e, c] = row_beta[m] * accumulator[m, e, c] + weight[m] * sum_t p[m, t] * values[t, e, c].

    digits: of `probability_digits`; accumulator [M, E, V size]: columns in the order of
    `RowVectors.accumulator_position`; code_at: function of `value_vectors`.
    """
    rows, planes, _ = (int(n) for n in accumulator.shape)
    count, keys = (int(n) for n in digits.shape[1:])
    size, lanes = vectors.size, vectors.lanes
    t, b = te.reduce_axis((0, keys // 4), name="t"), te.reduce_axis((0, 4), name="b")
    as_i32 = lambda byte: tirx.Cast("int32", byte)  # noqa: E731
    product = te.compute(
        (rows, count, vectors.count, planes, 4, lanes),
        lambda m, d, v, e, j, lane: te.sum(
            as_i32(digits[m, d, t * 4 + b]) * as_i32(code_at(t, v, e, j, lane * 4 + b)), axis=[t, b]
        ),
        name="sv_product",
    )

    # Exact: powers of two.
    unit = tirx.const(probability_unit(count) / VALUE_FACTOR[planes], "float32")

    def added(m, e, c):
        sums = [product[m, d, c // size, e, c // lanes % 4, c % lanes] for d in range(count)]
        return accumulator[m, e, c] * row_beta[m] + join_digits(sums) * (weight[m] * unit)

    return te.compute(accumulator.shape, added, name="sv")
