"""Rules about lengths: total_sequence_length, seqlens_k, query_seqlens and the cache's capacity."""

from __future__ import annotations

from enum import Enum

import numpy as np

from gqa_tvm.attributes import Attributes
from gqa_tvm.errors import InvalidArgument
from gqa_tvm.validation_shapes import BYTES_LIMIT, INT32_MAX, Shapes, braces
from gqa_tvm.validation_types import Inputs


class Phase(str, Enum):
    """Where the new tokens stand relative to the cache."""

    FIRST_PROMPT = "first_prompt"  # S == T: rotary starts at 0; past content is ignored, save in a sliding window
    TOKEN_GENERATION = "token_generation"  # S == 1, T > 1: batch entries may differ in length
    CHUNK = "chunk"  # S > 1, S != T, one batch entry
    PADDED_CHUNK = "padded_chunk"  # query_seqlens given: batch entries may differ in length and in new tokens


def read_total(attributes: Attributes, inputs: Inputs, shapes: Shapes) -> int:
    """Return T, which the new tokens and a full-length cache's capacity must allow."""
    total = int(inputs.total_sequence_length.item())
    kv_length, capacity = shapes.kv_sequence_length, shapes.past_capacity
    if total <= 0:
        raise InvalidArgument(f"total_sequence_length must be positive, got {total}.")
    if attributes.use_sliding_window:
        _check_sliding_window(attributes, inputs, shapes)
        return total
    if total < kv_length:
        raise InvalidArgument(
            "total_sequence_length must be at least kv_sequence_length for a non-sliding cache. "
            f"Got {total} and {kv_length}."
        )
    if total > capacity and total != capacity + kv_length and inputs.query_seqlens is None:
        raise InvalidArgument(
            "total_sequence_length must equal past_sequence_length + kv_sequence_length for a "
            "dynamic cache, or be no greater than past_sequence_length for a static cache. Got "
            f"total_sequence_length={total}, past_sequence_length={capacity}, "
            f"kv_sequence_length={kv_length}."
        )
    return total


def _check_sliding_window(attributes: Attributes, inputs: Inputs, shapes: Shapes) -> None:
    if inputs.past_key is None:
        raise InvalidArgument("sliding_window_cache=1 requires past_key and past_value to be present.")
    if shapes.kv_sequence_length == 0:
        raise InvalidArgument(
            "sliding_window_cache=1 is not supported when kv_sequence_length == 0 (shared KV). "
            f"Got sequence_length={shapes.sequence_length}."
        )
    if shapes.past_capacity < attributes.window:
        raise InvalidArgument(
            f"sliding_window_cache: KV cache capacity ({shapes.past_capacity}) must be at least "
            f"local_window_size ({attributes.window})."
        )


def read_query_lengths(
    attributes: Attributes, inputs: Inputs, shapes: Shapes, total: int, seqlens: np.ndarray
) -> np.ndarray:
    """Return the int32 [B] counts of tokens that are no padding: query_seqlens, or S everywhere without it."""
    batch, length = shapes.batch_size, shapes.sequence_length
    given = inputs.query_seqlens
    if given is None:
        lengths = np.empty(batch, np.int32)
        lengths.fill(length)
        return lengths
    if given.shape != (batch,):
        raise InvalidArgument(
            f"query_seqlens must be a 1D tensor of shape (batch_size={batch}), got {braces(given.shape)}."
        )
    if inputs.past_key is None:
        raise InvalidArgument("query_seqlens requires past_key and past_value to be present.")
    if shapes.kv_sequence_length != length:
        raise InvalidArgument(
            "query_seqlens requires new key/value with kv_sequence_length == sequence_length. Got "
            f"sequence_length={length}, kv_sequence_length={shapes.kv_sequence_length}."
        )
    lengths = np.array(given, order="C")
    capacity = None if attributes.use_sliding_window else shapes.past_capacity
    for index, (last, count) in enumerate(zip(seqlens.tolist(), lengths.tolist(), strict=True)):
        _check_padded_entry(index, last, count, length, total)
        _check_padded_room(index, last + 1 - count, count, length, total, capacity)
    return lengths


def _check_padded_entry(index: int, last: int, count: int, length: int, total: int) -> None:
    if last < 0:
        raise InvalidArgument(f"seqlens_k[{index}] = {last} must not be negative when query_seqlens is given.")
    most = min(length, last + 1)
    if not 0 <= count <= most:
        raise InvalidArgument(
            f"query_seqlens[{index}] = {count} must be in [0, min(sequence_length, seqlens_k[{index}] + 1)] = "
            f"[0, {most}]."
        )
    if last + 1 > total:
        raise InvalidArgument(
            f"seqlens_k[{index}] + 1 = {last + 1} exceeds total_sequence_length ({total}) when query_seqlens is given."
        )


