"""Decode by integer dot products on AArch64: digits, and results under qemu against float64 and the float32 kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from aarch64 import needs_aarch64, run_on
from operator_calls import assert_close, assert_same_cache, expected, make_call
from test_definitions import _elementwise
from test_split_integer import QUERIES, _call, _exact
from tvm import tirx

from gqa_tvm.definitions import split_integer as si
from gqa_tvm.definitions import split_signed as signed
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.variants import family_variant

TARGET = "arm64-neon-dotprod"


@pytest.mark.parametrize("digits", [2, 3])
def test_signed_digits_of_probabilities_are_the_nearest(digits):
    limit = signed.LARGEST_FIXED[digits]
    edges = np.array([0.0, 1.0, 127 / limit, 128 / limit, 32639 / limit, 2.0**-24, 1e-45])
    p = np.concatenate([edges, np.random.default_rng(3).uniform(0, 1, 4000)]).astype(np.float32)

    def digit(v, d):
        return signed.word_digit(signed.probability_word(v, digits), tirx.const(d, "int32"), digits)

    value = 0
    for d in range(digits):
        value = value * 256 + _elementwise(lambda v, d=d: digit(v, d), p, "int8").astype(np.int64)
    assert (np.abs(value - p.astype(np.float64) * limit) <= 0.5 + limit * 2.0**-24).all()


@pytest.mark.parametrize("plane", [0, 1])
def test_nibbles_are_sixteen_times_the_code(plane):
    stored = np.arange(256, dtype=np.uint8)

    def as_int32(byte):
        nibble = signed.signed_nibble(tirx.Cast("uint8", byte), tirx.const(plane, "int32"))
        return tirx.Cast("int32", nibble)

    got = _elementwise(as_int32, stored.astype(np.int32), "int32")
    np.testing.assert_array_equal(got, 16 * ((stored >> 4 * plane & 15).astype(np.int32) - 8))


def test_which_kernels_are_its_own():
    variant = family_variant(TARGET, "aarch64")
    owner = lambda name: variant.owner(KernelSpec.parse(name)).target.name  # noqa: E731
    for name in ("flash_decode_f32_i8_h80_r3", "flash_decode_f32_i4_h64_r8", "flash_decode_f32_i8_h256_r1"):
        assert owner(name) == TARGET
    # Rows that are no multiple of a vector, other formats, other steps; wider rows could overflow.
    for name in ("i4_h80_r1", "i8_h72_r1", "f32_h64_r1", "i8_h512_r1", "i4_h512_r1"):
        assert owner(f"flash_decode_f32_{name}") == "arm64-neon"
    assert owner("append_f32_i8_h64") == owner("qk_gemm_f32_i8_h64_r2") == "arm64-neon"
    sizes = variant.sizes.default
    assert not replace(sizes, decode_kv_block=512).splits_integers("i8", 64, 1)
    for products in (signed.LARGEST_ELEMENTS, si.LARGEST_KEYS):
        assert 128 * 128 * products * (2**8 + 1) < 2**31


def _run(library, attributes, inputs):
    return run_on(library, attributes, inputs)[0]


def _assert_as_float32(dot, arm, attributes, inputs, units=2e-7):
    """The error against float64 is not twice that of float32 products, but for rounding units of the output."""
    integer, single = (_run(library, attributes, inputs) for library in (dot, arm))
    assert_same_cache(integer, single)
    exact = _exact(attributes, inputs, single.present_key, single.present_value)
    errors = [float(np.abs(result.output - exact).max()) for result in (integer, single)]
    assert errors[0] <= 2 * errors[1] + units * np.abs(exact).max(), errors


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["i8", "i8-channel", "i4"])
@pytest.mark.parametrize("kind", QUERIES)
def test_errors_are_those_of_float32(dot, arm, kind, cache):
    attributes, inputs = _call(cache=cache)
    QUERIES[kind](inputs)
    _assert_as_float32(dot, arm, attributes, inputs)


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4, 5, 8])
def test_row_tiles(dot, arm, group):
    for cache in ("i8", "i4"):
        for total in (1, 63, 65, 1030):
            _assert_as_float32(dot, arm, *_call(group, total=total, cache=cache), units=4e-7)


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("cache,head_size", [("i8", 80), ("i8-channel", 128), ("i4-channel", 128), ("i4", 80)])
def test_head_sizes(dot, cache, head_size):
    for total in (63, 1100):
        attributes, inputs = make_call(cache, total=total, head_size=head_size)
        assert_close(_run(dot, attributes, inputs).output, expected(attributes, inputs).output)


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("dominant", [False, True], ids=["uniform", "one dominant key"])
def test_many_keys(dot, arm, dominant):
    attributes, inputs = _call(group=1, total=50_000)
    attributes["scale"] = 1.0
    inputs["query"][:] = 0
    inputs["query"][..., 0] = 1
    inputs["past_key"][..., 0] = 0
    inputs["key"][:] = 0
    if dominant:
        # exp(-12) a key: all others together weigh 0.3 of the dominant one.
        inputs["k_scale"][:] = 12 / 127
        inputs["past_key"][..., 31_415, 0] = 127
    _assert_as_float32(dot, arm, attributes, inputs)


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("cache,head_size", [("i8", signed.LARGEST_ELEMENTS), ("i4", 480)])
def test_sums_at_their_bounds_do_not_overflow(dot, cache, head_size):
    """The largest sums of all: keys of the least code win, whose values are the largest code."""
    attributes, inputs = _call(group=1, total=200, cache=cache, head_size=head_size)
    assert dot.variant.owner(KernelSpec("flash_decode", "f32", cache, head_size, 1)) is dot.variant
    least, largest = (-128, 127) if cache == "i8" else (0, 0xFF)
    for name, winning, losing in (("past_key", least, largest), ("past_value", largest, least)):
        inputs[name][:, :, ::2], inputs[name][:, :, 1::2] = winning, losing
    # No scale: of the numbers just below a power of two the first digit is 127.
    attributes["scale"], inputs["query"][:], inputs["k_scale"][:] = 1.0, -1.98, 1.0
    inputs["key"][:], inputs["value"][:] = np.float32(-1e6), np.float32(1e6)
    wanted = (127 if cache == "i8" else 7) * inputs["v_scale"][0]
    np.testing.assert_allclose(_run(dot, attributes, inputs).output, wanted, rtol=3e-7)


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_query_that_is_not_finite_gives_nan_in_its_row_alone(dot, bad):
    attributes, inputs = _call(group=2)
    wanted = _run(dot, attributes, inputs).output
    inputs["query"][..., 3] = bad
    output = _run(dot, attributes, inputs).output
    assert np.isnan(output[..., :64]).all()
    np.testing.assert_array_equal(output[..., 64:], wanted[..., 64:])


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", [{"softcap": 3.0}, {"local_window_size": 20}, {"smooth_softmax": 1}, {"causal": 0}], ids=str
)
def test_choices_of_a_call(dot, choice):
    for tokens, total in ((1, 130), (1, 1100), (2, 90)):
        attributes, inputs = make_call("i8-channel", tokens=tokens, total=total)
        attributes |= choice
        assert_close(_run(dot, attributes, inputs).output, expected(attributes, inputs).output)
