"""Products by exact integer dot products: digits, joins, bounds, and the accuracy of decode against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from operator_calls import first_of, make_call, run
from query_kinds import QUERIES
from test_definitions import _elementwise, _run
from tvm import te, tirx

from gqa_tvm.definitions import split_integer as si
from gqa_tvm.definitions.split_vectors import RowVectors
from gqa_tvm.targets import missing_features
from gqa_tvm.variants import machine_variant

SPLIT, FLOAT = "x86-avx512-vnni", "x86-avx512"
needs_vnni = pytest.mark.skipif(bool(missing_features(SPLIT)), reason="needs AVX-512 VNNI")

LARGEST_SIGNED = 127 * (2**24 + 2**16 + 2**8 + 1)


def _bits(x):
    return tirx.reinterpret("int32", x)


def _scales(x, digits):
    """(up, down) of rows whose largest magnitude is x."""
    return tuple(_elementwise(lambda v, i=i: si.row_scales(_bits(v), digits)[i], x).astype(np.float64) for i in (0, 1))


MAGNITUDES = np.concatenate([np.geomspace(1e-29, 3e38, 3000), 2.0 ** np.arange(-90, 120), [3.4028235e38]])


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_the_largest_element_of_a_row_fits_its_digits(digits):
    x = MAGNITUDES.astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0))])
    x = x[x >= 2.0**-95]
    up, down = _scales(x, digits)
    np.testing.assert_allclose(up * down, 1, rtol=2e-7)
    fixed = np.rint((x * up.astype(np.float32)).astype(np.float64))
    limit = 127 * sum(256**i for i in range(digits))
    assert (fixed <= limit).all() and (fixed >= limit * 0.999).all()


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
@pytest.mark.parametrize("x", [0.0, 1e-45, 1e-38, 2e-33])
def test_scales_of_tiny_rows_are_finite(x, digits):
    for scale in _scales(np.full(16, x, np.float32), digits):
        assert np.isfinite(scale).all() and (scale >= np.finfo(np.float32).tiny).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_a_row_that_is_not_finite_scales_to_nan(bad, digits):
    up, down = _scales(np.full(16, bad, np.float32), digits)
    assert np.isfinite(up).all() and np.isnan(down).all()


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_signed_digits_reconstruct_the_number(digits):
    limit = 127 * sum(256**i for i in range(digits))
    edges = [0, 1, -1, 127, -127, 128, -128, -129, 255, 256, 32639, -32639, 32768, -32768, -32769, limit, -limit]
    edges = [edge for edge in edges if abs(edge) <= limit]
    fixed = np.concatenate([edges, np.random.default_rng(0).integers(-limit, limit + 1, 20000)]).astype(np.int32)
    value = 0
    for d in range(digits):
        digit = _elementwise(lambda v, d=d: si.signed_digits(v, digits)[d], fixed, "int8")
        value = value * 256 + digit.astype(np.int64)
    np.testing.assert_array_equal(value, fixed)


@pytest.mark.parametrize("digits", [2, 3])
def test_unsigned_digits_reconstruct_the_number(digits):
    end = 256**digits
    fixed = np.concatenate([[0, 255, 256, end - 1], np.arange(0, end, 997)]).astype(np.int32)
    value = 0
    for d in range(digits):
        digit = _elementwise(lambda v, d=d: si.unsigned_digit(v, d, digits), fixed, "uint8")
        value = value * 256 + digit.astype(np.int64)
    np.testing.assert_array_equal(value, fixed)


@pytest.mark.parametrize("count", [2, 3])
def test_digits_of_probabilities_are_the_nearest(count):
    edges = [0.0, 1.0, 1e-45, 1e-20, 0.5, 1 - 2.0**-24, 2.0**-16, 1.5 * 2.0**-23, 2.5 * 2.0**-23, 0.5 * 2.0**-15]
    p = np.concatenate([edges, np.random.default_rng(1).uniform(0, 1, 502)]).astype(np.float32).reshape(2, -1)
    a = te.placeholder(p.shape, name="a")
    got = _run([a, si.probability_digits(a, count)], [p, np.zeros((2, count, p.shape[1]), np.uint8)]).astype(np.int64)
    value = sum(got[:, d] * 256 ** (count - 1 - d) for d in range(count))
    np.testing.assert_array_equal(value, np.rint(p.astype(np.float64) / si.probability_unit(count)))


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_join_rounds_twice(digits):
    sums = np.random.default_rng(2).integers(-(2**21), 2**21, (digits, 5000)).astype(np.int32)
    a = te.placeholder(sums.shape, "int32", name="a")
    joined = te.compute((5000,), lambda i: si.join_digits([a[d, i] for d in range(digits)]), name="joined")
    got = _run([a, joined], [sums, np.zeros(5000, np.float32)])
    wanted = (sums * 256 ** np.arange(digits)[::-1, None]).sum(0)
    assert (np.abs(got - wanted) <= np.abs(wanted) * 2.0**-23).all()


@pytest.mark.parametrize("size", [64, 32])
def test_accumulator_positions_are_a_permutation(size):
    columns = np.arange(256, dtype=np.int32)
    positions = _elementwise(RowVectors(size, 256).accumulator_position, columns, "int32")
    np.testing.assert_array_equal(np.sort(positions), columns)
    np.testing.assert_array_equal(positions // size, columns // size)


@pytest.mark.parametrize("target", [SPLIT, "x86-avx-vnni"])
def test_no_sum_overflows_at_the_extremes(target):
    for largest in (255 * 128 * si.LARGEST_PRODUCTS, 255 * 128 * si.LARGEST_KEYS):
        assert largest * 2**8 + largest < 2**31
    sizes = machine_variant(target).sizes.default
    columns = si.LARGEST_PRODUCTS
    assert sizes.splits_integers("i8", columns, 1) and not sizes.splits_integers("i8", columns + 64, 1)
    assert sizes.splits_integers("i4", 512, 1) and 2 * 512 <= 16 * si.LARGEST_PRODUCTS
    large = replace(sizes, decode_kv_block=2 * si.LARGEST_KEYS)
    assert not large.splits_integers("i8", 64, 1)


def _decode(codes, scale):
    """Values of one entry's cache rows in float64."""
    if codes.dtype == np.uint8:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], -1).astype(np.float64) - 8
    scale = scale.astype(np.float64)
    return codes * (scale if scale.size == 1 else scale.reshape(codes.shape[0], 1, -1))


