"""The error text of live onnxruntime for a possibly broken GroupQueryAttention call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

_NAMES = (
    "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache "
    "position_ids attention_bias head_sink k_scale v_scale q_norm_weight k_norm_weight "
    "query_seqlens"
).split()
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
    outputs = [
        helper.make_tensor_value_info(name, element, None)
        for name, element in (("output", query), ("present_key", cache), ("present_value", cache))
    ]
    wired = [name if name in types else "" for name in _NAMES]
    node = helper.make_node(
        "GroupQueryAttention",
        wired,
        ["output", "present_key", "present_value"],
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
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes and inputs of a call with 2 query heads, 1 KV head, head size 16 that is valid."""
    attributes: dict[str, Any] = {"num_heads": 2, "kv_num_heads": 1, "do_rotary": rotary}
    cache = {0: np.float32, 8: np.int8, 4: np.uint8}[bits]
    inputs: dict[str, Any] = dict.fromkeys(_NAMES)
    inputs["query"] = np.ones((batch, length, 32), np.float32)
    for name in ("key", "value"):
        inputs[name] = np.ones((batch, length, 16), np.float32)
        inputs[f"past_{name}"] = np.ones((batch, 1, capacity, 8 if bits == 4 else 16), cache)
    inputs["seqlens_k"] = np.full(batch, total - 1, np.int32)
    inputs["total_sequence_length"] = np.array([total], np.int32)
    if bits:
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
        attributes["kv_cache_bit_width"] = bits
        inputs["k_scale"] = inputs["v_scale"] = np.ones(1, np.float32)
    if rotary:
        inputs["cos_cache"] = inputs["sin_cache"] = np.ones((16, 8), np.float32)
    return attributes, inputs


def broken_call(call: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes and inputs of a valid call, some of them replaced."""
    attributes, inputs = valid_call(**call)
    for name, value in changes.items():
        (inputs if name in inputs else attributes)[name] = value
    return attributes, inputs
