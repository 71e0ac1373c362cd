"""Prefill by integer dot products on AArch64: digits, and results under qemu against the reference and float32."""

from __future__ import annotations

import re

import numpy as np
import pytest
from aarch64 import needs_aarch64, run_on
from gqa_tvm.schedules.block_sizes import multiplies_digits
from operator_calls import assert_same_cache, expected, make_call
from query_kinds import QUERIES
from test_definitions import _elementwise
from tvm import tirx

from gqa_tvm.definitions import split_integer as si
from gqa_tvm.definitions import split_signed as signed
from gqa_tvm.definitions import split_signed_prefill as prefill
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.lowering import compile_kernel
from gqa_tvm.variants import family_variant

TARGET = "arm64-neon-dotprod"
CACHES = ["i8", "i8-channel", "i4", "i4-channel"]


def _digits(word, digits):
    """The number that the digits of a word stand for."""
    value = 0
    for d in range(digits):
        digit = _elementwise(lambda v, d=d: prefill.word_digit(v, tirx.const(d, "int32"), digits), word, "int8")
        value = value * 256 + digit.astype(np.int64)
    return value


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_words_hold_the_digits_of_a_row(digits):
    limit = 127 * sum(256**i for i in range(digits))
    edges = [0, 1, -1, 127, -127, 128, -129, 32639, -32639, 32768, -32769, limit, -limit]
    fixed = np.concatenate([edges, np.random.default_rng(0).integers(-limit, limit + 1, 20000)])
    fixed = fixed[np.abs(fixed) <= limit].astype(np.int32)
    word = _elementwise(lambda v: prefill.digit_word(v, digits), fixed, "int32")
    np.testing.assert_array_equal(_digits(word, digits), fixed)


@pytest.mark.parametrize("digits", [2, 3])
def test_words_hold_the_digits_of_probabilities(digits):
    largest = np.float32(signed.LARGEST_FIXED[digits])
    p = np.random.default_rng(0).uniform(0, 1, 20000)
    p = np.concatenate([p, [0, 1e-30, 1e-7, 1], 1 - np.arange(200) * 2.0**-24, p**8]).astype(np.float32)
    word = _elementwise(lambda v: prefill.probability_word(v, digits), p, "int32")
    # One rounding where multiply and add are fused, two where they are not.
    assert np.abs(_digits(word, digits) - p.astype(np.float64) * largest).max() <= 0.76
    np.testing.assert_array_equal(_digits(word[p == 1], digits), int(largest))


def test_which_kernels_are_its_own():
    variant = family_variant(TARGET, "aarch64")
    owner = lambda name: variant.owner(KernelSpec.parse(f"flash_prefill_f32_{name}")).target.name  # noqa: E731
    for name in ("i8_h64", "i8_h80", "i4_h128_r32", "i8_h256", "i4_h480", "i8_h64_balanced"):
        assert owner(name) == TARGET
    # Rows that are no multiple of a vector, other formats; the sums of wider rows could overflow.
    for name in ("i4_h80", "i8_h72", "f32_h64", "i8_h272", "i4_h512"):
        assert owner(name) == "arm64-neon"
    assert variant.sizes.default.split_kv_block <= si.LARGEST_KEYS


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["i8", "i4"])
def test_tiles_stay_in_registers(cache):
    """QK and SV: dot products by a lane, few loads, no stack."""
    assembly = compile_kernel(KernelSpec("flash_prefill", "f32", cache, 64), family_variant(TARGET, "aarch64"))
    parts = re.split(r"^\.L\w+:|^\t(?:b|b\.\w+|cbn?z|tbn?z)\t.*$", assembly.inspect_source("asm"), flags=re.MULTILINE)
    loops = [part for part in parts if part.count("\tsdot\t") >= 96]
    assert len(loops) == 2
    for loop in loops:
        products = re.findall(r"sdot\tv\d+\.4s, v\d+\.16b, v\d+\.4b\[\d\]", loop)
        assert len(products) == loop.count("\tsdot\t") >= 0.8 * len(re.findall(r"^\t[a-z]", loop, re.MULTILINE))
        assert "[sp" not in loop


def _call(cache="i8", tokens=70, total=70, head_size=64, **options):
    options = {"heads": 2, "kv_heads": 1, "capacity": total, **options}
    return make_call(cache, tokens=tokens, total=total, head_size=head_size, **options)


def _run(library, attributes, inputs, **options):
    result, plan = run_on(library, attributes, inputs, **options)
    spec = KernelSpec.parse(plan.kernels[-1])
    assert spec.operation == "flash_prefill"
    assert multiplies_digits(spec, library.sizes.default) == (library.target == TARGET)
    return result