def _exact(attributes, inputs, keys, values):
    """Decode of one token in float64; the caches [1, N_kv, T, columns] hold the new row."""
    keys, values = _decode(keys[0], inputs["k_scale"]), _decode(values[0], inputs["v_scale"])
    query = inputs["query"].astype(np.float64).reshape(len(keys), -1, keys.shape[-1])
    scores = np.einsum("ngh,nth->ngt", query, keys) * attributes.get("scale", query.shape[-1] ** -0.5)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("ngt,nth->ngh", p / p.sum(-1, keepdims=True), values).reshape(1, 1, -1)


def _errors(attributes, inputs):
    """Largest errors against float64 of (integer, float32) products."""
    results = {target: run(attributes, inputs, target=target) for target in (SPLIT, FLOAT)}
    exact = _exact(attributes, inputs, results[FLOAT].present_key, results[FLOAT].present_value)
    return tuple(float(np.abs(results[target].output - exact).max()) for target in (SPLIT, FLOAT)), np.abs(exact).max()


def _call(group=2, total=900, cache="i8", head_size=64, seed=0):
    return make_call(cache, total=total, heads=group, kv_heads=1, head_size=head_size, capacity=total, seed=seed)


@needs_vnni
@pytest.mark.parametrize("cache", ["i8", "i8-channel"])
@pytest.mark.parametrize("kind", QUERIES)
def test_errors_are_those_of_float32(kind, cache):
    worst = np.zeros(2)
    for seed in range(4):
        attributes, inputs = _call(cache=cache, seed=seed)
        QUERIES[kind](inputs)
        (split, single), scale = _errors(attributes, inputs)
        worst = np.maximum(worst, [split, single])
    # A few rounding units of the output: below that the two differ by chance.
    assert worst[0] <= 2 * worst[1] + 2e-7 * scale, worst


