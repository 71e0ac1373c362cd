"""Prefill by integer dot products: errors no larger than twice float32's, integer sums that cannot overflow."""

from __future__ import annotations

import numpy as np
import pytest
from gqa_tvm.schedules.block_sizes import multiplies_digits
from operator_calls import expected, make_call
from query_kinds import QUERIES

from gqa_tvm import GroupQueryAttention
from gqa_tvm.definitions import split_prefill as sp
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.targets import missing_features
from gqa_tvm.variants import machine_variant

SPLIT, FLOAT = "x86-avx512-vnni", "x86-avx512"
needs_vnni = pytest.mark.skipif(bool(missing_features(SPLIT)), reason="needs AVX-512 VNNI")


def run(attributes, inputs, target=SPLIT, **options):
    op = GroupQueryAttention(**attributes, target=target, **options)
    result = op(**inputs)
    splits = multiplies_digits(KernelSpec.parse(op.last_plan.kernels[-1]), machine_variant(target).sizes.default)
    assert op.last_plan.kernels[-1].startswith("flash_prefill") and splits == (target == SPLIT)
    return result


def errors(attributes, inputs):
    """(error of integer products, error of float32, largest output) against float64."""
    exact = expected(attributes, inputs).output.astype(np.float64)
    worst = [np.abs(run(attributes, inputs, target).output - exact).max() for target in (SPLIT, FLOAT)]
    return *worst, np.abs(exact).max()


def call(cache="i8", tokens=70, total=70, head_size=64, **options):
    options = {"heads": 2, "kv_heads": 1, "capacity": total, **options}
    return make_call(cache, tokens=tokens, total=total, head_size=head_size, **options)


@needs_vnni
@pytest.mark.parametrize(("cache", "head_size"), [("i8", 64), ("i8-channel", 64), ("i4", 128), ("i4-channel", 128)])
@pytest.mark.parametrize("kind", QUERIES)
def test_errors_are_those_of_float32(kind, cache, head_size):
    worst = np.zeros(2)
    for seed in range(3):
        attributes, inputs = call(cache, head_size=head_size, seed=seed)
        QUERIES[kind](inputs)
        split, single, scale = errors(attributes, inputs)
        worst = np.maximum(worst, [split, single])
    # A few rounding units of the output: below that the two differ by chance.
    assert worst[0] <= 2 * worst[1] + 2e-7 * scale, worst


@needs_vnni
@pytest.mark.parametrize("total", [17, 127, 128, 129, 200, 273, 1100])
def test_every_length_of_the_last_blocks(total):
    attributes, inputs = call(total=total, tokens=min(total, 40))
    split, single, scale = errors(attributes, inputs)
    assert split <= 2 * single + 2e-7 * scale


FEATURES = {
    "softcap": {"softcap": 3.0},
    "window": {"local_window_size": 9},
    "not causal": {"causal": 0},
    "smooth": {"smooth_softmax": 1},
}


