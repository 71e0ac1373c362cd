"""The NumPy reference against live onnxruntime: cache bytes identical, numbers within 1e-5."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import INPUT_NAMES, OracleResult, comparable_rows, run_onnxruntime
from random_configurations import PHASES, Configuration, random_configuration

from gqa_tvm.reference import ReferenceResult, group_query_attention

SEEDS_PER_TEST = 10
TESTS = 16
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