def _fill_rows(query, head_size: int, ratio: float, seed: int) -> None:
    """Rows whose largest element is `ratio` root mean squares."""
    rows = query.reshape(-1, head_size)
    rng = np.random.default_rng(seed)
    rows[:] = rng.uniform(0.2, 1, rows.shape) * rng.choice([-1, 1], rows.shape)
    rest = (rows[:, 1:] ** 2).sum(-1)
    rows[:, 0] = ratio * np.sqrt(rest / (head_size - ratio**2))


@pytest.mark.parametrize(("ratio", "needed"), [(0, False), (1, False), (3.4, False), (3.6, True), (8, True)])
def test_a_row_needs_its_last_digit_where_one_element_is_large(ratio, needed):
    row = np.full(128, ratio, np.float64)
    if ratio > 1:
        _fill_rows(row, 128, ratio, 0)
    squares = (np.rint(row * 127 / max(1, np.abs(row).max())) ** 2).sum().astype(np.int32)[None]
    got = _elementwise(lambda v: tirx.Cast("int32", si.needs_last_digit(v, 128)), squares, "int32")
    assert got[0] == needed


@needs_vnni
@pytest.mark.parametrize("ratio", [2, 3.4])
@pytest.mark.parametrize("head_size", [64, 128])
def test_errors_without_the_last_digit_are_below_twice_those_of_float32(head_size, ratio):
    """Sharp scores, which show the errors of a query row."""
    squares = np.zeros(2)
    for seed in range(12):
        attributes, inputs = _call(seed=seed, head_size=head_size)
        attributes["scale"] = 0.5
        _fill_rows(inputs["query"], head_size, ratio, seed)
        results = {target: run(attributes, inputs, target=target) for target in (SPLIT, FLOAT)}
        exact = _exact(attributes, inputs, results[FLOAT].present_key, results[FLOAT].present_value)
        squares += [((results[target].output - exact) ** 2).mean() for target in (SPLIT, FLOAT)]
    assert squares[0] <= 4 * squares[1], np.sqrt(squares)


@needs_vnni
@pytest.mark.parametrize("cache", ["i8", "i4"])
@pytest.mark.parametrize("group", first_of([2, 1, 3, 8]))
def test_a_large_element_costs_the_others_no_digit(group, cache):
    """Keys are zero where one row of a tile is large: its scores rest on its other elements."""
    attributes, inputs = _call(group, cache=cache, head_size=64)
    zero = np.uint8(8) if cache == "i4" else np.int8(0)
    inputs["past_key"][..., 0] = inputs["past_key"][..., 0] & np.uint8(0xF0) | zero if cache == "i4" else zero
    inputs["key"][..., 0] = 0
    inputs["query"].reshape(group, 64)[-1, 0] = 2.0**8
    (split, single), scale = _errors(attributes, inputs)
    assert split <= 2 * single + 2e-7 * scale


@needs_vnni
@pytest.mark.parametrize("group", first_of([1, 3, 8]))
def test_int4_errors_are_those_of_float32(group):
    attributes, inputs = _call(group, cache="i4", head_size=128)
    (split, single), scale = _errors(attributes, inputs)
    assert split <= 2 * single + 2e-7 * scale


@needs_vnni
@pytest.mark.parametrize("dominant", [False, True], ids=["uniform", "one dominant key"])
def test_many_keys(dominant):
    attributes, inputs = _call(group=1, total=100_000)
    attributes["scale"] = 1.0
    inputs["query"][:] = 0
    inputs["query"][..., 0] = 1
    inputs["past_key"][..., 0] = 0
    inputs["key"][:] = 0
    if dominant:
        # exp(-12) a key: all others together weigh 0.6 of the dominant one.
        inputs["k_scale"][:] = 12 / 127
        inputs["past_key"][..., 31_415, 0] = 127
    (split, single), scale = _errors(attributes, inputs)
    assert split <= 2 * single + 2e-7 * scale


