"""Calling the kernels: the operator's arrays as kernel arguments, in place wherever they can be read so."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .arrays import aligned_empty, as_bits, readable, required
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
from .kernels import FloatFormat, KernelSpec
from .schedules.block_sizes import BlockSizes, decode_columns
from .validation import Inputs, Problem

Kernel = Callable[..., Any]

_NO_POSITIONS = np.zeros((1, 1), np.int64)
_ONE = np.ones(1, np.float32)
_NO_OUTPUT_QK = np.zeros((1, 1, 1, 1), np.float32)
_STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


class StandIns(NamedTuple):
    """For absent inputs: kernels do not read them."""

    table: np.ndarray
    bias: np.ndarray
    sink: np.ndarray


def _stored(array: np.ndarray | None) -> np.ndarray:
    """An input that validation has found present, as kernels take it."""
    return as_bits(required(array))


def _flat_scale(scale: np.ndarray | None) -> np.ndarray:
    assert scale is not None
    return required(scale.reshape(-1))


class CallScalars(NamedTuple):
    """Scalar arguments of append and of attention, and which output_qk is wanted."""

    append: tuple[float | int, ...]
    attention: tuple[float | int, ...]
    qk_output: int

    @staticmethod
    def of(attributes: Attributes, inputs: Inputs, problem: Problem) -> CallScalars:
        interleaved = ROTARY_INTERLEAVED if attributes.is_rotary_interleaved else ROTARY_HALF_SPLIT
        rotary = interleaved if problem.rotary_dim else ROTARY_OFF
        sink = SINK_SMOOTH if attributes.use_smooth_softmax else SINK_NONE
        first_key_head = problem.num_heads if problem.packed_qkv else 0
        first_value_head = first_key_head + problem.kv_num_heads if problem.packed_qkv else 0
        # An epsilon is positive: 0 says that there is no norm.
        key_epsilon = 0.0 if inputs.k_norm_weight is None else attributes.key_norm_epsilon
        attention = (
            attributes.scale or 1.0 / math.sqrt(problem.head_size),
            attributes.softcap,
            attributes.window,
            attributes.causal,
            0.0 if inputs.q_norm_weight is None else attributes.query_norm_epsilon,
            rotary,
            int(inputs.attention_bias is not None),
            SINK_HEAD if inputs.head_sink is not None else sink,
        )
        append = (key_epsilon, rotary, first_key_head, first_value_head)
        return CallScalars(append, attention, attributes.qk_output)


class ArgumentForms(NamedTuple):
    """The part of the arguments that attributes, dtypes and the presence of inputs decide.

    direct: every array of the call is aligned, writable, contiguous along its last axis, and no bfloat16.
    """

    scalars: CallScalars
    stand_ins: StandIns
    no_weight: np.ndarray
    direct: bool
    quantized: bool
    window: int

    @staticmethod
    def of(attributes: Attributes, inputs: Inputs, problem: Problem, query_format: FloatFormat) -> ArgumentForms:
        dtype = _STORED[query_format]
        stand_ins = StandIns(np.zeros((1, 1), dtype), np.zeros((1, 1, 1, 1), dtype), np.zeros(1, dtype))
        scalars = CallScalars.of(attributes, inputs, problem)
        return ArgumentForms(
            scalars,
            stand_ins,
            np.zeros(problem.head_size, dtype),
            _can_be_taken_as_is(inputs),
            attributes.is_quantized,
            attributes.window,
        )


def _can_be_taken_as_is(inputs: Inputs) -> bool:
    numbers = (a for name, a in zip(inputs._fields, inputs, strict=True) if name not in _INTEGERS and a is not None)
    return all(a.dtype.kind != "V" and a.ndim > 0 and readable(a) is a for a in numbers)


_INTEGERS = ("seqlens_k", "total_sequence_length", "position_ids", "query_seqlens")


# Tensor arguments in the kernels' order, by the inputs that they come from.
APPEND_TENSORS = (
    *("key", "value", "past_key", "past_value", "entries", "positions", "cos_cache", "sin_cache"),
    *("k_norm_weight", "k_scale", "v_scale"),
)
ATTENTION_TENSORS = (
    *("query", "past_key", "past_value", "entries", "positions", "cos_cache", "sin_cache"),
    *("attention_bias", "head_sink", "q_norm_weight", "k_scale", "v_scale", "output"),
)


class AttentionCall:
    """The arguments that append and every attention kernel share, made once per call.

    entries: [B, 4] int32, columns ENTRY_*. caches: key and value cache. output: [B, S, N, H] of the query dtype.
    tensors: the kernels' by the names of APPEND_TENSORS and ATTENTION_TENSORS.
    """

    def __init__(
        self,
        inputs: Inputs,
        forms: ArgumentForms,
        problem: Problem,
        entries: np.ndarray,
        caches: tuple[np.ndarray, np.ndarray],
        output: np.ndarray,
    ) -> None:
        direct, absent, none = forms.direct, forms.stand_ins, forms.no_weight
        take: Callable[[Any], np.ndarray] = _as_it_is if direct else _stored
        i = inputs
        query = take(i.query)
        key_value = (query, query)
        if not problem.packed_qkv and problem.kv_sequence_length:
            key_value = (take(i.key), take(i.value))
        rotary: tuple[np.ndarray, ...] = (_NO_POSITIONS, absent.table, absent.table)
        if problem.positions is not None:
            rotary = (problem.positions, take(i.cos_cache), take(i.sin_cache))
        if not direct:
            caches, output = (as_bits(caches[0]), as_bits(caches[1])), as_bits(output)
        # Scales of a float cache are accepted and mean nothing.
        scales = (_flat_scale(i.k_scale), _flat_scale(i.v_scale)) if forms.quantized else (_ONE, _ONE)
        self.forms, self.problem, self.entries = forms, problem, entries
        self.tensors = {
            "query": query,
            "key": key_value[0],
            "value": key_value[1],
            "past_key": caches[0],
            "past_value": caches[1],
            "entries": entries,
            "positions": rotary[0],
            "cos_cache": rotary[1],
            "sin_cache": rotary[2],
            "attention_bias": absent.bias if i.attention_bias is None else take(i.attention_bias),
            "head_sink": absent.sink if i.head_sink is None else take(i.head_sink),
            "q_norm_weight": none if i.q_norm_weight is None else take(i.q_norm_weight),
            "k_norm_weight": none if i.k_norm_weight is None else take(i.k_norm_weight),
            "k_scale": scales[0],
            "v_scale": scales[1],
            "output": output,
        }

    def is_stand_in(self, tensor: np.ndarray) -> bool:
        """Whether a tensor takes the place of one that kernels do not read."""
        stand_ins = (*self.forms.stand_ins, self.forms.no_weight, _NO_POSITIONS, _ONE)
        return any(tensor is stand_in for stand_in in stand_ins)

    def append(self, kernel: Kernel) -> None:
        """Norm, rotate, quantise and write the new keys and values into the caches."""
        kernel(*self._in_order(APPEND_TENSORS), *self.forms.scalars.append)

    def flash(self, kernel: Kernel) -> None:
        """Flash attention with rows as lanes."""
        kernel(*self._in_order(ATTENTION_TENSORS), *self.forms.scalars.attention)

    def naive(self, kernel: Kernel, output_qk: np.ndarray | None) -> None:
        """Two-pass attention; fills output_qk [B, N, S, T] float32 when it is wanted."""
        wanted, mode = (_NO_OUTPUT_QK, 0) if output_qk is None else (output_qk, self.forms.scalars.qk_output)
        kernel(*self._in_order(ATTENTION_TENSORS), wanted, *self.forms.scalars.attention, mode)

    def flash_decode(self, kernel: Kernel, spec: KernelSpec, sizes: BlockSizes, chunked: bool) -> None:
        """Flash attention with few rows; `chunked` splits the keys at multiples of sizes.kv_chunk."""
        block = sizes.decode_kv_block
        longest = max(self.entries[:, ENTRY_TOTAL].tolist())
        if self.forms.window > 0:
            # What the rows of a task see of a window, from the block it starts in.
            longest = min(longest, self.forms.window + self.problem.sequence_length - 1 + block)
        kv_chunk = sizes.kv_chunk if chunked else -(-longest // block) * block
        tasks = decode_tasks(self.problem, spec, sizes)
        partial = _no_partial(tasks.width)
        if longest > kv_chunk:
            heads = self.problem.batch_size, self.problem.kv_num_heads
            partial = aligned_empty(
                (*heads, tasks.groups, -(-longest // kv_chunk), tasks.rows, tasks.width), np.float32
            )
        kernel(*self._in_order(ATTENTION_TENSORS), partial, *self.forms.scalars.attention, kv_chunk)

    def _in_order(self, names: tuple[str, ...]) -> list[np.ndarray]:
        return [self.tensors[name] for name in names]


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


class DecodeTasks(NamedTuple):
    """Flash decoding's softmax states: [B, N_kv, groups, chunks, rows, width] float32."""

    groups: int
    rows: int
    width: int


def decode_tasks(problem: Problem, spec: KernelSpec, sizes: BlockSizes) -> DecodeTasks:
    """How the rows of a KV head are shared out among tasks of flash decoding."""
    all_rows = problem.sequence_length * problem.group_size
    rows = min(-(-sizes.decode_rows // spec.row_tile) * spec.row_tile, all_rows)
    width = spec.cache_planes * decode_columns(spec, sizes) + 2
    return DecodeTasks(-(-all_rows // rows), rows, width)


@lru_cache(maxsize=64)
def _no_partial(width: int) -> np.ndarray:
    return np.zeros((1, 1, 1, 1, 1, width), np.float32)
