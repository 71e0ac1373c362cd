"""Who is timed: this project and onnxruntime's two paths. peers.py adds others when asked for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from calls import Call, Gemm, as_kv_cache
from workloads import Workload

from gqa_tvm import GroupQueryAttention, pack_kv_cache, primitives

OURS = "gqa_tvm"
OURS_NAIVE = "gqa_tvm naive"
OURS_BNSH = "gqa_tvm bnsh"
ORT_FLASH = "onnxruntime flash"
ORT_NAIVE = "onnxruntime naive"
_ORT_INPUTS = (
    *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"),
    *("cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale"),
)
_ORT_OUTPUTS = ("output", "present_key", "present_value")
_DISABLE_FLASH = "ORT_GQA_DISABLE_FLASH_ATTENTION"


@dataclass
class Contender:
    """runs: a call for each copy of the inputs, ready to time. output: of the latest runs[0], shaped as the operator's.

    writes_cache: the new keys and values go into the past buffers. keep: what the calls point into. tolerance: of the
    largest result, for one that computes with fewer digits than the call asks for; None = as exact as everyone. rest:
    seconds until its threads sleep after a call.
    """

    name: str
    runs: list[Callable[[], Any]]
    output: Callable[[], np.ndarray]
    writes_cache: bool = True
    keep: list[Any] = field(default_factory=list)
    tolerance: float | None = None
    rest: float = 0.0


def gemm_contenders(workload: Workload, gemms: list[Gemm], threads: int) -> list[Contender]:
    """This project alone: onnxruntime's matrix kernels cannot be called from Python."""
    results: dict[str, np.ndarray] = {}
    function = getattr(primitives, workload.operation)

    def run(gemm: Gemm) -> Callable[[], None]:
        def call() -> None:
            results["output"] = function(*gemm, num_threads=threads)

        return call

    runs = [run(gemm) for gemm in gemms]
    return [Contender(OURS, runs, lambda: results["output"], writes_cache=False)]


def operator_contenders(workload: Workload, calls: list[Call], threads: int) -> list[Contender]:
    """Everyone who can run the call, this project first. All write the same rows into the same buffers."""
    options = _precision_options(workload.precision)
    contenders = [_ours(OURS, calls, threads, **options)]
    if workload.layout == "packed":
        contenders = [_ours_packed(calls, threads, **options), *(replace(c, name=OURS_BNSH) for c in contenders)]
    if workload.paths:
        contenders.append(_ours(OURS_NAIVE, calls, threads, strategy="naive"))
    if _onnxruntime_takes(workload):
        contenders.append(_onnxruntime(ORT_NAIVE, calls, threads, disable_flash=True))
        if _onnxruntime_has_flash(workload):
            contenders.append(_onnxruntime(ORT_FLASH, calls, threads, disable_flash=False))
    return contenders


def _precision_options(precision: str) -> dict[str, Any]:
    return {"approximate_qk": True} if precision == "approximate" else {"precision": precision}


def _ours(name: str, calls: list[Call], threads: int, **options: Any) -> Contender:
    results: dict[str, np.ndarray] = {}
    op = GroupQueryAttention(**calls[0].attributes, num_threads=threads, **options)

    def run(call: Call) -> Callable[[], None]:
        inputs = {**call.inputs, "present_key": call.inputs["past_key"], "present_value": call.inputs["past_value"]}

        def timed() -> None:
            results["output"] = op(**inputs).output

        return timed

    return Contender(name, [run(call) for call in calls], lambda: results["output"], keep=[op])


def _ours_packed(calls: list[Call], threads: int, **options: Any) -> Contender:
    """This project over caches of its own, packed from those of the calls."""
    packed = []
    for call in calls:
        keys, values = map(as_kv_cache, pack_kv_cache(call.inputs["past_key"], call.inputs["past_value"]))
        packed.append(call._replace(inputs={**call.inputs, "past_key": keys, "past_value": values}))
    return replace(_ours(OURS, packed, threads, kv_layout="packed", **options), writes_cache=False)


def _onnxruntime_takes(workload: Workload) -> bool:
    """A float cache must have the query's format there."""
    is_float = workload.cache in ("f32", "f16")
    installed = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))
    return installed and not (is_float and workload.cache != workload.query)


def _onnxruntime_has_flash(workload: Workload) -> bool:
    return workload.total > 1 and workload.cache != "f16" and workload.feature not in ("softcap", "sink")


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def onnxruntime_session(call: Call, threads: int, disable_flash: bool) -> Any:
    """A session of one node whose tensors have the call's types and any shape. Its threads sleep between calls."""
    import onnxruntime
    from onnx import helper

    present = [name for name in _ORT_INPUTS if name in call.inputs]
    types = {name: helper.np_dtype_to_tensor_dtype(call.inputs[name].dtype) for name in present}
    names = [name if name in types else "" for name in _ORT_INPUTS]
    node = helper.make_node("GroupQueryAttention", names, list(_ORT_OUTPUTS), domain="com.microsoft", **call.attributes)
    output_types = (types["query"], types["past_key"], types["past_value"])
    graph = helper.make_graph(
        [node],
        "group_query_attention",
        [helper.make_tensor_value_info(name, types[name], None) for name in present],
        [helper.make_tensor_value_info(*pair, None) for pair in zip(_ORT_OUTPUTS, output_types, strict=True)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # A pool that spins on after a call takes a core from whoever is timed next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    # Read when a session is made.
    with _environment(_DISABLE_FLASH, "1" if disable_flash else "0"):
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def onnxruntime_binding(session: Any, call: Call) -> tuple[Any, list[Any]]:
    """(binding with past and present in one buffer, the values that must outlive it)."""
    import onnxruntime

    present = [name for name in _ORT_INPUTS if name in call.inputs]
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(call.inputs[name]) for name in present}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("output", "cpu")
    binding.bind_ortvalue_output("present_key", values["past_key"])
    binding.bind_ortvalue_output("present_value", values["past_value"])
    return binding, list(values.values())


def _onnxruntime(name: str, calls: list[Call], threads: int, disable_flash: bool) -> Contender:
    session = onnxruntime_session(calls[0], threads, disable_flash)
    bound = [onnxruntime_binding(session, call) for call in calls]

    def run(binding: Any) -> Callable[[], None]:
        return lambda: session.run_with_iobinding(binding)

    first = bound[0][0]
    runs = [run(binding) for binding, _ in bound]
    return Contender(name, runs, lambda: np.array(first.get_outputs()[0].numpy()), keep=[bound, calls])
