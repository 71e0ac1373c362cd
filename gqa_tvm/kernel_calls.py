"""Calling the kernels: the operator's arrays as kernel arguments, in place wherever they can be read so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import aligned_empty, readable, required, strided_view
from .attributes import Attributes
from .kernel_arguments import (
    ROTARY_HALF_SPLIT,
    ROTARY_INTERLEAVED,
    ROTARY_OFF,
    SINK_HEAD,
    SINK_NONE,
    SINK_SMOOTH,
)
from .kernels import KernelSpec
from .schedules.block_sizes import BlockSizes
from .validation import Inputs, Problem

Kernel = Callable[..., Any]

# Stand-ins for absent inputs: kernels do not read them.
_NO_TABLE = np.zeros((1, 1), np.float32)
_NO_POSITIONS = np.zeros((1, 1), np.int64)
_NO_BIAS = np.zeros((1, 1, 1, 1), np.float32)
_NO_SINK = np.zeros(1, np.float32)
_ONE = np.ones(1, np.float32)


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


def _broadcast_bias(bias: np.ndarray | None, batch: int, heads: int) -> np.ndarray:
    """attention_bias as [B, N, S, T]; axes of extent 1 are repeated by stride 0, not copied."""
    if bias is None:
        return _NO_BIAS
    bias = readable(bias)
    strides = [0 if extent == 1 else stride for extent, stride in zip(bias.shape[:2], bias.strides[:2], strict=True)]
    return strided_view(bias, (batch, heads, *bias.shape[2:]), (*strides, *bias.strides[2:]))


class AttentionCall:
    """Kernel arguments that append and every attention kernel share, made once per call."""

    def __init__(
        self,
        attributes: Attributes,
        inputs: Inputs,
        problem: Problem,
        key_cache: np.ndarray,
        value_cache: np.ndarray,
    ) -> None:
        p = problem
        self.problem, self.key_cache, self.value_cache = p, key_cache, value_cache
        self.qk_output = attributes.qk_output
        query = readable(inputs.query)
        self.query = _heads(query, 0, p.num_heads, p.head_size)
        if p.packed_qkv:
            self.key = _heads(query, p.num_heads, p.kv_num_heads, p.head_size)
            self.value = _heads(query, p.num_heads + p.kv_num_heads, p.kv_num_heads, p.head_size)
        elif p.kv_sequence_length:
            self.key = _heads(required(inputs.key), 0, p.kv_num_heads, p.head_size)
            self.value = _heads(required(inputs.value), 0, p.kv_num_heads, p.head_size)
        rotates = p.rotary_dim > 0 and p.positions is not None
        self.rotary_tables = (
            (p.positions, required(inputs.cos_cache), required(inputs.sin_cache))
            if rotates
            else (_NO_POSITIONS, _NO_TABLE, _NO_TABLE)
        )
        interleaved = ROTARY_INTERLEAVED if attributes.is_rotary_interleaved else ROTARY_HALF_SPLIT
        self.rotary = interleaved if rotates else ROTARY_OFF
        quantized = attributes.is_quantized
        self.k_scale = _scale_view(inputs.k_scale if quantized else None, p.kv_num_heads, p.head_size)
        self.v_scale = _scale_view(inputs.v_scale if quantized else None, p.kv_num_heads, p.head_size)
        self._attention = self._attention_inputs(inputs)
        self._scalars = self._scalar_arguments(attributes, inputs)

    def _attention_inputs(self, inputs: Inputs) -> tuple[np.ndarray, ...]:
        p = self.problem
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            p.past_lengths,
            p.total_lengths,
            *self.rotary_tables,
            _broadcast_bias(inputs.attention_bias, p.batch_size, p.num_heads),
            _NO_SINK if inputs.head_sink is None else readable(inputs.head_sink),
            self.k_scale,
            self.v_scale,
        )

    def _scalar_arguments(self, attributes: Attributes, inputs: Inputs) -> tuple[float | int, ...]:
        sink = SINK_SMOOTH if attributes.use_smooth_softmax else SINK_NONE
        return (
            attributes.scale or 1.0 / math.sqrt(self.problem.head_size),
            attributes.softcap,
            attributes.window,
            attributes.causal,
            self.rotary,
            int(inputs.attention_bias is not None),
            SINK_HEAD if inputs.head_sink is not None else sink,
        )

    def run(self, kernel: Kernel, output: np.ndarray, *extra: Any, scratch: tuple[Any, ...] = ()) -> None:
        """Call an attention kernel: shared inputs, output, scratch tensors, shared scalars, its own scalars."""
        kernel(*self._attention, output, *scratch, *self._scalars, *extra)


def run_append(kernel: Kernel, call: AttentionCall) -> None:
    """Rotate, quantise and write the new keys and values into the caches."""
    kernel(
        call.key,
        call.value,
        call.key_cache,
        call.value_cache,
        call.problem.past_lengths,
        *call.rotary_tables,
        call.k_scale,
        call.v_scale,
        call.rotary,
    )


def run_flash(kernel: Kernel, call: AttentionCall, output: np.ndarray) -> None:
    """Flash attention with rows as lanes."""
    call.run(kernel, output)


def run_naive(kernel: Kernel, call: AttentionCall, output: np.ndarray, output_qk: np.ndarray | None) -> None:
    """Two-pass attention; fills output_qk when it is wanted."""
    mode = 0 if output_qk is None else call.qk_output
    call.run(kernel, output, mode, scratch=(_NO_BIAS if output_qk is None else output_qk,))


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
    longest = int(p.total_lengths.max())
    block = sizes.decode_kv_block
    kv_chunk = sizes.kv_chunk if chunked else -(-longest // block) * block
    chunks = -(-longest // kv_chunk)
    rows = -(-sizes.decode_rows // spec.row_tile) * spec.row_tile
    groups = -(-p.sequence_length * p.group_size // rows)
    width = spec.cache_planes * sizes.padded_columns(spec.cache_columns) + 2
    shape = (p.batch_size, p.kv_num_heads, groups, chunks, rows, width)
    partial = aligned_empty(shape if chunks > 1 else (1, 1, 1, 1, 1, width), np.float32)
    call.run(kernel, output, kv_chunk, scratch=(partial,))
