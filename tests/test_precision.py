"""precision="fast" and approximate_qk: only when asked for, within their bounds, exact where no such kernel is."""

from __future__ import annotations

import numpy as np
import pytest
from operator_calls import assert_close, expected, first_of, make_call

from gqa_tvm import GroupQueryAttention, InvalidArgument
from gqa_tvm.targets import best_target, missing_features

SPLIT, FLOAT = "x86-avx512-vnni", "x86-avx512"
VARIABLE = "ORT_MLAS_QKGEMM_S8_APPROX_VNNI"
needs_vnni = pytest.mark.skipif(bool(missing_features(SPLIT)), reason="needs AVX-512 VNNI")
SHAPES = [(1, 300), (1, 1500), (70, 200)]
# Relative to the largest output: of 16-bit probabilities, of 16-bit rows too, and of 8-bit rows.
BOUNDS = {"balanced": 2e-4, "fast": 2e-4, "approximate": 4e-2}


def call(cache="i8", tokens=1, total=300, **options):
    options = {"heads": 4, "kv_heads": 2, "head_size": 64, "capacity": total, **options}
    return make_call(cache, tokens=tokens, total=total, **options)


def options_of(precision):
    return {"approximate_qk": True} if precision == "approximate" else {"precision": precision}


def error(attributes, inputs, **options):
    """(largest error relative to the largest output, precision that ran)."""
    op = GroupQueryAttention(**attributes, **options)
    exact = expected(attributes, inputs).output
    return np.abs(op(**inputs).output - exact).max() / np.abs(exact).max(), op.last_plan.precision


@needs_vnni
@pytest.mark.parametrize(("tokens", "total"), SHAPES)
@pytest.mark.parametrize("cache", first_of(["i8", "i8-channel"]))
@pytest.mark.parametrize("precision", BOUNDS)
def test_errors_stay_within_the_bound(precision, cache, tokens, total):
    for seed in range(3):
        attributes, inputs = call(cache, tokens, total, seed=seed)
        found, ran = error(attributes, inputs, target=SPLIT, **options_of(precision))
        assert ran == precision and found <= BOUNDS[precision]
        # It is another computation than the exact one, and less exact.
        assert found > error(attributes, inputs, target=SPLIT)[0]


@needs_vnni
@pytest.mark.parametrize(("precision", "bound"), [("balanced", 1e-4), ("fast", 2e-3)])
@pytest.mark.parametrize(("tokens", "total"), SHAPES[1:])
def test_sharp_attention(tokens, total, precision, bound):
    """Scores of deviation 18: nearly all weight is on one key, and 16-bit query rows are what errs."""
    attributes, inputs = call(tokens=tokens, total=total)
    keys = inputs["past_key"] * inputs["k_scale"].flat[0]
    inputs["query"] *= np.float32(18 * 8 / (keys.std() * 64**0.5 * inputs["query"].std()))
    assert error(attributes, inputs, target=SPLIT, precision=precision)[0] <= bound


@pytest.mark.slow
@needs_vnni
@pytest.mark.parametrize(("tokens", "total"), SHAPES)
def test_int4_has_a_fast_form_only(tokens, total):
    attributes, inputs = call("i4", tokens, total, head_size=128)
    found, ran = error(attributes, inputs, target=SPLIT, precision="fast")
    assert ran == "fast" and found <= BOUNDS["fast"]
    assert error(attributes, inputs, target=SPLIT, approximate_qk=True)[1] == "exact"


@pytest.mark.parametrize(("tokens", "total"), SHAPES)
def test_the_default_is_exact(tokens, total, monkeypatch):  # B63
    monkeypatch.delenv(VARIABLE, raising=False)
    attributes, inputs = call("i8", tokens, total)
    op = GroupQueryAttention(**attributes)
    assert_close(op(**inputs).output, expected(attributes, inputs).output)
    assert op.last_plan.precision == "exact"


@needs_vnni
@pytest.mark.parametrize(("value", "ran"), [("1", "approximate"), ("0", "exact"), ("", "exact"), ("true", "exact")])
def test_the_environment_asks_for_8_bits(value, ran, monkeypatch):  # B63
    monkeypatch.setenv(VARIABLE, value)
    attributes, inputs = call()
    assert error(attributes, inputs, target=SPLIT)[1] == ran
    # What the caller says comes first.
    assert error(attributes, inputs, target=SPLIT, approximate_qk=False)[1] == "exact"
    assert error(attributes, inputs, target=SPLIT, precision="fast")[1] == "fast"
    # As in ONNX Runtime it changes nothing but INT8.
    assert error(*call("f32"), target=SPLIT)[1] == "exact"


@pytest.mark.parametrize("options", [{"precision": "fast"}, {"approximate_qk": True}], ids=str)
@pytest.mark.parametrize(
    ("cache", "head_size", "extra"),
    [("f32", 64, {}), ("i8", 24, {}), ("i8", 64, {"strategy": "naive"}), ("i8", 64, {"target": FLOAT})],
)
def test_what_has_no_such_kernel_is_exact(cache, head_size, extra, options):
    if missing_features(extra.get("target", best_target())):
        pytest.skip("this CPU cannot run the target")
    attributes, inputs = call(cache, total=90, head_size=head_size)
    op = GroupQueryAttention(**attributes, **extra, **options)
    assert_close(op(**inputs).output, expected(attributes, inputs).output)
    assert op.last_plan.precision == "exact"


@pytest.mark.slow
@needs_vnni
@pytest.mark.parametrize(
    ("head_size", "ran"), [(256, "approximate"), (100, "approximate"), (288, "exact"), (24, "exact")]
)
def test_equal_codes_at_their_largest(head_size, ran):  # B62
    """q and k of 127 everywhere: sums above 2^24 whose zero points cancel exactly; heads with a tail."""
    attributes, inputs = call(total=90, heads=1, kv_heads=1, head_size=head_size)
    inputs["past_key"][:] = 127
    inputs["key"] = np.full_like(inputs["key"], 127 * inputs["k_scale"].flat[0])
    inputs["query"][:] = 127
    attributes["scale"] = 1e-3
    op = GroupQueryAttention(**attributes, target=SPLIT, approximate_qk=True)
    assert_close(op(**inputs).output, expected(attributes, inputs).output)
    assert op.last_plan.precision == ran


@needs_vnni
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize(("tokens", "total"), SHAPES[1:])
def test_results_are_the_same_for_any_number_of_threads(tokens, total, precision):
    attributes, inputs = call("i8", tokens, total)
    outputs = [
        GroupQueryAttention(**attributes, target=SPLIT, num_threads=n, **options_of(precision))(**inputs).output
        for n in (1, 2, 5)
    ]
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "half"}, "precision must be one of exact, balanced, fast, got 'half'"),
        ({"approximate_qk": 1}, "approximate_qk must be True, False or None, got 1"),
        ({"precision": "fast", "approximate_qk": True}, "not both"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(InvalidArgument, match=message):
        GroupQueryAttention(num_heads=2, kv_num_heads=1, **options)