def _check_padded_room(index: int, past: int, count: int, length: int, total: int, capacity: int | None) -> None:
    """The past fits in the past arrays, the padded chunk behind it in the present; capacity is None with a window."""
    leaves = f"query_seqlens[{index}] = {count} leaves {past} cached tokens, "
    if capacity is not None and past > capacity:
        raise InvalidArgument(f"{leaves}but past_key and past_value hold only {capacity} rows.")
    # A sliding window holds any position that is an int32.
    room = INT32_MAX if capacity is None else max(total, capacity)
    if past + length > room:
        raise InvalidArgument(
            f"{leaves}and the padded chunk of {length} tokens does not fit in the KV cache capacity ({room})."
        )


def read_phase(inputs: Inputs, shapes: Shapes, total: int) -> Phase:
    """Return where the new tokens stand; tokens of several entries need S == 1, S == T or query_seqlens."""
    length = shapes.sequence_length
    if inputs.query_seqlens is not None and length:
        return Phase.PADDED_CHUNK
    if length == total:
        return Phase.FIRST_PROMPT
    if length == 1:
        return Phase.TOKEN_GENERATION
    if length == 0:
        raise InvalidArgument("sequence_length shall be 1 when it is not prompt. Got 0.")
    if shapes.batch_size != 1:
        raise InvalidArgument(
            "batch_size must be 1 when sequence_length > 1 and past context is given. "
            f"Got batch_size={shapes.batch_size}, sequence_length={length}."
        )
    return Phase.CHUNK


def check_seqlens_range(
    attributes: Attributes,
    inputs: Inputs,
    shapes: Shapes,
    total: int,
    phase: Phase,
    seqlens: np.ndarray,
    span: tuple[int, int],
) -> None:
    """An entry has at least one key and the call's new tokens, and no key outside the cache, T or the bias.

    span: the lowest and the highest of seqlens.
    """
    windowed = attributes.use_sliding_window
    least = _least_seqlen(windowed, phase, shapes.sequence_length)
    if windowed:
        most = INT32_MAX - 1 if inputs.attention_bias is None else total - 1
    else:
        most = total - 1
    if span[0] < least or span[1] > most:
        present = shapes.past_capacity if windowed else max(total, shapes.past_capacity)
        raise InvalidArgument(_seqlens_text(windowed, shapes.sequence_length, total, present, least, most, seqlens))


def _least_seqlen(windowed: bool, phase: Phase, length: int) -> int:
    """A first prompt may be ragged, save in a sliding window; a padded chunk has lengths of its own."""
    if phase is Phase.CHUNK or (windowed and phase is Phase.FIRST_PROMPT):
        return length - 1
    return 0


def _seqlens_text(
    windowed: bool, length: int, total: int, present: int, least: int, most: int, seqlens: np.ndarray
) -> str:
    """Name the first entry that breaks a rule and that rule."""
    for index, last in enumerate(seqlens.tolist()):
        if last < 0 or (last >= present and not windowed):
            return f"seqlens_k[{index}] = {last} is out of range [0, {present})"
        if last >= INT32_MAX:
            return f"seqlens_k[{index}] = {last} is out of range [0, {INT32_MAX})"
        if last < least:
            return f"seqlens_k[{index}] = {last} is too small for sequence_length {length}"
        if last > most and windowed:
            return f"seqlens_k[{index}] = {last} exceeds the attention_bias sequence dimension {total}."
        if last > most:
            return f"seqlens_k[{index}] + 1 = {last + 1} exceeds total_sequence_length ({total})."
    raise AssertionError("no entry of seqlens_k breaks a rule")


def check_result_sizes(
    attributes: Attributes, inputs: Inputs, shapes: Shapes, total: int, present: int, cache_itemsize: int
) -> None:
    """present_key and output_qk are of sizes an address space can hold."""
    nbytes = shapes.batch_size * attributes.kv_num_heads * present * shapes.packed_head_size * cache_itemsize
    if nbytes >= BYTES_LIMIT:
        raise InvalidArgument(
            f"Output 'present_key' would need {nbytes} bytes: total_sequence_length ({total}) or the KV cache "
            f"capacity ({shapes.past_capacity}) is too large."
        )
    if attributes.qk_output:
        items = shapes.batch_size * attributes.num_heads * shapes.sequence_length * total
        nbytes = items * inputs.query.itemsize
        if nbytes >= BYTES_LIMIT:
            raise InvalidArgument(
                f"Output 'output_qk' would need {nbytes} bytes: total_sequence_length ({total}) is too large."
            )


def extremes(values: np.ndarray) -> tuple[int, int]:
    """Return the lowest and the highest value of an array that is not empty."""
    if values.size == 1:
        value = int(values.item())
        return value, value
    return int(values.min()), int(values.max())