def _assert_as_float32(dot, arm, calls, units=2e-7):
    """The largest error is at most twice that of float32 products, but for rounding units; caches are the same."""
    worst, scale = np.zeros(2), 0
    for attributes, inputs in calls:
        results = [_run(library, attributes, inputs) for library in (dot, arm)]
        assert_same_cache(*results)
        exact = expected(attributes, inputs).output.astype(np.float64)
        worst = np.maximum(worst, [np.abs(result.output - exact).max() for result in results])
        scale = max(scale, np.abs(exact).max())
    assert worst[0] <= 2 * worst[1] + units * scale, worst


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", QUERIES)
def test_errors_are_those_of_float32(dot, arm, kind, cache):
    calls = [_call(cache, seed=seed) for seed in range(3)]
    for _, inputs in calls:
        QUERIES[kind](inputs)
    _assert_as_float32(dot, arm, calls)


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("total", [17, 127, 128, 129, 200, 273, 1100])
def test_every_length_of_the_last_blocks(dot, arm, total):
    for cache in ("i8", "i4"):
        _assert_as_float32(dot, arm, [_call(cache, total=total, tokens=min(total, 40))])


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", [{"softcap": 3.0}, {"local_window_size": 9}, {"causal": 0}, {"smooth_softmax": 1}], ids=str
)
def test_choices_of_a_call(dot, arm, choice):
    # 25 tokens of one head are tasks of fewer rows.
    for tokens, heads in ((60, 2), (25, 1)):
        attributes, inputs = _call("i8-channel", tokens=tokens, total=150, heads=heads)
        _assert_as_float32(dot, arm, [(attributes | choice, inputs)])


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, -1e9, -np.inf, -3.4e38])
def test_masks_in_the_bias(dot, arm, value):
    attributes, inputs = _call(tokens=40, total=150)
    bias = np.random.default_rng(0).standard_normal((1, 1, 40, 150)).astype(np.float32)
    bias[..., 20:90] = value
    bias[:, :, 3] = value
    inputs["attention_bias"] = bias
    _assert_as_float32(dot, arm, [(attributes, inputs)])


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("dominant", [False, True], ids=["uniform", "one dominant key"])
def test_many_keys(dot, arm, dominant):
    attributes, inputs = _call(total=8000, tokens=20)
    attributes["scale"] = 1.0
    inputs["query"][:], inputs["key"][:] = 0, 0
    inputs["query"][..., 0] = 1
    inputs["past_key"][..., 0] = 0
    if dominant:
        # exp(-12) a key: all others together weigh 0.05 of the dominant one.
        inputs["k_scale"][:] = 12 / 127
        inputs["past_key"][..., 5415, 0] = 127
    _assert_as_float32(dot, arm, [(attributes, inputs)])


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), [("i8", 256), ("i4", 480)])
def test_sums_at_their_bounds_do_not_overflow(dot, cache, head_size):
    """The largest sums of all, of equal keys and of keys of the least code, whose values are the largest code."""
    least, largest = (-128, 127) if cache == "i8" else (0, 0xFF)
    code_of = {-128: -128, 127: 127, 0: -8, 0xFF: 7}
    for losing_key, losing_value in ((least, largest), (largest, least)):
        attributes, inputs = _call(cache, tokens=20, total=300, head_size=head_size)
        for name, winning, losing in (("past_key", least, losing_key), ("past_value", largest, losing_value)):
            inputs[name][:, :, ::2], inputs[name][:, :, 1::2] = winning, losing
        # No scale: of the numbers just below a power of two the first digit is 127.
        attributes["scale"], inputs["query"][:], inputs["k_scale"][:] = 1.0, -1.98, 1.0
        inputs["key"][:] = np.float32(-1e6)
        inputs["value"][:] = np.float32(1e6)
        wanted = np.float32(code_of[largest]) * inputs["v_scale"][0]
        np.testing.assert_allclose(_run(dot, attributes, inputs).output, wanted, rtol=3e-7)


def test_no_sum_overflows_at_the_extremes():
    sizes = family_variant(TARGET, "aarch64").sizes.default
    for cache, planes in (("i8", 1), ("i4", 2)):
        columns = max(c for c in range(16, 1024, 16) if sizes.splits_prefill(cache, c))
        # A lane's sum of the first digit, shifted by 8 bits, and of the second.
        assert 128 * 128 * columns * planes * (2**8 + 1) < 2**31
    assert 127 * 128 * sizes.split_kv_block * 2**8 + 128 * 128 * sizes.split_kv_block < 2**31


@needs_aarch64
@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_gives_nan_in_its_row_alone(dot, bad):
    attributes, inputs = _call(tokens=40, total=60)
    wanted = _run(dot, attributes, inputs).output
    inputs["query"][0, 7, 3] = bad
    output = _run(dot, attributes, inputs).output
    assert np.isnan(output[0, 7, :64]).all()
    output[0, 7, :64] = wanted[0, 7, :64]
    np.testing.assert_array_equal(output, wanted)


@needs_aarch64
@pytest.mark.slow
def test_results_do_not_depend_on_threads(dot):
    attributes, inputs = _call(tokens=130, total=130, heads=4, kv_heads=2)
    usual, outputs = dot.machine.threads, []
    for dot.machine.threads in (1, 3):
        outputs.append(_run(dot, attributes, inputs).output)
    dot.machine.threads = usual
    np.testing.assert_array_equal(outputs[1], outputs[0])
