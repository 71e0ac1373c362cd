"""Random damage to valid calls: InvalidArgument and untouched arrays, or the reference's result. Nothing else."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np
import pytest
from configuration import Configuration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import INPUT_NAMES
from random_configurations import random_configuration

from gqa_tvm import GroupQueryAttention, InvalidArgument
from gqa_tvm.reference import group_query_attention

INTEGERS = (-(2**31), -5, -1, 0, 1, 2, 3, 7, 16, 1000)
ODD_NUMBERS = (2**31, 2**32 + 4, -(2**63), 2**70, 0.5, -1.0, float("nan"), float("inf"), 1e300, True, None, "1", [1])
DTYPES = (
    "float64",
    "float16",
    "float32",
    "int8",
    "uint8",
    "int32",
    "int64",
    "bool",
    "complex64",
    "object",
    "U4",
    ">f4",
)
NOT_ARRAYS = (3, -1, 2.5, "query", [1, 2], [[1], [2, 3]], object(), {}, np.float32(1), np.ones((), "S3"))
ATTRIBUTES = (
    *("num_heads", "kv_num_heads", "scale", "softcap", "do_rotary", "rotary_interleaved", "local_window_size"),
    *("smooth_softmax", "sliding_window_cache", "causal", "qk_output", "k_quant_type", "v_quant_type"),
    *("kv_cache_bit_width", "q_norm_epsilon", "k_norm_epsilon", "qk_norm_epsilon", "unknown"),
)
LENGTHS = ("seqlens_k", "total_sequence_length", "query_seqlens", "position_ids")


def _few_kernels(configuration: Configuration) -> bool:
    # Damage makes other head sizes anyway; the calls themselves need not.
    return configuration.head_size in (8, 16, 64) and configuration.query != "bfloat16"


CONFIGURATIONS = [c for c in (random_configuration([0, i]) for i in range(300)) if _few_kernels(c)]


def _reshaped(draw: Any, array: np.ndarray) -> np.ndarray:
    """Another shape, filled from the old elements (zeros where there were none)."""
    shape = list(array.shape)
    kind = draw(st.sampled_from(["extent", "drop", "add", "swap", "flat"]))
    if kind == "extent" and shape:
        axis = draw(st.integers(0, len(shape) - 1))
        shape[axis] = max(0, draw(st.sampled_from([0, 1, 2, shape[axis] - 1, shape[axis] + 1, 2 * shape[axis]])))
    elif kind == "drop" and shape:
        shape.pop(draw(st.integers(0, len(shape) - 1)))
    elif kind == "add":
        shape.insert(draw(st.integers(0, len(shape))), 1)
    elif kind == "swap":
        shape.reverse()
    else:
        shape = [array.size]
    size = int(np.prod(shape, dtype=np.int64))
    old = array.reshape(-1)
    return np.concatenate([old[:size], np.zeros(max(0, size - old.size), array.dtype)]).reshape(shape)


def _revalued(draw: Any, name: str, array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    if array.size:
        index = draw(st.integers(0, array.size - 1))
        if name in LENGTHS and array.dtype.kind == "i" and array.dtype.itemsize >= 4:
            changed.reshape(-1)[index] = draw(st.sampled_from(INTEGERS))
        elif array.dtype.kind == "f":
            changed.reshape(-1)[index] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -1.0]))
    return changed


def _damage_input(draw: Any, inputs: dict[str, Any]) -> None:
    name = draw(st.sampled_from(INPUT_NAMES))
    array = inputs[name]
    kind = draw(st.sampled_from(["absent", "other", "dtype", "shape", "shape", "value", "value", "no array"]))
    if kind == "absent":
        inputs[name] = None
    elif kind == "other" or not isinstance(array, np.ndarray):
        inputs[name] = inputs[draw(st.sampled_from(INPUT_NAMES))]
    elif kind == "no array":
        inputs[name] = draw(st.sampled_from(NOT_ARRAYS))
    elif kind == "dtype":
        dtype = draw(st.sampled_from(DTYPES))
        with warnings.catch_warnings(), contextlib.suppress(ValueError, TypeError, OverflowError):
            warnings.simplefilter("ignore")
            inputs[name] = array.astype(dtype)
    elif kind == "shape":
        inputs[name] = _reshaped(draw, array)
    elif array.dtype.kind in "fi":
        inputs[name] = _revalued(draw, name, array)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _same(a: Any, b: Any) -> bool:
    return a is b if not isinstance(a, np.ndarray) else a.tobytes() == b.tobytes()


def _assert_result(got: Any, attributes: dict[str, Any], inputs: dict[str, Any], in_place: bool) -> None:
    # True is the integer 1 to the operator; NumPy's reshape would refuse it.
    attributes = {name: int(value) if value is True else value for name, value in attributes.items()}
    wanted = group_query_attention(**inputs, **attributes, in_place=in_place)
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[inputs["query"].dtype.name]
    for name in ("output", "output_qk"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        if theirs is not None:
            with np.errstate(all="ignore"):
                rounded = theirs.astype(ours.dtype).astype(np.float64)
                np.testing.assert_allclose(ours.astype(np.float64), rounded, rtol=tolerance, atol=tolerance)
    assert got.present_key.shape == wanted.present_key.shape and got.present_key.dtype == wanted.present_key.dtype


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_calls(data: st.DataObject) -> None:
    draw = data.draw
    call = draw(st.sampled_from(CONFIGURATIONS)).draw()
    attributes, inputs = dict(call.attributes), dict(call.inputs)
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.integers(0, 3)) == 0:
            values = (*INTEGERS, *ODD_NUMBERS, "NONE", "per_tensor", "PER_CHANNEL", "8")
            attributes[draw(st.sampled_from(ATTRIBUTES))] = draw(st.sampled_from(values))
        else:
            _damage_input(draw, inputs)
    in_place = draw(st.booleans()) and isinstance(inputs["past_key"], np.ndarray)
    before = {name: _copy(value) for name, value in inputs.items()}
    presents = {f"present_{side}": inputs[f"past_{side}"] for side in ("key", "value")} if in_place else {}
    try:
        got = GroupQueryAttention(strategy="naive", num_threads=2, **attributes)(**inputs, **presents)
    except InvalidArgument as error:
        assert str(error)
        assert all(_same(value, before[name]) for name, value in inputs.items())
    else:
        _assert_result(got, attributes, before, in_place)