@needs_vnni
@pytest.mark.parametrize("cache", ["i8", "i8-channel"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, cache):
    attributes, inputs = call(cache, tokens=60, total=150)
    attributes.update(FEATURES[feature])
    split, single, scale = errors(attributes, inputs)
    assert split <= 2 * single + 2e-7 * scale


@needs_vnni
@pytest.mark.parametrize("value", [0.0, -1e9, -np.inf, -3.4e38])
def test_masks_in_the_bias(value):
    attributes, inputs = call(tokens=40, total=150)
    bias = np.random.default_rng(0).standard_normal((1, 1, 40, 150)).astype(np.float32)
    bias[..., 20:90] = value
    bias[:, :, 3] = value
    inputs["attention_bias"] = bias
    split, single, scale = errors(attributes, inputs)
    assert split <= 2 * single + 2e-7 * scale


def at_codes(inputs, keys, values):
    """Cached codes, and new rows that are quantised to the same."""
    inputs["past_key"][:], inputs["past_value"][:] = keys, values
    for name, code in (("key", keys), ("value", values)):
        inputs[name] = np.full_like(inputs[name], code * inputs[f"{name[0]}_scale"].flat[0])


@needs_vnni
@pytest.mark.parametrize(("cache", "head_size"), [("i8", 256), ("i4", 512)])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.slow
def test_extreme_codes_and_digits_are_exact(cache, head_size, sign):
    """All codes and digits at their bounds in the widest head: equal keys, so that the output is the value."""
    attributes, inputs = call(cache, tokens=70, total=300, head_size=head_size)
    at_codes(inputs, -128 if cache == "i8" else 0, -128 if cache == "i8" else 0)
    if cache == "i4":
        for name in ("key", "value"):
            inputs[name] = np.full_like(inputs[name], -8 * inputs[f"{name[0]}_scale"].flat[0])
    inputs["query"][:] = sign
    output = run(attributes, inputs).output
    lowest = np.float32(-128 if cache == "i8" else -8) * inputs["v_scale"].flat[0]
    np.testing.assert_allclose(output, lowest, rtol=3e-7)


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), [("i8", sp.LARGEST_PREFILL_COLUMNS), ("i4", 512)])
def test_sums_at_their_bounds_do_not_overflow(cache, head_size):
    """The largest sums of all: keys of the least code win, whose values are the largest code."""
    attributes, inputs = call(cache, tokens=40, total=300, head_size=head_size)
    least, largest = (-128, 127) if cache == "i8" else (0, 0xFF)
    for name, winning, losing in (("past_key", least, largest), ("past_value", largest, least)):
        inputs[name][:, :, ::2], inputs[name][:, :, 1::2] = winning, losing
    attributes["scale"], inputs["query"][:], inputs["k_scale"][:] = 1.0, -1.98, 1.0
    inputs["key"][:], inputs["value"][:] = np.float32(-1e6), np.float32(1e6)
    wanted = (127 if cache == "i8" else 7) * inputs["v_scale"][0]
    np.testing.assert_allclose(run(attributes, inputs).output, wanted, rtol=3e-7)


def test_no_sum_overflows_at_the_extremes():
    columns, keys = sp.LARGEST_PREFILL_COLUMNS, 256
    # A lane's sum with unsigned codes, before the code of zero is subtracted, and the join of two.
    assert 128 * 255 * columns + 128 * 128 * columns < 2**31
    assert (128 * 128 * columns << 8) + 128 * 128 * columns < 2**31
    assert (128 * 128 * keys << 8) + 255 * 128 * keys < 2**31
    sizes = machine_variant(SPLIT).sizes.default
    assert sizes.split_kv_block <= keys
    assert sizes.splits_prefill("i8", columns) and not sizes.splits_prefill("i8", columns + 64)


@needs_vnni
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_gives_nan_in_its_row_alone(bad):
    attributes, inputs = call(tokens=40, total=60)
    wanted = run(attributes, inputs).output
    inputs["query"][0, 7, 3] = bad
    output = run(attributes, inputs).output
    assert np.isnan(output[0, 7, :64]).all()
    output[0, 7, :64] = wanted[0, 7, :64]
    np.testing.assert_array_equal(output, wanted)


@needs_vnni
def test_results_are_the_same_for_any_number_of_threads_and_batch_mates():
    attributes, inputs = call(tokens=130, total=130, heads=4, kv_heads=2)
    outputs = [run(attributes, inputs, num_threads=n).output for n in (1, 2, 5)]
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])
    twice = {
        name: np.concatenate([array, array]) if name in ("query", "key", "value", "past_key", "past_value") else array
        for name, array in inputs.items()
    }
    twice["seqlens_k"] = np.repeat(inputs["seqlens_k"], 2)
    both = run(attributes, twice).output
    np.testing.assert_array_equal(both[1], outputs[0][0])
