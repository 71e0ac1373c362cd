"""Rules that need shapes alone: they hold for every call with the same shapes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gqa_tvm.attributes import Attributes
from gqa_tvm.errors import InvalidArgument
from gqa_tvm.validation_types import Inputs

_PAST_RULES = {  # by the dimension they are about, None for the rank
    None: "is expected to have 4 dimensions, got {came}",
    0: "dimension 0 should be batch_size, got {came} with batch size {wanted}.",
    1: "shall have kv_num_heads. Got dimension 1 of {came} with kv_num_heads {wanted}.",
    3: "dimension 3 should match the packed KV head dimension, got {came} expected {wanted}",
}


INT32_MAX = 2**31 - 1
BYTES_LIMIT = 2**47  # the address space of a process on x86-64


class Shapes(NamedTuple):
    """The dimensions a call fixes by its shapes alone."""

    batch_size: int
    sequence_length: int
    kv_sequence_length: int
    head_size: int
    packed_head_size: int
    past_capacity: int


def read_shapes(attributes: Attributes, inputs: Inputs) -> Shapes:
    """Check the shapes of query, key, value, past, seqlens_k and total."""
    batch, length, head_size = _read_query(attributes, inputs)
    packed_head_size = (head_size + 1) // 2 if attributes.cache_bits == 4 else head_size
    kv_length = length
    if inputs.key is not None and inputs.value is not None:
        kv_length = _read_key_value(attributes, inputs.key, inputs.value, batch, head_size)
    capacity = 0 if inputs.past_key is None or inputs.past_key.ndim != 4 else inputs.past_key.shape[2]
    shapes = Shapes(batch, length, kv_length, head_size, packed_head_size, capacity)
    if inputs.past_key is not None and inputs.past_value is not None:
        _check_past(attributes, inputs.past_key.shape, inputs.past_value.shape, shapes)
    elif inputs.past_key is not None or inputs.past_value is not None:
        raise InvalidArgument("Input 'past_key' and 'past_value' shall be both present or both absent.")
    elif kv_length != length:
        raise InvalidArgument(
            "query and key must have the same sequence length when past_key is not provided. "
            f"Got sequence_length={length}, kv_sequence_length={kv_length}"
        )
    _check_seqlens_shape(inputs.seqlens_k, batch)
    if inputs.total_sequence_length.shape not in ((), (1,)):
        raise InvalidArgument(
            "total_sequence_length tensor must be of one element. "
            f"Got shape {braces(inputs.total_sequence_length.shape)}."
        )
    return shapes


def check_rotary_pair(inputs: Inputs) -> tuple[int, int] | None:
    """Return the [M, R / 2] of the rotary tables, None when both are absent."""
    cos_cache, sin_cache = inputs.cos_cache, inputs.sin_cache
    if cos_cache is None and sin_cache is None:
        return None
    if cos_cache is None or sin_cache is None:
        raise InvalidArgument("Input 'cos_cache' and 'sin_cache' shall be both present or both absent.")
    shape = cos_cache.shape
    if shape != sin_cache.shape:
        raise InvalidArgument(
            "cos_cache and sin_cache must have the same shape. Got cos_cache shape "
            f"{braces(shape)} and sin_cache shape {braces(sin_cache.shape)}."
        )
    if len(shape) != 2:
        raise InvalidArgument(f"cos_cache and sin_cache must be 2D tensors, got {len(shape)} dimensions.")
    _check_extents("cos_cache", shape)
    return shape[0], shape[1]


def check_rotary_columns(columns: int, head_size: int) -> None:
    """A rotation may cover the whole head and no more."""
    if columns > head_size // 2:
        raise InvalidArgument(
            f"cos_cache dimension 1 must be <= head_size / 2. Got {columns} with head_size {head_size}."
        )


def check_position_ids_shape(position_ids: np.ndarray | None, shapes: Shapes) -> None:
    """position_ids is [B, at least S]."""
    if position_ids is None:
        return
    if position_ids.ndim != 2:
        raise InvalidArgument(f"position_ids must be a 2D tensor, got {position_ids.ndim} dimensions.")
    rows, columns = position_ids.shape
    if rows != shapes.batch_size:
        raise InvalidArgument(
            f"position_ids dimension 0 must be equal to the batch size, got {rows} with batch size {shapes.batch_size}."
        )
    if columns < shapes.sequence_length:
        raise InvalidArgument(
            f"position_ids dimension 1 must be at least sequence length, got {columns} with "
            f"sequence length {shapes.sequence_length}."
        )


def check_bias_shape(attributes: Attributes, bias: np.ndarray | None, shapes: Shapes) -> None:
    """attention_bias is [B or 1, N or 1, S, T]; T is checked where it is read."""
    if bias is None:
        return
    if bias.ndim != 4:
        raise InvalidArgument(f"attention_bias must be a 4D tensor, got {bias.ndim} dimensions")
    batch, heads, rows, _ = bias.shape
    if batch not in (1, shapes.batch_size):
        raise InvalidArgument(
            f"attention_bias dimension 0 must be equal to the batch size or 1, got {batch} with "
            f"batch size {shapes.batch_size}."
        )
    if heads not in (1, attributes.num_heads):
        raise InvalidArgument(
            f"attention_bias dimension 1 must be equal to the num heads or 1, got {heads} with "
            f"num_heads {attributes.num_heads}."
        )
    if rows != shapes.sequence_length:
        raise InvalidArgument(
            f"attention_bias dimension 2 must be equal to the sequence length, got {rows} with "
            f"sequence length {shapes.sequence_length}."
        )


def check_head_sink_shape(attributes: Attributes, head_sink: np.ndarray | None) -> None:
    """head_sink is [N]."""
    if head_sink is None:
        return
    if head_sink.ndim != 1:
        raise InvalidArgument(f"head_sink must be a 1D tensor, got {head_sink.ndim} dimensions.")
    if head_sink.shape[0] != attributes.num_heads:
        raise InvalidArgument(
            "head_sink dimension 0 must be equal to the num heads, got "
            f"{head_sink.shape[0]} with num_heads {attributes.num_heads}."
        )


def check_norm_weight_shapes(inputs: Inputs, head_size: int) -> None:
    """q_norm_weight and k_norm_weight are [H]."""
    for name, weight in (("q_norm_weight", inputs.q_norm_weight), ("k_norm_weight", inputs.k_norm_weight)):
        if weight is not None and weight.shape != (head_size,):
            raise InvalidArgument(
                f"{name} must be a 1D tensor of shape (head_size={head_size}), got {braces(weight.shape)}."
            )


def check_scale_sizes(attributes: Attributes, inputs: Inputs, head_size: int) -> None:
    """Scales hold one element, or one a channel; their shape is free."""
    per_channel = attributes.k_quant_type == "PER_CHANNEL"
    wanted = attributes.kv_num_heads * head_size if per_channel else 1
    for name, scale in (("k_scale", inputs.k_scale), ("v_scale", inputs.v_scale)):
        if scale is not None and scale.size != wanted:
            raise InvalidArgument(f"{name} shape mismatch: expected {wanted} elements, got {scale.size}")


def _read_query(attributes: Attributes, inputs: Inputs) -> tuple[int, int, int]:
    """Return B, S and H of a separate or packed query."""
    shape = inputs.query.shape
    if len(shape) != 3:
        raise InvalidArgument(f"Input 'query' is expected to have 3 dimensions, got {len(shape)}")
    _check_extents("query", shape)
    if inputs.query.nbytes >= BYTES_LIMIT:
        raise InvalidArgument(f"Input 'query' of shape {braces(shape)} is too large: {inputs.query.nbytes} bytes.")
    batch, length, hidden = shape
    if batch == 0:
        raise InvalidArgument(f"batch_size must be at least 1. Input 'query' has shape {braces(shape)}.")
    if hidden == 0:
        raise InvalidArgument(f"head_size must be at least 1. Input 'query' has shape {braces(shape)}.")
    if (inputs.key is None) != (inputs.value is None):
        raise InvalidArgument(
            "Input 'key' and 'value' shall be both present, or both absent in the case of packed qkv."
        )
    heads = attributes.num_heads
    rule = "Query hidden size must be divisible by the number of query heads."
    if inputs.key is None:
        heads += 2 * attributes.kv_num_heads
        rule = "Packed query hidden size must be divisible by the grouped head count."
    head_size = hidden // heads
    if hidden % heads:
        tokens = batch * length
        raise InvalidArgument(
            f"{rule} Got hidden size {hidden} and {heads} heads: Tensor size "
            f"({tokens * hidden}) != new size ({tokens * heads * head_size})."
        )
    return batch, length, head_size


def _read_key_value(attributes: Attributes, key: np.ndarray, value: np.ndarray, batch: int, head_size: int) -> int:
    """Return the sequence length key and value share."""
    if key.ndim != 3:
        raise InvalidArgument(f"Input 'key' is expected to have 3 dimensions, got {key.ndim}")
    length: int = key.shape[1]
    key_batch, _, hidden = key.shape
    if key_batch != batch:
        raise InvalidArgument(
            f"Input 'query' and 'key' shall have same dim 0 (batch size). Got {batch} and {key_batch}."
        )
    kv_num_heads = attributes.kv_num_heads
    if hidden % kv_num_heads:
        raise InvalidArgument(
            "kv_hidden_size must be a multiple of kv_num_heads. Got kv_hidden_size % "
            f"kv_num_heads == {hidden % kv_num_heads} ({hidden} and {kv_num_heads})."
        )
    if hidden // kv_num_heads != head_size:
        raise InvalidArgument(
            "kv_hidden_size / kv_num_heads must be equal to head_size. Got kv_hidden_size / "
            f"kv_num_heads == {hidden // kv_num_heads}, head_size == {head_size}."
        )
    if value.ndim != 3:
        raise InvalidArgument(f"Input 'value' is expected to have 3 dimensions, got {value.ndim}")
    if value.shape != key.shape:
        raise InvalidArgument(_value_text(batch, key.shape, value.shape))
    return length


def _value_text(batch: int, key: tuple[int, ...], value: tuple[int, ...]) -> str:
    if value[0] != batch:
        return f"Input 'query' and 'value' shall have same dim 0 (batch size). Got {batch} and {value[0]}."
    if value[1] != key[1]:
        return f"Input 'key' and 'value' shall have same dim 1 (sequence length). Got {key[1]} and {value[1]}."
    return f"Input 'value' is expected to have same hidden size as key. Got {value[2]}, {key[2]}."


def _check_past(attributes: Attributes, key: tuple[int, ...], value: tuple[int, ...], shapes: Shapes) -> None:
    """Both are [B, N_kv, C, packed H], and the new tokens are S or none."""
    kv_length, length = shapes.kv_sequence_length, shapes.sequence_length
    valid = (shapes.batch_size, attributes.kv_num_heads, min(shapes.past_capacity, INT32_MAX), shapes.packed_head_size)
    if key == value == valid and kv_length in (0, length):
        return
    _check_past_dimension(key, value, None, 4)
    _check_past_dimension(key, value, 0, shapes.batch_size)
    if key[2] != value[2]:
        raise InvalidArgument(
            "BNSH Input 'past_key' and 'past_value' should have same dimension 2 (max "
            f"sequencelength or past sequence length), got {key[2]} and {value[2]}."
        )
    _check_past_dimension(key, value, 1, attributes.kv_num_heads)
    _check_past_dimension(key, value, 3, shapes.packed_head_size)
    if kv_length not in (0, length):
        raise InvalidArgument(
            "query and key must have the same sequence length when past_key is provided, or key "
            "sequence length must be 0 for shared KV (no new KV to append). Got sequence_length="
            f"{length}, kv_sequence_length={kv_length}"
        )
    _check_extents("past_key", key)


def _check_past_dimension(key: tuple[int, ...], value: tuple[int, ...], axis: int | None, wanted: int) -> None:
    """One dimension of both tensors, or their rank when axis is None."""
    for name, shape in (("past_key", key), ("past_value", value)):
        came = len(shape) if axis is None else shape[axis]
        if came != wanted:
            rule = _PAST_RULES[axis].format(came=came, wanted=wanted)
            raise InvalidArgument(f"Input '{name}' {rule}")


def _check_seqlens_shape(seqlens_k: np.ndarray, batch: int) -> None:
    """B elements, every dimension 1 or B."""
    if seqlens_k.ndim == 0:
        raise InvalidArgument("seqlens_k must be at least 1D, got scalar.")
    if seqlens_k.size != batch:
        raise InvalidArgument(f"seqlens_k must have batch_size ({batch}) elements, got {seqlens_k.size}.")
    for axis, size in enumerate(seqlens_k.shape):
        if size not in (1, batch):
            raise InvalidArgument(
                "seqlens_k has unexpected shape. Each dimension must be 1 or batch_size "
                f"({batch}), got dim[{axis}] = {size}."
            )


def _check_extents(name: str, shape: tuple[int, ...]) -> None:
    if max(shape) > INT32_MAX:
        raise InvalidArgument(f"Input '{name}' has a dimension above {INT32_MAX}: its shape is {braces(shape)}.")


def braces(shape: tuple[int, ...]) -> str:
    """Write a shape as ONNX Runtime does: {2,3}."""
    return "{" + ",".join(map(str, shape)) + "}"
