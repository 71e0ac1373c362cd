"""Known faults of INT8 and INT4 caches: each test is the smallest case that showed one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from known_fault_calls import STRATEGIES, checked, operate, stored
from operator_calls import CACHES, assert_close, expected, make_call
from reference_calls import attention, random

from gqa_tvm import GroupQueryAttention, InvalidArgument
from gqa_tvm.targets import FALLBACKS, architecture, missing_features

RUNNABLE = [target for target in FALLBACKS.get(architecture(), ("generic",)) if not missing_features(target)]
CODES = [cache for cache in CACHES if cache != "f32"]

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_target = pytest.mark.parametrize("target", RUNNABLE)


def row(*values):
    """One token [1, 1, 1, H]."""
    return np.array(values, np.float32).reshape(1, 1, 1, -1)


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("head_size", [8, 64, 80, 128])
def test_every_target_reads_the_codes_alike(head_size, target):  # B53, B63
    for total in (1, 7, 8, 15, 31, 63):
        attributes, inputs = make_call("i8", total=total, head_size=head_size)
        op = GroupQueryAttention(**attributes, target=target)
        assert_close(op(**inputs).output, expected(attributes, inputs).output)
        assert op.last_plan.target == target


@each_target
@pytest.mark.parametrize("tokens", [1, 2])
def test_int4_bytes(tokens, target):  # B55
    key = np.tile(row(1, 2, 3, -1, 7.5, -8.5, 100, -100), (1, tokens, 1, 1))
    got = operate(key, key, key, **stored("i4"), strategy="naive", target=target)
    for present in (got.present_key, got.present_value):
        assert [bytes(code).hex() for code in present[0, 0]] == ["a97b0f0f"] * tokens


@each_target
@pytest.mark.parametrize("step", ["first prompt", "decode", "chunk"])
def test_int8_rounds_half_to_even_by_the_reciprocal(step, target):  # B56
    key = row(0.05, 0.15, 0.25, -0.05, -0.15, 12.75, -12.85, 100)
    tokens = 1 if step == "decode" else 3
    past = None if step == "first prompt" else np.zeros((1, 1, 4, 8), np.int8)
    new = np.tile(key, (1, tokens, 1, 1))
    got = operate(new, new, new, past, past, **stored("i8", step=0.1), strategy="naive", target=target)
    for present in (got.present_key, got.present_value):
        assert present[0, 0, -tokens:].tolist() == [[0, 2, 2, 0, -2, 127, -128, 127]] * tokens


@each_strategy
@pytest.mark.parametrize(
    ("zero", "cache"),
    [*product(["all steps", "keys"], CODES), *product(["one channel"], ["i8-channel", "i4-channel"])],
)
def test_a_step_of_zero_counts_as_zero(zero, cache, strategy):  # B58
    query, key, value = (random(1, 3, 1, 8, seed=seed) for seed in range(3))
    rest = stored(cache, step=0.5)
    if zero == "keys":
        key[...] = 0
    else:
        rest["k_scale"] = rest["k_scale"].copy()
        rest["k_scale"][: None if zero == "all steps" else 1] = 0
    got = checked(query, key, value, **rest, strategy=strategy).output
    assert np.isfinite(got).all()
    if zero == "one channel":
        query[..., 0] = 0
        assert_close(got, operate(query, key, value, **rest, strategy=strategy).output)
    else:
        # No value is so large that either width clamps it.
        assert_close(got[0, -1], np.rint(2 * value[0, :, 0]).mean(axis=0) / 2)


@pytest.mark.parametrize("shape", [(16,), (2, 8), (2, 1, 8), (1, 2, 1, 8)])
def test_channel_steps_by_kv_head(shape):  # B60
    ones, query = np.ones((1, 1, 2, 8), np.float32), np.ones((1, 1, 4, 8), np.float32)
    steps = np.linspace(0.01, 0.2, 16, dtype=np.float32).reshape(shape)
    rest = CACHES["i8-channel"] | {"k_scale": steps, "v_scale": steps}
    for strategy in STRATEGIES:
        got = checked(query, ones, ones, **rest, strategy=strategy)
        assert got.present_key[0, 0, 0].tolist() == [100, 44, 28, 21, 16, 14, 12, 10]
        assert got.present_key[0, 1, 0].tolist() == [9, 8, 7, 7, 6, 6, 5, 5]


@pytest.mark.parametrize("shape", [(8,), (1,), (1, 1, 1, 8)])
def test_channel_steps_of_another_count(shape):  # B60
    new, steps = np.ones((1, 1, 2, 8), np.float32), np.ones(shape, np.float32)
    with pytest.raises(InvalidArgument, match="k_scale shape mismatch: expected 16 elements"):
        operate(new, new, new, **CACHES["i8-channel"], k_scale=steps, v_scale=np.ones(16, np.float32))


@pytest.mark.parametrize("cache", CODES)
def test_no_approximation_unless_it_is_asked_for(cache, monkeypatch):  # B63
    # A query that 8 bits cannot hold: one large number hides the others.
    rng = np.random.default_rng(0)
    query = np.full((1, 1, 2, 64), 0.75, np.float32)
    query[..., 0] = 1024
    past = rng.integers(0, 256, (1, 1, 40, 32 if cache.startswith("i4") else 64)).astype(np.uint8)
    past = past if cache.startswith("i4") else past.view(np.int8)
    rest = stored(cache, head_size=64, step=0.01) | {"scale": 0.01}
    monkeypatch.delenv("ORT_MLAS_QKGEMM_S8_APPROX_VNNI", raising=False)
    for strategy in STRATEGIES:
        checked(query, random(1, 1, 1, 64), random(1, 1, 1, 64), past, past, **rest, strategy=strategy, tolerance=2e-6)


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ({"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_CHANNEL"}, "requires k_quant_type == v_quant_type"),
        ({"v_quant_type": "PER_TENSOR"}, "v_quant_type needs the same k_quant_type"),
        ({"k_quant_type": "PER_TENSOR"}, "requires k_quant_type == v_quant_type"),
    ],
)
def test_different_types_of_keys_and_values(types, words):  # B64
    with pytest.raises(InvalidArgument, match=words):
        GroupQueryAttention(num_heads=1, kv_num_heads=1, kv_cache_bit_width=8, **types)


def test_different_widths_of_keys_and_values():  # B64
    new = row(*range(8))
    past_key, past_value = np.zeros((1, 1, 4, 8), np.int8), np.zeros((1, 1, 4, 4), np.uint8)
    with pytest.raises(InvalidArgument, match="same type, got int8 and uint8"):
        operate(new, new, new, past_key, past_value, **stored("i8"))


def test_outlier_channel_needs_steps_per_channel():  # B65
    tokens, rng = 1400, np.random.default_rng(0)
    query = rng.standard_normal((1, tokens, 1, 8)).astype(np.float32)
    key = rng.uniform(-1, 1, (1, tokens, 1, 8)).astype(np.float32)
    key[..., 3] *= 100
    query[..., 3] /= 100
    # Values that are codes already: the error is the keys' alone.
    value = rng.integers(-8, 8, (1, tokens, 1, 8)).astype(np.float32)
    exact = attention(query, key, value).output
    largest, errors = np.abs(key).max(axis=(0, 1, 2)), {}
    for cache in ("i4", "i4-channel"):
        steps = largest / 7 if cache == "i4-channel" else largest.max(keepdims=True) / 7
        got = checked(query, key, value, **stored(cache) | {"k_scale": steps.astype(np.float32)}).output
        errors[cache] = np.abs(got - exact).mean()
    assert errors["i4"] > 10 * errors["i4-channel"]


@each_strategy
@pytest.mark.parametrize("cache", CODES)
@pytest.mark.parametrize("tokens", [1, 2])
def test_attention_reads_the_codes_of_new_tokens(tokens, cache, strategy):  # B67
    new = np.full((1, tokens, 1, 8), 0.4, np.float32)
    assert not checked(new, new, new, **stored(cache), strategy=strategy).output.any()
    assert checked(new, new, new + 0.2, **stored(cache), strategy=strategy).output.all()


@each_strategy
@pytest.mark.parametrize("cache", ["f32", *CODES])
@pytest.mark.parametrize("steps", [[1] * 6, [6], [2, 4]], ids=str)
def test_cache_does_not_depend_on_the_steps(steps, cache, strategy):  # B68
    query, key, value = (random(1, 6, 2, 8, seed=seed) for seed in range(3))
    rest = stored(cache, 2, step=0.3) | {"strategy": strategy}
    whole = checked(query, key, value, **rest)
    done, past = 0, [whole.present_key[:, :, :0], whole.present_value[:, :, :0]]
    for step in steps:
        new = np.s_[:, done : done + step]
        result = checked(query[new], key[new], value[new], *past, **rest)
        past = [result.present_key, result.present_value]
        assert_close(result.output, whole.output[new], 1e-6)
        done += step
    assert past[0].tobytes() == whole.present_key.tobytes()
    assert past[1].tobytes() == whole.present_value.tobytes()


@pytest.mark.parametrize("cache", CODES)
def test_old_codes_are_read_with_the_step_of_the_call(cache):  # B70
    new = random(1, 1, 1, 8)
    first = checked(new, new, new, **stored(cache, step=0.5))
    for step in (0.5, 0.25):
        empty = np.zeros((1, 0, 1, 8), np.float32)
        past = first.present_key, first.present_value
        second = checked(new, empty, empty, *past, total=1, **stored(cache, step=step))
        assert_close(second.output, first.output * (step / 0.5))
        np.testing.assert_array_equal(second.present_value, first.present_value)
