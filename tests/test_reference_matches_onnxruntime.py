"""The NumPy reference against live onnxruntime: cache bytes identical, numbers within 1e-5."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import INPUT_NAMES, OracleResult, comparable_rows, run_onnxruntime
from random_configurations import PHASES, Configuration, random_configuration
from random_steps import CACHES, random_step

from gqa_tvm.reference import ReferenceResult, group_query_attention

SEEDS_PER_TEST = 10
TESTS = 16
STEPS_PER_TEST = 24
STEP_TESTS = 5
QUANTIZED: dict[str, Any] = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}


def compare(
    reference: ReferenceResult,
    oracle: OracleResult,
    rows: np.ndarray,
    label: str,
    tolerance: float = 1e-5,
) -> None:
    """Whole caches, and output and output_qk in rows [B, S]; infinite scores must be the same."""
    np.testing.assert_array_equal(reference.present_key, oracle.present_key, err_msg=label)
    np.testing.assert_array_equal(reference.present_value, oracle.present_value, err_msg=label)
    pairs = [(oracle.output, reference.output)]
    assert (oracle.output_qk is None) == (reference.output_qk is None), label
    if oracle.output_qk is not None and reference.output_qk is not None:
        pairs.append((oracle.output_qk.swapaxes(1, 2), reference.output_qk.swapaxes(1, 2)))
    for actual, expected in pairs:
        actual, expected = actual[rows], expected[rows]
        same = actual == expected
        error = np.abs(actual[~same] - expected[~same])
        limit = tolerance * np.maximum(1, np.abs(expected[~same]))
        assert (error <= limit).all(), f"{label}: off by up to {error.max()}"


def run_both(
    attributes: dict[str, Any], inputs: dict[str, Any], in_place: bool = False
) -> tuple[ReferenceResult, OracleResult]:
    inputs = dict.fromkeys(INPUT_NAMES) | inputs
    reference = group_query_attention(**inputs, **attributes, in_place=in_place)
    return reference, run_onnxruntime(attributes, inputs, in_place=in_place)


@pytest.mark.parametrize("chunk", range(TESTS))
def test_random_configurations(chunk: int) -> None:
    for seed in range(chunk * SEEDS_PER_TEST, (chunk + 1) * SEEDS_PER_TEST):
        call = random_configuration(seed)
        results = run_both(call.attributes, call.inputs, call.in_place)
        compare(*results, comparable_rows(call.attributes, call.inputs), str(call))


def test_the_seeds_cover_every_phase_and_feature() -> None:
    calls = [random_configuration(seed) for seed in range(TESTS * SEEDS_PER_TEST)]
    assert {call.phase for call in calls} == set(PHASES)
    assert {call.in_place for call in calls} == {False, True}
    features = set().union(*(_features(call) for call in calls))
    widths = {f"kv_cache_bit_width={bits}" for bits in (4, 8)}
    outputs = {f"qk_output={mode}" for mode in (1, 2)}
    flags = {"rotary_interleaved=0", "rotary_interleaved=1", "smooth_softmax=1", "causal=0"}
    names = {"scale", "softcap", "local_window_size", "position_ids", "attention_bias", "head_sink"}
    assert widths | outputs | flags | names <= features
    skipped = sum(not comparable_rows(call.attributes, call.inputs).all() for call in calls)
    assert 0 < skipped < len(calls) / 10


def _features(call: Configuration) -> set[str]:
    given = {name for name, array in call.inputs.items() if array is not None}
    pairs = {f"{name}={value}" for name, value in call.attributes.items()}
    return given | pairs | set(call.attributes)


def test_same_seed_same_call() -> None:
    first, second = random_configuration(7), random_configuration(7)
    assert str(first) == str(second)
    for name in INPUT_NAMES:
        np.testing.assert_array_equal(first.inputs[name], second.inputs[name])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scale", [0.1, 0.37, 0.0, -0.2, 1e-39, np.inf, np.nan])
def test_codes_of_edge_values(scale: float, bits: int) -> None:
    """Halves and their neighbours tell reciprocal from division; then what is not finite."""
    step = np.float32(scale if np.isfinite(scale) and scale else 1)
    halves = (np.arange(-200, 200, dtype=np.float32) + np.float32(0.5)) * step
    near = [halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, halves * 2)]
    odd = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38], np.float32)
    values = np.concatenate([*near, odd]).reshape(1, -1, 8)
    tokens = values.shape[1]
    shape = (1, 1, 0, 8 if bits == 8 else 4)
    inputs = {
        "query": np.zeros_like(values),
        "key": values,
        "value": values,
        "past_key": np.zeros(shape, np.int8 if bits == 8 else np.uint8),
        "past_value": np.zeros(shape, np.int8 if bits == 8 else np.uint8),
        "seqlens_k": np.array([tokens - 1], np.int32),
        "total_sequence_length": np.array([tokens], np.int32),
        "k_scale": np.array([scale], np.float32),
        "v_scale": np.array([scale], np.float32),
    }
    attributes = {"num_heads": 1, "kv_num_heads": 1, "kv_cache_bit_width": bits} | QUANTIZED
    reference, oracle = run_both(attributes, inputs)
    np.testing.assert_array_equal(reference.present_key, oracle.present_key)
    np.testing.assert_array_equal(reference.present_value, oracle.present_value)


def _ragged_chunk(seed: int, dtype: type[np.floating[Any]], rotary: bool) -> dict[str, Any]:
    """B3 S4 N4 N_kv 2 H16 over an int8 cache of 16 rows, entries of 9, 5 and 12 keys."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128, 128, (2, 3, 2, 16, 16), np.int8)
    inputs: dict[str, Any] = {
        "query": rng.standard_normal((3, 4, 64)).astype(dtype),
        "key": rng.standard_normal((3, 4, 32)).astype(dtype),
        "value": rng.standard_normal((3, 4, 32)).astype(dtype),
        "past_key": codes[0],
        "past_value": codes[1],
        "seqlens_k": np.array([8, 4, 11], np.int32),
        "total_sequence_length": np.array([12], np.int32),
        "k_scale": np.array([0.02], np.float32),
        "v_scale": np.array([0.02], np.float32),
    }
    if rotary:
        inputs["cos_cache"], inputs["sin_cache"] = rng.uniform(-1, 1, (2, 16, 8)).astype(dtype)
    return inputs


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_query_seqlens(rotary: bool, in_place: bool) -> None:
    inputs = _ragged_chunk(0, np.float32, rotary)
    counts = np.array([4, 0, 2], np.int32)
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": int(rotary)}
    attributes |= QUANTIZED | {"kv_cache_bit_width": 8}
    results = run_both(attributes, inputs | {"query_seqlens": counts}, in_place)
    # onnxruntime leaves the padding rows of the output as it finds them.
    compare(*results, np.arange(4) < counts[:, None], f"{rotary=} {in_place=}")


