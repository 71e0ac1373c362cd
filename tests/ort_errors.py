"""Calls of GroupQueryAttention, valid or broken, and the error text of live onnxruntime for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from gqa_tvm.attributes import Attributes
from gqa_tvm.validation import Inputs, Problem, validate

_NAMES = (
    "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache "
    "position_ids attention_bias head_sink k_scale v_scale q_norm_weight k_norm_weight "
    "query_seqlens"
).split()
NO_PAST = {"past_key": None, "past_value": None}
WINDOW = {"sliding_window_cache": 1, "local_window_size": 4}
_Signature = tuple[tuple[str, int, int], ...]


@lru_cache(maxsize=256)
def _session(attributes: tuple[tuple[str, Any], ...], signature: _Signature) -> Any:
    """Build a session whose inputs have dynamic dimensions, so the kernel meets the fault."""
    types = {name: (element, rank) for name, element, rank in signature}
    values = [
        helper.make_tensor_value_info(name, element, [f"{name}_{axis}" for axis in range(rank)] if rank >= 0 else None)
        for name, (element, rank) in types.items()
    ]
    query = types["query"][0]
    cache = types.get("past_key", types["query"])[0]
    elements = {"output": query, "present_key": cache, "present_value": cache}
    if dict(attributes).get("qk_output"):
        elements["output_qk"] = query
    outputs = [helper.make_tensor_value_info(name, element, None) for name, element in elements.items()]
    wired = [name if name in types else "" for name in _NAMES]
    node = helper.make_node(
        "GroupQueryAttention",
        wired,
        list(elements),
        domain="com.microsoft",
        **dict(attributes),
    )
    model = helper.make_model(
        helper.make_graph([node], "broken_call", values, outputs),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    reason = "onnxruntime 1.32 has no wheel for this Python"
    onnxruntime = pytest.importorskip("onnxruntime", reason=reason)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def f32(*shape: int) -> np.ndarray:
    """Float32 zeros."""
    return np.zeros(shape, np.float32)


def i8(*shape: int) -> np.ndarray:
    """Int8 zeros."""
    return np.zeros(shape, np.int8)


def i32(*values: int) -> np.ndarray:
    """An int32 vector."""
    return np.array(values, np.int32)


def ids(*values: int) -> np.ndarray:
    """One batch entry's position_ids."""
    return np.array([values], np.int64)


def ort_error(attributes: Mapping[str, Any], inputs: Mapping[str, np.ndarray | None]) -> str:
    """Return the text of onnxruntime's error for this call, "" when onnxruntime accepts it."""
    given = {name: array for name, array in inputs.items() if array is not None}
    signature = tuple(
        (name, int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype)), -1) for name, array in given.items()
    )
    try:
        session = _session(tuple(sorted(attributes.items())), signature)
        session.run(None, given)
    except Exception as error:  # onnxruntime's exception classes share no public base
        return str(error)
    return ""


def valid_call(
    batch: int = 1,
    length: int = 1,
    capacity: int = 8,
    total: int = 5,
    bits: int = 0,
    rotary: int = 0,
    head_size: int = 16,
    dtype: Any = np.float32,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes and inputs of a call with 2 query heads and 1 KV head that is valid."""
    attributes: dict[str, Any] = {"num_heads": 2, "kv_num_heads": 1, "do_rotary": rotary}
    cache = {0: dtype, 8: np.int8, 4: np.uint8}[bits]
    inputs: dict[str, Any] = dict.fromkeys(_NAMES)
    inputs["query"] = np.ones((batch, length, 2 * head_size), dtype)
    for name in ("key", "value"):
        inputs[name] = np.ones((batch, length, head_size), dtype)
        inputs[f"past_{name}"] = np.ones((batch, 1, capacity, (head_size + 1) // 2 if bits == 4 else head_size), cache)
    inputs["seqlens_k"] = np.full(batch, total - 1, np.int32)
    inputs["total_sequence_length"] = np.array([total], np.int32)
    if bits:
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
        attributes["kv_cache_bit_width"] = bits
        inputs["k_scale"] = inputs["v_scale"] = np.ones(1, np.float32)
    if rotary:
        inputs["cos_cache"] = inputs["sin_cache"] = np.ones((16, head_size // 2), dtype)
    return attributes, inputs


def broken_call(call: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes and inputs of a valid call, some of them replaced."""
    attributes, inputs = valid_call(**call)
    for name, value in changes.items():
        (inputs if name in inputs else attributes)[name] = value
    return attributes, inputs


def validated(call: Mapping[str, Any], **changes: Any) -> Problem:
    """What a valid call means with some attributes and inputs replaced."""
    attributes, inputs = broken_call(call, changes)
    return validate(Attributes(**attributes), Inputs(**inputs))
