"""The NumPy reference against live onnxruntime: cache bytes identical, numbers within 1e-5."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import INPUT_NAMES, OracleResult, run_onnxruntime
from parity import Mismatch, NotACall, check_reference, difference
from random_configurations import random_configuration

from gqa_tvm.reference import ReferenceResult, group_query_attention

CHUNK = 20
QUANTIZED: dict[str, Any] = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}


def run_both(attributes: dict[str, Any], inputs: dict[str, Any]) -> tuple[ReferenceResult, OracleResult]:
    inputs = dict.fromkeys(INPUT_NAMES) | inputs
    return group_query_attention(**inputs, **attributes), run_onnxruntime(attributes, inputs)


@pytest.mark.parametrize("first", range(0, 400, CHUNK))
def test_random_configurations(first: int) -> None:
    for index in range(first, first + CHUNK):
        configuration = random_configuration([2, index], wide=True, own=False)
        # Ids that onnxruntime reads wrongly are the only thing drawn that it cannot be asked about.
        if difference(configuration) is None:
            try:
                check_reference(configuration)
            except (Mismatch, NotACall) as error:
                raise AssertionError(f"call {index}: {configuration}\n{error}") from error
        else:
            assert difference(configuration) == "#D4"


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