@pytest.mark.parametrize("rotary", [False, True])
def test_float16_query(rotary: bool) -> None:
    inputs = _ragged_chunk(1, np.float16, rotary)
    for name in "query", "key", "value":
        inputs[name] = np.ascontiguousarray(inputs[name][:, :1])
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": int(rotary)}
    attributes |= QUANTIZED | {"kv_cache_bit_width": 8}
    compare(*run_both(attributes, inputs), np.ones((3, 1), bool), f"{rotary=}", tolerance=2e-3)


@pytest.mark.parametrize("chunk", range(STEP_TESTS))
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 2e-3)], ids=["f32", "f16"])
def test_random_padded_chunks_and_sliding_windows(dtype: type[np.floating[Any]], tolerance: float, chunk: int) -> None:
    for seed in range(chunk * STEPS_PER_TEST, (chunk + 1) * STEPS_PER_TEST):
        step = random_step(seed, dtype)
        reference, oracle = run_both(step.attributes, step.inputs, step.in_place)
        if "sliding_window_cache" in step.attributes:
            # Rows behind the retained ones are onnxruntime's own business.
            reference, oracle = (_retained_rows(result, step.retained) for result in (reference, oracle))
        # onnxruntime leaves the padding rows of the output as it finds them.
        rows = np.arange(step.inputs["query"].shape[1]) < step.counts[:, None]
        compare(reference, oracle, rows, f"seed {seed}: {step}", tolerance)
        assert not reference.output[~rows].any()


