"""The live onnxruntime as an oracle: one GroupQueryAttention node run on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from onnx import TensorProto, helper

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime 1.32 has no wheel for this Python")

INPUT_NAMES = (
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "seqlens_k",
    "total_sequence_length",
    "cos_cache",
    "sin_cache",
    "position_ids",
    "attention_bias",
    "head_sink",
    "k_scale",
    "v_scale",
    "q_norm_weight",
    "k_norm_weight",
    "query_seqlens",
)
OUTPUT_NAMES = ("output", "present_key", "present_value", "output_qk")


class OracleError(Exception):
    """onnxruntime refused the model or the call; carries its message."""


class OracleResult(NamedTuple):
    """output [B, S, N*H], present_* [B, N_kv, max(T, C), HP], output_qk [B, N, S, T] or None."""

    output: np.ndarray
    present_key: np.ndarray | None
    present_value: np.ndarray | None
    output_qk: np.ndarray | None


def run_onnxruntime(
    attributes: Mapping[str, Any],
    inputs: Mapping[str, np.ndarray | None],
    *,
    in_place: bool = False,
    outputs: Sequence[str] | None = None,
) -> OracleResult:
    """Runs the node; absent inputs are missing from `inputs` or None. Never writes the inputs.

    `in_place` shares one buffer between each past and its present (a copy of the caller's past).
    `outputs` wires exactly these outputs; by default output_qk only where qk_output asks for it.
    Raises OracleError with onnxruntime's message.
    """
    if outputs is None:
        outputs = OUTPUT_NAMES if attributes.get("qk_output", 0) else OUTPUT_NAMES[:3]
    arrays = {name: np.array(inputs[name], order="C") for name in INPUT_NAMES if inputs.get(name) is not None}
    dtypes = tuple((name, array.dtype.name) for name, array in arrays.items())
    try:
        session = _session(tuple(sorted(attributes.items())), dtypes, tuple(outputs))
        if in_place:
            results = _run_in_place(session, arrays, outputs)
        else:
            results = session.run(list(outputs), arrays)
    except Exception as error:
        raise OracleError(str(error)) from error
    named = dict(zip(outputs, results, strict=True))
    return OracleResult(named["output"], *(named.get(name) for name in OUTPUT_NAMES[1:]))


def comparable_rows(attributes: Mapping[str, Any], inputs: Mapping[str, np.ndarray | None]) -> np.ndarray:
    """bool [B, S]: the output rows in which onnxruntime does what this project promises.

    A padded row of a ragged prompt sees the keys of its window that exist, maybe none.
    onnxruntime's flash path does so; its naive path shows the row the last W keys of the entry.
    Rows of query padding it may leave as it found them. (docs/differences.md#D4)
    """
    query, seqlens_k, total = (np.asarray(inputs[name]) for name in ("query", "seqlens_k", "total_sequence_length"))
    batch, new_tokens = query.shape[:2]
    counts = inputs.get("query_seqlens")
    if counts is not None:
        return np.arange(new_tokens) < counts[:, None]
    rows = np.ones((batch, new_tokens), bool)
    is_prompt = new_tokens == total and attributes.get("sliding_window_cache", 0) != 1
    has_window = attributes.get("local_window_size", -1) != -1
    if is_prompt and has_window and not _takes_flash(attributes, inputs, int(total.ravel()[0])):
        rows = np.arange(new_tokens) <= seqlens_k.reshape(batch, 1)
    return rows


def _takes_flash(attributes: Mapping[str, Any], inputs: Mapping[str, np.ndarray | None], total: int) -> bool:
    needs_naive = (
        attributes.get("causal", 1) != 1,
        attributes.get("softcap", 0) != 0,
        attributes.get("smooth_softmax", -1) == 1,
        attributes.get("qk_output", 0) != 0,
        inputs.get("head_sink") is not None,
        # A float16 cache has no flash path.
        np.asarray(inputs["query"]).dtype == np.float16 and attributes.get("k_quant_type", "NONE") == "NONE",
    )
    return total > 1 and not any(needs_naive)


@lru_cache(maxsize=256)
def _session(
    attributes: tuple[tuple[str, Any], ...],
    dtypes: tuple[tuple[str, str], ...],
    outputs: tuple[str, ...],
) -> onnxruntime.InferenceSession:
    """Sessions depend on what is wired, not on shapes: every tensor is declared without a shape."""
    types = {name: helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for name, dtype in dtypes}
    node = helper.make_node(
        "GroupQueryAttention",
        [name if name in types else "" for name in INPUT_NAMES],
        [name if name in outputs else "" for name in OUTPUT_NAMES],
        domain="com.microsoft",
        **dict(attributes),
    )
    cache_type = types.get("past_key", types.get("query", TensorProto.FLOAT))
    graph = helper.make_graph(
        [node],
        "group_query_attention",
        [helper.make_tensor_value_info(name, types[name], None) for name in types],
        [
            helper.make_tensor_value_info(name, cache_type if name.startswith("present") else types["query"], None)
            for name in outputs
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run_in_place(
    session: onnxruntime.InferenceSession,
    arrays: Mapping[str, np.ndarray],
    outputs: Sequence[str],
) -> list[np.ndarray]:
    binding = _bind_in_place(session, arrays, outputs)
    session.run_with_iobinding(binding)
    # The values alias memory of the arrays and of the binding, both of which end with the call.
    return [np.array(value.numpy()) for value in binding.get_outputs()]


def _bind_in_place(
    session: onnxruntime.InferenceSession,
    arrays: Mapping[str, np.ndarray],
    outputs: Sequence[str],
) -> onnxruntime.IOBinding:
    """Every past and its present in one buffer; the arrays must outlive the binding."""
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        if name.startswith("present"):
            binding.bind_ortvalue_output(name, values[name.replace("present", "past")])
        else:
            binding.bind_output(name, "cpu")
    return binding


def session_for_timing(
    attributes: Mapping[str, Any], inputs: Mapping[str, np.ndarray]
) -> tuple[Callable[[], None], Callable[[], np.ndarray]]:
    """(in-place call without conversions, its latest output) for benchmarks; one thread, as all sessions here."""
    arrays = {name: np.ascontiguousarray(inputs[name]) for name in INPUT_NAMES if inputs.get(name) is not None}
    dtypes = tuple((name, array.dtype.name) for name, array in arrays.items())
    outputs = OUTPUT_NAMES[:3]
    session = _session(tuple(sorted(attributes.items())), dtypes, outputs)
    binding = _bind_in_place(session, arrays, outputs)

    def call() -> None:
        session.run_with_iobinding(binding)

    # OrtValues alias the arrays: they live as long as the call does.
    call.arrays = arrays  # type: ignore[attr-defined]

    def output() -> np.ndarray:
        return np.array(binding.get_outputs()[0].numpy())

    return call, output
