"""OpenVINO's PagedAttention operator as a contender: a model of that one node.

It appends the new keys and values to a cache in blocks of 32 tokens and attends to all of it. Query, key, value and
output are float32. ScaledDotProductAttention behind a broadcast of keys and values to all heads takes ten times as long
for a decode, twice as long for a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from calls import Call
from contenders import Contender
from workloads import Workload

_BLOCK = 32
_ROWS = ("query", "key", "value")


class _Mode(NamedTuple):
    """Number formats of OpenVINO's cache and products, and what they may be off by, of the largest result."""

    cache: str
    compute: str = "f32"
    tolerance: float | None = None

    @property
    def name(self) -> str:
        if self.tolerance is None:
            return "openvino"
        formats = [self.cache] if self.cache == self.compute else [self.cache, self.compute]
        return " ".join(["openvino inexact", *(part for part in formats if part != "f32")])


# A quantised cache has scales of OpenVINO's own, by channel and block (keys) or by token (values): codes of codes.
_BF16 = _Mode("bf16", "bf16", 2e-2)
_U8 = (_Mode("u8", "f32", 2e-2), _Mode("u8", "bf16", 2e-2))
_U4 = (_Mode("u4", "f32", 0.15),)
_MODES = {
    "f32": (_Mode("f32"), _BF16),
    "f16": (_Mode("f16"), _BF16),
    **dict.fromkeys(("i8", "i8c"), _U8),
    **dict.fromkeys(("i4", "i4c"), _U4),
}


def openvino_contenders(workload: Workload, calls: list[Call], threads: int) -> list[Contender]:
    """One for every way OpenVINO can hold the cache; none for features other than a window."""
    if workload.feature not in ("", "window"):
        return []
    import openvino

    core = openvino.Core()
    has_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    modes = [mode for mode in _MODES[workload.cache] if has_bf16 or mode.compute != "bf16"]
    return [_contender(core, workload, calls, threads, mode) for mode in modes]


def _contender(core: Any, workload: Workload, calls: list[Call], threads: int, mode: _Mode) -> Contender:
    options = {
        "INFERENCE_PRECISION_HINT": mode.compute,
        "KV_CACHE_PRECISION": mode.cache,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        # A pinned thread would stay pinned for whoever is timed next.
        "ENABLE_CPU_PINNING": False,
    }
    compiled = core.compile_model(_model(workload, calls[0]), "CPU", options)
    requests = [_request(compiled, workload, call) for call in calls]

    def run(request: Any) -> Callable[[], None]:
        return lambda: request.infer()

    def output() -> np.ndarray:
        return np.array(requests[0].get_output_tensor(0).data).reshape(calls[0].inputs["query"].shape)

    runs = [run(request) for request in requests]
    # Its other threads look for work for about 1 ms after a call, and nothing tells them not to.
    rest = 5e-3 if threads > 1 else 0.0
    return Contender(mode.name, runs, output, writes_cache=False, keep=[calls], tolerance=mode.tolerance, rest=rest)


def _model(workload: Workload, call: Call) -> Any:
    """Inputs by name: query, key, value float32 [tokens of all sequences, columns]; caches; int32 metadata.

    The other inputs of the operator are constants that switch its options off.
    """
    import openvino
    from openvino import Type, op

    def parameter(name: str, element_type: Any, *shape: int) -> Any:
        node = op.Parameter(element_type, openvino.PartialShape(list(shape)))
        node.output(0).get_tensor().set_names({name})
        return node

    def number(value: float, dtype: type = np.int32) -> Any:
        return op.Constant(np.array(value, dtype))

    def nothing(dtype: type = np.int32) -> Any:
        return op.Constant(np.empty(0, dtype))

    columns = [heads * workload.head_size for heads in (workload.heads, workload.kv_heads, workload.kv_heads)]
    parameters = [
        *(parameter(name, Type.f32, -1, size) for name, size in zip(_ROWS, columns, strict=True)),
        # The plugin puts its own format and shape here.
        parameter("key_cache", Type.dynamic, -1, -1, -1, -1),
        parameter("value_cache", Type.dynamic, -1, -1, -1, -1),
        *(parameter(name, Type.i32, -1) for name in _Sequences._fields),
    ]
    constants = [
        number(workload.head_size**-0.5, np.float32),  # scale
        number(max(0, call.attributes.get("local_window_size", 0))),  # sliding_window
        nothing(np.float32),  # alibi_slopes
        number(workload.total),  # max_context_len
        nothing(),  # score_aggregation_window
        *(nothing(), nothing(), nothing(np.float32)),  # rotated_block_indices, rotation_deltas, rotation_trig_lut
        *(nothing(np.float32), number(0), number(0)),  # xattention: threshold, block_size, stride
        nothing(np.float32),  # sinks
        *(number(0), nothing(), nothing(), nothing()),  # adaptive_rkv: start, evictable, diversity, its begins
        nothing(),  # token_type_ids
        *(nothing(np.uint8), nothing()),  # qq_bias, qq_bias_begins
    ]
    node = op._PagedAttentionExtension([node.output(0) for node in (*parameters, *constants)])
    for side in "kv":
        node.get_rt_info()[f"num_{side}_heads"] = workload.kv_heads
        node.get_rt_info()[f"{side}_head_size"] = workload.head_size
    return openvino.Model([node.output(0)], parameters, "paged_attention")