def _retained_rows(result: Any, retained: np.ndarray) -> Any:
    row = np.arange(result.present_key.shape[2])
    kept = (row < retained[:, None])[:, None, :, None]
    zeros = {name: np.where(kept, getattr(result, name), 0) for name in ("present_key", "present_value")}
    return result._replace(**zeros)


def test_the_steps_cover_every_feature() -> None:
    steps = [random_step(seed) for seed in range(STEP_TESTS * STEPS_PER_TEST)]
    features = set().union(*(step.features for step in steps))
    pairs = {f"sliding={a} padded={b}" for a, b in ((True, False), (True, True), (False, True))}
    lengths = {"idle entry", "more tokens than capacity", "T below the totals", "packed"}
    names = {"do_rotary", "position_ids", "attention_bias", "head_sink", "softcap", "smooth_softmax", "qk_output"}
    assert pairs | lengths | names | set(CACHES) <= features
    assert {step.in_place for step in steps} == {False, True}


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("half", [8, 16, 24])
def test_float16_rotation_is_rounded_before_the_cache(half: int, interleaved: int, bits: int) -> None:
    """48 tokens of H48 over magnitudes from 3e-4 to 400, subnormal products included."""
    rng = np.random.default_rng(half)
    tokens = (rng.standard_normal((1, 48, 48)) * np.exp(rng.uniform(-8, 6, (1, 48, 1)))).astype(np.float16)
    dtype, columns = {0: (np.float16, 48), 8: (np.int8, 48), 4: (np.uint8, 24)}[bits]
    past = np.zeros((1, 1, 0, columns), dtype)
    inputs: dict[str, Any] = dict.fromkeys(("query", "key", "value"), tokens) | {
        "past_key": past,
        "past_value": past,
        "seqlens_k": np.array([47], np.int32),
        "total_sequence_length": np.array([48], np.int32),
    }
    inputs["cos_cache"], inputs["sin_cache"] = rng.uniform(-1, 1, (2, 48, half)).astype(np.float16)
    attributes: dict[str, Any] = {"num_heads": 1, "kv_num_heads": 1, "do_rotary": 1, "rotary_interleaved": interleaved}
    if bits:
        attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": bits}
        inputs["k_scale"], inputs["v_scale"] = rng.uniform(0.01, 0.1, (2, 48)).astype(np.float32)
    reference, oracle = run_both(attributes, inputs)
    assert reference.present_key.dtype == dtype
    np.testing.assert_array_equal(reference.present_key, oracle.present_key)
    np.testing.assert_array_equal(reference.present_value, oracle.present_value)


@pytest.mark.parametrize("name", ["head_sink", "attention_bias"])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_scores_that_are_not_finite(name: str, number: float) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((3, 1, 3, 16)).astype(np.float32)
    inputs: dict[str, Any] = dict(zip(("query", "key", "value"), tokens, strict=True)) | {
        "seqlens_k": np.array([2], np.int32),
        "total_sequence_length": np.array([3], np.int32),
    }
    inputs[name] = np.array([number], np.float32)
    if name == "attention_bias":
        inputs[name] = np.zeros((1, 1, 3, 3), np.float32)
        inputs[name][0, 0, 1, 0] = number
    reference, oracle = run_both({"num_heads": 1, "kv_num_heads": 1, "qk_output": 2}, inputs)
    np.testing.assert_allclose(oracle.output, reference.output, atol=1e-6)
    np.testing.assert_allclose(oracle.output_qk, reference.output_qk, atol=1e-6)
