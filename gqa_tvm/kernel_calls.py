"""Calling the kernels: the operator's arrays as kernel arguments, in place wherever they can be read so."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .arrays import aligned_empty, as_bits, readable, required, strided_view
from .attributes import Attributes
from .kernel_arguments import (
    ENTRY_TOTAL,
    ROTARY_HALF_SPLIT,
    ROTARY_INTERLEAVED,
    ROTARY_OFF,
    SINK_HEAD,
    SINK_NONE,
    SINK_SMOOTH,
)
from .kernels import FLOAT_FORMATS, FORMATS, KernelSpec
from .schedules.block_sizes import BlockSizes
from .validation import Inputs, Problem

Kernel = Callable[..., Any]

_NO_POSITIONS = np.zeros((1, 1), np.int64)
_ONE = np.ones(1, np.float32)
_NO_OUTPUT_QK = np.zeros((1, 1, 1, 1), np.float32)
_STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


class _StandIns(NamedTuple):
    """For absent inputs of one dtype: kernels do not read them."""

    table: np.ndarray
    bias: np.ndarray
    sink: np.ndarray

    @staticmethod
    def of(query_format: str) -> _StandIns:
        dtype = _STORED[query_format]
        return _StandIns(np.zeros((1, 1), dtype), np.zeros((1, 1, 1, 1), dtype), np.zeros(1, dtype))


_STAND_INS = {query_format: _StandIns.of(query_format) for query_format in FLOAT_FORMATS}


def _stored(array: np.ndarray | None) -> np.ndarray:
    """An input of the query dtype that validation has found present, as kernels take it."""
    return as_bits(required(array))


@lru_cache(maxsize=64)
def _no_weight(head_size: int, query_format: str) -> np.ndarray:
    return np.zeros(head_size, _STORED[query_format])


def _heads(array: np.ndarray, first: int, heads: int, head_size: int) -> np.ndarray:
    """[B, S, hidden] -> view [B, S, heads, H] that starts at head `first` of the hidden axis."""
    part = array[:, :, first * head_size : (first + heads) * head_size]
    shape = (*array.shape[:2], heads, head_size)
    step = array.itemsize
    return strided_view(part, shape, (*array.strides[:2], head_size * step, step))


def _scale_view(scale: np.ndarray | None, kv_heads: int, head_size: int) -> np.ndarray:
    """A scale of 1 or N_kv * H elements as [N_kv, H], with strides 0 when there is one."""
    flat = _ONE if scale is None else readable(scale.reshape(-1))
    step = flat.itemsize
    strides = (0, 0) if flat.size == 1 else (head_size * step, step)
    return strided_view(flat, (kv_heads, head_size), strides)


def _broadcast_bias(bias: np.ndarray, batch: int, heads: int) -> np.ndarray:
    """attention_bias as [B, N, S, T]; axes of extent 1 are repeated by stride 0, not copied."""
    strides = [0 if extent == 1 else stride for extent, stride in zip(bias.shape[:2], bias.strides[:2], strict=True)]
    return strided_view(bias, (batch, heads, *bias.shape[2:]), (*strides, *bias.strides[2:]))


class AttentionCall:
    """Kernel arguments that append and every attention kernel share, made once per call."""

    def __init__(
        self,
        attributes: Attributes,
        inputs: Inputs,
        problem: Problem,
        entries: np.ndarray,
        key_cache: np.ndarray,
        value_cache: np.ndarray,
    ) -> None:
        p = problem
        self.problem, self.entries = p, entries
        self.key_cache, self.value_cache = as_bits(key_cache), as_bits(value_cache)
        self.qk_output = attributes.qk_output
        self._query_format = FORMATS[p.query_dtype.name]
        self._stand_ins = _STAND_INS[self._query_format]
        query = _stored(inputs.query)
        self.query = _heads(query, 0, p.num_heads, p.head_size)
        if p.packed_qkv:
            self.key = _heads(query, p.num_heads, p.kv_num_heads, p.head_size)
            self.value = _heads(query, p.num_heads + p.kv_num_heads, p.kv_num_heads, p.head_size)
        elif p.kv_sequence_length:
            self.key = _heads(_stored(inputs.key), 0, p.kv_num_heads, p.head_size)
            self.value = _heads(_stored(inputs.value), 0, p.kv_num_heads, p.head_size)
        rotates = p.rotary_dim > 0 and p.positions is not None
        no_table = self._stand_ins.table
        self.rotary_tables = (
            (p.positions, _stored(inputs.cos_cache), _stored(inputs.sin_cache))
            if rotates
            else (_NO_POSITIONS, no_table, no_table)
        )
        interleaved = ROTARY_INTERLEAVED if attributes.is_rotary_interleaved else ROTARY_HALF_SPLIT
        self.rotary = interleaved if rotates else ROTARY_OFF
        self.key_norm = self._norm(inputs.k_norm_weight, attributes.key_norm_epsilon)
        quantized = attributes.is_quantized
        self.k_scale = _scale_view(inputs.k_scale if quantized else None, p.kv_num_heads, p.head_size)
        self.v_scale = _scale_view(inputs.v_scale if quantized else None, p.kv_num_heads, p.head_size)
        query_norm = self._norm(inputs.q_norm_weight, attributes.query_norm_epsilon)
        self._attention = self._attention_inputs(inputs, query_norm[0])
        self._scalars = self._scalar_arguments(attributes, inputs, query_norm[1])

    def _norm(self, weight: np.ndarray | None, epsilon: float) -> tuple[np.ndarray, float]:
        """Weight and epsilon of an RMS norm as kernels take them; epsilon 0 = none."""
        if weight is None:
            return _no_weight(self.problem.head_size, self._query_format), 0.0
        return _stored(weight), epsilon

    def _attention_inputs(self, inputs: Inputs, norm_weight: np.ndarray) -> tuple[np.ndarray, ...]:
        p, absent = self.problem, self._stand_ins
        bias = absent.bias
        if inputs.attention_bias is not None:
            bias = _broadcast_bias(_stored(inputs.attention_bias), p.batch_size, p.num_heads)
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.entries,
            *self.rotary_tables,
            bias,
            absent.sink if inputs.head_sink is None else _stored(inputs.head_sink),
            norm_weight,
            self.k_scale,
            self.v_scale,
        )

    def _scalar_arguments(self, attributes: Attributes, inputs: Inputs, norm_epsilon: float) -> tuple[float | int, ...]:
        sink = SINK_SMOOTH if attributes.use_smooth_softmax else SINK_NONE
        return (
            attributes.scale or 1.0 / math.sqrt(self.problem.head_size),
            attributes.softcap,
            attributes.window,
            attributes.causal,
            norm_epsilon,
            self.rotary,
            int(inputs.attention_bias is not None),
            SINK_HEAD if inputs.head_sink is not None else sink,
        )

    def run(self, kernel: Kernel, output: np.ndarray, *extra: Any, scratch: tuple[Any, ...] = ()) -> None:
        """Call an attention kernel: shared inputs, output, scratch tensors, shared scalars, its own scalars."""
        kernel(*self._attention, output, *scratch, *self._scalars, *extra)


def run_append(kernel: Kernel, call: AttentionCall) -> None:
    """Norm, rotate, quantise and write the new keys and values into the caches."""
    kernel(
        call.key,
        call.value,
        call.key_cache,
        call.value_cache,
        call.entries,
        *call.rotary_tables,
        call.key_norm[0],
        call.k_scale,
        call.v_scale,
        call.key_norm[1],
        call.rotary,
    )


def run_flash(kernel: Kernel, call: AttentionCall, output: np.ndarray) -> None:
    """Flash attention with rows as lanes."""
    call.run(kernel, output)


def run_naive(kernel: Kernel, call: AttentionCall, output: np.ndarray, output_qk: np.ndarray | None) -> None:
    """Two-pass attention; fills output_qk when it is wanted."""
    mode = 0 if output_qk is None else call.qk_output
    call.run(kernel, output, mode, scratch=(_NO_OUTPUT_QK if output_qk is None else output_qk,))


def run_flash_decode(
    kernel: Kernel,
    call: AttentionCall,
    output: np.ndarray,
    spec: KernelSpec,
    sizes: BlockSizes,
    chunked: bool,
) -> None:
    """Flash attention with few rows; `chunked` splits the keys at multiples of sizes.kv_chunk."""
    p = call.problem
    longest = int(call.entries[:, ENTRY_TOTAL].max())
    block = sizes.decode_kv_block
    kv_chunk = sizes.kv_chunk if chunked else -(-longest // block) * block
    chunks = -(-longest // kv_chunk)
    rows = -(-sizes.decode_rows // spec.row_tile) * spec.row_tile
    groups = -(-p.sequence_length * p.group_size // rows)
    width = spec.cache_planes * sizes.padded_columns(spec.cache_columns) + 2
    shape = (p.batch_size, p.kv_num_heads, groups, chunks, rows, width)
    partial = aligned_empty(shape if chunks > 1 else (1, 1, 1, 1, 1, width), np.float32)
    call.run(kernel, output, kv_chunk, scratch=(partial,))