class _Sequences(NamedTuple):
    """The operator's int32 inputs, for sequences that stand one behind the other in query, key and value."""

    past_lens: np.ndarray
    subsequence_begins: np.ndarray
    block_indices: np.ndarray
    block_indices_begins: np.ndarray

    @staticmethod
    def of(pasts: Sequence[int], lengths: Sequence[int], blocks: Sequence[range]) -> _Sequences:
        """Of each sequence: keys before, new tokens, blocks of the cache."""
        begins = np.cumsum([0, *lengths]), np.cumsum([0, *map(len, blocks)])
        arrays = np.array(pasts), begins[0], np.concatenate([np.array(part) for part in blocks]), begins[1]
        return _Sequences(*(array.astype(np.int32) for array in arrays))


def _request(compiled: Any, workload: Workload, call: Call) -> Any:
    """A request with caches of its own, filled with the rows before the new tokens, and the call's inputs set."""
    pasts = [total - workload.tokens for total in workload.totals]
    counts = [-(-total // _BLOCK) for total in workload.totals]
    ends = np.cumsum(counts).tolist()
    blocks = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    request = compiled.create_infer_request()
    _set_empty_caches(compiled, request, ends[-1])
    if any(pasts):
        _fill_caches(request, workload, call, pasts, blocks)
    rows = [call.inputs[name].reshape(workload.batch * workload.tokens, -1) for name in _ROWS]
    _set_inputs(request, rows, _Sequences.of(pasts, [workload.tokens] * workload.batch, blocks))
    return request


def _set_empty_caches(compiled: Any, request: Any, blocks: int) -> None:
    import openvino

    for name in ("key_cache", "value_cache"):
        port = compiled.input(name)
        sizes = [dimension.get_length() for dimension in list(port.get_partial_shape())[1:]]
        request.set_tensor(name, openvino.Tensor(port.get_element_type(), openvino.Shape([blocks, *sizes])))


def _fill_caches(request: Any, workload: Workload, call: Call, pasts: Sequence[int], blocks: Sequence[range]) -> None:
    """Has the operator write the past rows of every entry into its blocks, in its format.

    Each block is a sequence of its own, which sees no other: the work does not grow with the square of T.
    """
    starts = [(b, start) for b, past in enumerate(pasts) for start in range(0, past, _BLOCK)]
    lengths = [min(_BLOCK, pasts[b] - start) for b, start in starts]
    places = [range(blocks[b][start // _BLOCK], blocks[b][start // _BLOCK] + 1) for b, start in starts]
    sides = [np.moveaxis(call.inputs[f"past_{name}"], 1, 2) for name in _ROWS[1:]]
    rows = [np.concatenate([side[b, :past] for b, past in enumerate(pasts)]).reshape(sum(pasts), -1) for side in sides]
    query = np.zeros((sum(pasts), workload.heads * workload.head_size), np.float32)
    _set_inputs(request, [query, *rows], _Sequences.of([0] * len(starts), lengths, places))
    request.infer()


def _set_inputs(request: Any, rows: Sequence[np.ndarray], sequences: _Sequences) -> None:
    """rows: query, key and value, floats [tokens of all sequences, columns]."""
    import openvino

    for name, array in zip(_ROWS, rows, strict=True):
        request.set_tensor(name, openvino.Tensor(np.ascontiguousarray(array, np.float32)))
    for name, array in sequences._asdict().items():
        request.set_tensor(name, openvino.Tensor(array))