@needs_vnni
@pytest.mark.parametrize("cache", ["i8", "i4"])
def test_extreme_codes_and_digits_are_exact(cache):
    """All codes and digits at their bounds: equal keys, so that the output is the value."""
    attributes, inputs = _call(group=2, total=200, cache=cache, head_size=128)
    code = -128 if cache == "i8" else 0
    inputs["past_key"][:], inputs["past_value"][:] = code, code
    inputs["query"][:] = LARGEST_SIGNED
    inputs["query"][..., ::2] *= -1
    low = np.float32(-1e6)
    inputs["key"][:], inputs["value"][:] = low, low
    output = run(attributes, inputs, target=SPLIT).output
    np.testing.assert_allclose(output, (-128 if cache == "i8" else -8) * inputs["v_scale"][0], rtol=3e-7)


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), [("i8", si.LARGEST_PRODUCTS), ("i4", 2 * 512)])
def test_sums_at_their_bounds_do_not_overflow(cache, head_size):
    """The largest sums of all: keys of the least code win, whose values are the largest code."""
    attributes, inputs = _call(group=1, total=200, cache=cache, head_size=head_size)
    least, largest = (-128, 127) if cache == "i8" else (0, 0xFF)
    for name, winning, losing in (("past_key", least, largest), ("past_value", largest, least)):
        inputs[name][:, :, ::2], inputs[name][:, :, 1::2] = winning, losing
    # No scale: of the numbers just below a power of two the first digit is 127.
    attributes["scale"], inputs["query"][:], inputs["k_scale"][:] = 1.0, -1.98, 1.0
    inputs["key"][:], inputs["value"][:] = np.float32(-1e6), np.float32(1e6)
    wanted = (127 if cache == "i8" else 7) * inputs["v_scale"][0]
    np.testing.assert_allclose(run(attributes, inputs, target=SPLIT).output, wanted, rtol=3e-7)


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("cache", "head_size"), [("i8", si.LARGEST_PRODUCTS), ("i4", 2 * 512)])
def test_last_digits_at_their_bounds_do_not_overflow(cache, head_size, sign):
    """One element is so large that the last two digits of all others are the largest there are; keys are zero there."""
    attributes, inputs = _call(group=1, total=200, cache=cache, head_size=head_size)
    least, largest = (-128, 127) if cache == "i8" else (0, 0xFF)
    winning, losing = (largest, least)[::sign]
    for name, first, second in (("past_key", winning, losing), ("past_value", largest, least)):
        inputs[name][:, :, ::2], inputs[name][:, :, 1::2] = first, second
    inputs["past_key"][..., 0] = 0 if cache == "i8" else inputs["past_key"][..., 0] & 0xF0 | 8
    last_digits = 127 * 256 + 127 if sign > 0 else -128 * 256 - 128
    inputs["query"][:], inputs["query"][..., 0] = last_digits / LARGEST_SIGNED, 1
    # All digits are taken: the score of a winning key is that of a losing one and 60 or more.
    attributes["scale"], inputs["k_scale"][:] = 1.0, 60.0 if cache == "i8" else 200.0
    inputs["key"][:], inputs["value"][:] = 0, 0
    wanted = (127 if cache == "i8" else 7) * inputs["v_scale"][0]
    np.testing.assert_allclose(run(attributes, inputs, target=SPLIT).output, wanted, rtol=3e-7)


@needs_vnni
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_gives_nan_in_its_row_alone(bad):
    attributes, inputs = _call(group=2)
    wanted = run(attributes, inputs, target=SPLIT).output
    inputs["query"][..., 3] = bad
    output = run(attributes, inputs, target=SPLIT).output
    assert np.isnan(output[..., :64]).all()
    np.testing.assert_array_equal(output[..., 64:], wanted[..., 64:])


@needs_vnni
@pytest.mark.parametrize("group", [1, 2])
def test_results_are_the_same_for_any_number_of_threads(group):
    attributes, inputs = _call(group, total=3000)
    outputs = [run(attributes, inputs, target=SPLIT, num_threads=n).output for n in (1, 2, 5)]
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])


@needs_vnni
@pytest.mark.parametrize("group", [1, 3, 5, 8])
@pytest.mark.slow
def test_every_row_tile(group):
    for total in (1, 63, 65, 1030):
        attributes, inputs = _call(group, total=total)
        (split, single), scale = _errors(attributes, inputs)
        assert split <= 2 * single + 4e-7 * scale


@needs_vnni
@pytest.mark.parametrize(("cache", "head_size"), [("i8", 256), ("i8", 192), ("i4", 256)])
@pytest.mark.slow
def test_large_heads(cache, head_size):
    attributes, inputs = _call(2, cache=cache, head_size=head_size)
    (split, single), scale = _errors(attributes, inputs)
    assert split <= 2 * single + 4e-7 * scale
