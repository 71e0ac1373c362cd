"""Messages onnxruntime has too: one row a message, the same broken call given to both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ort_errors import NO_PAST, WINDOW, broken_call, f32, i8, i32, ids, ort_error

from gqa_tvm.attributes import Attributes
from gqa_tvm.errors import InvalidArgument
from gqa_tvm.validation import Inputs, validate

INT8: dict[str, Any] = {"bits": 8}
INT4: dict[str, Any] = {"bits": 4}
ROTARY: dict[str, Any] = {"rotary": 1}
CHUNK: dict[str, Any] = {"length": 3}
PER_CHANNEL = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
SHARED_KV = {"key": f32(1, 0, 16), "value": f32(1, 0, 16)}
ONE = {"query_seqlens": i32(1)}
PACKED = {"key": None, "value": None}
Row = tuple[dict[str, Any], dict[str, Any], str]

# Valid call, what breaks it -> words in our error and in onnxruntime's.
# Not here: rules about outputs that are not wired (present_key, present_value, output_qk), which always exist for us,
# and two that onnxruntime shadows with its rule about total_sequence_length ("requires ... past KV rows" and
# "exceeds past buffer size ... in shared KV mode").
MESSAGES: list[Row] = [
    (INT8, {"k_scale": None}, "k_scale must be provided when k_quant_type is not NONE"),
    (INT8, {"v_scale": None}, "v_scale must be provided when v_quant_type is not NONE"),
    ({}, {**ONE, "causal": 0}, "GroupQueryAttention (CPU): query_seqlens requires causal=1."),
    ({}, {"query": f32(1, 32)}, "Input 'query' is expected to have 3 dimensions, got 2"),
    ({}, {"value": None}, "Input 'key' and 'value' shall be both present, or both absent in the "),
    ({}, {"key": None}, "case of packed qkv."),
    ({}, {"query": f32(1, 1, 33)}, "Tensor size (33) != new size (32)"),
    ({}, {**PACKED, "query": f32(1, 1, 65)}, "Tensor size (65) != new size (64)"),
    ({}, {"key": f32(1, 16)}, "Input 'key' is expected to have 3 dimensions, got 2"),
    ({}, {"key": f32(2, 1, 16)}, "Input 'query' and 'key' shall have same dim 0 (batch size)"),
    (
        {},
        {"kv_num_heads": 2, "key": f32(1, 1, 33)},
        "kv_hidden_size must be a multiple of kv_num_heads. Got kv_hidden_size % kv_num_heads == 1",
    ),
    (
        {},
        {"key": f32(1, 1, 24)},
        "kv_hidden_size / kv_num_heads must be equal to head_size. Got kv_hidden_size / kv_num_heads == 24",
    ),
    ({}, {"value": f32(1, 1, 1, 16)}, "Input 'value' is expected to have 3 dimensions, got 4"),
    ({}, {"value": f32(2, 1, 16)}, "Input 'query' and 'value' shall have same dim 0 (batch size)"),
    ({}, {"value": f32(1, 2, 16)}, "Input 'key' and 'value' shall have same dim 1 (sequence len"),
    ({}, {"value": f32(1, 1, 32)}, "Input 'value' is expected to have same hidden size as key."),
    ({}, {"past_key": f32(1, 8, 16)}, "Input 'past_key' is expected to have 4 dimensions, got 3"),
    ({}, {"past_value": f32(8, 16)}, "Input 'past_value' is expected to have 4 dimensions, got 2"),
    ({}, {"past_key": f32(2, 1, 8, 16)}, "'past_key' dimension 0 should be batch_size, got 2"),
    ({}, {"past_value": f32(3, 1, 8, 16)}, "'past_value' dimension 0 should be batch_size, got 3"),
    (
        {},
        {"key": f32(1, 2, 16), "value": f32(1, 2, 16)},
        "query and key must have the same sequence length when past_key is provided, or key "
        "sequence length must be 0 for shared KV (no new KV to append). "
        "Got sequence_length=1, kv_sequence_length=2",
    ),
    (
        {},
        {"past_value": f32(1, 1, 9, 16)},
        "BNSH Input 'past_key' and 'past_value' should have same dimension 2 (max sequencelength "
        "or past sequence length), got ",
    ),
    ({}, {"past_key": f32(1, 2, 8, 16)}, "Input 'past_key' shall have kv_num_heads"),
    ({}, {"past_value": f32(1, 3, 8, 16)}, "Input 'past_value' shall have kv_num_heads"),
    (
        {},
        {"past_key": f32(1, 1, 8, 24)},
        "Input 'past_key' dimension 3 should match the packed KV head dimension, got 24 expected 16",
    ),
    (
        INT8,
        {"past_value": i8(1, 1, 8, 8)},
        "Input 'past_value' dimension 3 should match the packed KV head dimension, got 8 expected 16",
    ),
    (
        INT4,
        {"past_key": np.zeros((1, 1, 8, 16), np.uint8)},
        "'past_key' dimension 3 should match the packed KV head dimension, got 16 expected 8",
    ),
    (
        {},
        {"past_key": None},
        "Input 'past_key' and 'past_value' shall be both present or both absent.",
    ),
    (
        {"total": 1},
        {**NO_PAST, "key": f32(1, 2, 16), "value": f32(1, 2, 16)},
        "query and key must have the same sequence length when past_key is not provided. "
        "Got sequence_length=1, kv_sequence_length=2",
    ),
    ({}, {"seqlens_k": np.array(4, np.int32)}, "seqlens_k must be at least 1D, got scalar."),
    ({"batch": 2}, {"seqlens_k": i32(4, 4, 4)}, "seqlens_k must have batch_size (2) elements, go"),
    ({}, {"seqlens_k": i32()}, "seqlens_k must have batch_size (1) elements, got 0."),
    (
        {"batch": 4},
        {"seqlens_k": i32(4, 4, 4, 4).reshape(2, 2)},
        "seqlens_k has unexpected shape. Each dimension must be 1 or batch_size (4), got dim[0] = 2.",
    ),
    ({}, {"total_sequence_length": i32(5, 5)}, "total_sequence_length tensor must be of one ele"),
    ({}, {"total_sequence_length": i32(5)[None]}, "total_sequence_length tensor must be of one"),
    ({}, {"total_sequence_length": i32(0)}, "total_sequence_length must be positive, got 0."),
    ({}, {"total_sequence_length": i32(-(2**31))}, "must be positive, got -2147483648."),
    (
        CHUNK,
        {"total_sequence_length": i32(2)},
        "total_sequence_length must be at least kv_sequence_length for a non-sliding cache. Got 2 and 3.",
    ),
    (
        {},
        {"total_sequence_length": i32(2**31 - 1)},
        "total_sequence_length must equal past_sequence_length + kv_sequence_length for a dynamic "
        "cache, or be no greater than past_sequence_length for a static cache. Got "
        "total_sequence_length=2147483647, past_sequence_length=8, kv_sequence_length=1.",
    ),
    ({"total": 10}, {}, "Got total_sequence_length=10, past_sequence_length=8, kv_sequence_length"),
    ({"total": 2}, NO_PAST, "Got total_sequence_length=2, past_sequence_length=0, kv_sequence_le"),
    (
        {"total": 9},
        {"key": f32(1, 0, 16), "value": f32(1, 0, 16)},
        "Got total_sequence_length=9, past_sequence_length=8, kv_sequence_length=0.",
    ),
    ({}, {**WINDOW, **NO_PAST}, "sliding_window_cache=1 requires past_key and past_value to be present."),
    (
        {},
        {**WINDOW, **SHARED_KV},
        "sliding_window_cache=1 is not supported when kv_sequence_length == 0 (shared KV).",
    ),
    ({"length": 0}, WINDOW, "sliding_window_cache=1 is not supported when kv_sequence_length == 0 (shared KV)."),
    (
        {"capacity": 3},
        WINDOW,
        "sliding_window_cache: KV cache capacity (3) must be at least local_window_size (4).",
    ),
    ({"capacity": 0}, WINDOW, "KV cache capacity (0) must be at least local_window_size (4)."),
    ({}, {**WINDOW, "total_sequence_length": i32(-1)}, "total_sequence_length must be positive, got -1."),
    (ROTARY, {"sin_cache": None}, "Input 'cos_cache' and 'sin_cache' shall be both present or bo"),
    (ROTARY, {"cos_cache": None}, "Input 'cos_cache' and 'sin_cache' shall be both present or bo"),
    (
        ROTARY,
        {"sin_cache": f32(17, 8)},
        "cos_cache and sin_cache must have the same shape. Got cos_cache shape {16,8} and sin_cache shape {17,8}.",
    ),
    (
        {},
        {"cos_cache": f32(4, 8), "sin_cache": f32(4, 8)},
        "cos_cache dimension 0 shall not be less than total_sequence_length.",
    ),
    (
        {},
        {"cos_cache": f32(5, 16), "sin_cache": f32(5, 16)},
        "cos_cache dimension 1 must be <= head_size / 2",
    ),
    (
        {"rotary": 1, "capacity": 32},
        {"seqlens_k": i32(20)},
        "seqlens_k[0] = 20 is out of range for rotary cache dimension 0 (16)",
    ),
    (
        {"rotary": 1, "batch": 2},
        {"seqlens_k": i32(2, -3)},
        "seqlens_k[1] = -3 is out of range for rotary cache dimension 0 (16)",
    ),
    (
        {"rotary": 1, "total": 16},
        {**WINDOW, "seqlens_k": i32(16)},
        "seqlens_k[0] = 16 is out of range for rotary cache dimension 0 (16)",
    ),
    ({}, {"query_seqlens": i32(1)[None]}, "must be a 1D tensor of shape (batch_size=1), got {1,1}."),
    ({}, {"query_seqlens": np.array(1, "i4")}, "query_seqlens must be a 1D tensor of shape (batch_size=1), got {}."),
    ({"batch": 2}, ONE, "query_seqlens must be a 1D tensor of shape (batch_size=2), got {1}."),
    ({"total": 1}, {**ONE, **NO_PAST}, "query_seqlens requires past_key and past_value to be present."),
    (
        {},
        {**ONE, **SHARED_KV},
        "query_seqlens requires new key/value with kv_sequence_length == sequence_length. "
        "Got sequence_length=1, kv_sequence_length=0.",
    ),
    (
        {"batch": 2},
        {"query_seqlens": i32(1, 1), "seqlens_k": i32(4, -2)},
        "seqlens_k[1] = -2 must not be negative when query_seqlens is given.",
    ),
    (
        CHUNK,
        {"query_seqlens": i32(4)},
        "query_seqlens[0] = 4 must be in [0, min(sequence_length, seqlens_k[0] + 1)] = [0, 3].",
    ),
    (
        CHUNK,
        {"query_seqlens": i32(-1), "seqlens_k": i32(1)},
        "query_seqlens[0] = -1 must be in [0, min(sequence_length, seqlens_k[0] + 1)] = [0, 2].",
    ),
    (
        {},
        {**ONE, "seqlens_k": i32(2**31 - 1)},
        "seqlens_k[0] + 1 = 2147483648 exceeds total_sequence_length (5) when query_seqlens is given.",
    ),
    (
        CHUNK,
        {**WINDOW, **ONE, "seqlens_k": i32(5)},
        "seqlens_k[0] + 1 = 6 exceeds total_sequence_length (5) when query_seqlens is given.",
    ),
    (
        {"batch": 2, "total": 20},
        {"query_seqlens": i32(1, 0), "seqlens_k": i32(7, 9)},
        "query_seqlens[1] = 0 leaves 10 cached tokens, but past_key and past_value hold only 8 rows.",
    ),
    (
        {"length": 3, "total": 8},
        ONE,
        "query_seqlens[0] = 1 leaves 7 cached tokens, and the padded chunk of 3 tokens does not fit "
        "in the KV cache capacity (8).",
    ),
    ({"length": 3, "total": 2}, ONE, "total_sequence_length must be at least kv_sequence_length for a"),
    (
        {"length": 3, "batch": 2},
        {},
        "batch_size must be 1 when sequence_length > 1 and past context is given.",
    ),
    (
        {"length": 3, "batch": 2},
        WINDOW,
        "batch_size must be 1 when sequence_length > 1 and past context is given.",
    ),
    ({"length": 0}, {}, "sequence_length shall be 1 when it is not prompt."),
    ({}, {"position_ids": ids(1).T.repeat(2, 0)}, "position_ids dimension 0 must be equal to the "),
    ({"batch": 2}, {"position_ids": ids(1)}, "must be equal to the batch size, got 1"),
    (CHUNK, {"position_ids": ids(1, 2)}, "position_ids dimension 1 must be at least sequence len"),
    ({}, {"attention_bias": f32(1, 1, 5)}, "attention_bias must be a 4D tensor, got 3 dimensions"),
    (
        {"batch": 2},
        {"attention_bias": f32(3, 1, 1, 5)},
        "attention_bias dimension 0 must be equal to the batch size or 1, got 3",
    ),
    (
        {},
        {"attention_bias": f32(1, 3, 1, 5)},
        "attention_bias dimension 1 must be equal to the num heads or 1, got 3",
    ),
    (
        {},
        {"attention_bias": f32(1, 2, 2, 5)},
        "attention_bias dimension 2 must be equal to the sequence length, got 2",
    ),
    (
        {},
        {"attention_bias": f32(1, 2, 1, 4)},
        "attention_bias dimension 3 must be equal to total_sequence_length, got 4",
    ),
    ({}, {"head_sink": f32(2, 1)}, "head_sink must be a 1D tensor"),
    ({}, {"head_sink": f32(1)}, "head_sink dimension 0 must be equal to the num heads, got 1"),
    (INT8, {"k_scale": f32(3)}, "k_scale shape mismatch: expected 1 elements, got 3"),
    (INT8, {"v_scale": f32(0)}, "v_scale shape mismatch: expected 1 elements, got 0"),
    (
        INT8,
        {**PER_CHANNEL, "k_scale": f32(1, 1, 16, 1), "v_scale": f32(8)},
        "v_scale shape mismatch: expected 16 elements, got 8",
    ),
    ({}, {"seqlens_k": i32(-1)}, "seqlens_k[0] = -1 is out of range [0, 8)"),
    ({}, {"seqlens_k": i32(8)}, "seqlens_k[0] = 8 is out of range [0, 8)"),
    ({}, {"seqlens_k": i32(2**31 - 1)}, "seqlens_k[0] = 2147483647 is out of range [0, 8)"),
    ({}, {"seqlens_k": i32(-(2**31))}, "seqlens_k[0] = -2147483648 is out of range [0, 8)"),
    ({"batch": 2}, {"seqlens_k": i32(4, 9)}, "seqlens_k[1] = 9 is out of range [0, 8)"),
    (CHUNK, {"seqlens_k": i32(1)}, "seqlens_k[0] = 1 is too small for sequence_length 3"),
    ({}, {**WINDOW, "seqlens_k": i32(-1)}, "seqlens_k[0] = -1 is out of range [0, 8)"),
    ({"batch": 2}, {**WINDOW, "seqlens_k": i32(20, -1)}, "seqlens_k[1] = -1 is out of range [0, 8)"),
    (CHUNK, {**WINDOW, "seqlens_k": i32(1)}, "seqlens_k[0] = 1 is too small for sequence_length 3"),
    (
        {"length": 5, "batch": 2},
        {**WINDOW, "seqlens_k": i32(4, 1)},
        "seqlens_k[1] = 1 is too small for sequence_length 5",
    ),
    (
        {},
        {**WINDOW, "seqlens_k": i32(20), "attention_bias": f32(1, 1, 1, 5)},
        "seqlens_k[0] = 20 exceeds the attention_bias sequence dimension 5.",
    ),
    ({}, {"do_rotary": 1}, "cos_cache and sin_cache must be provided when do_rotary is true"),
    (ROTARY, {"position_ids": ids(-1)}, "position_ids value -1 at index 0 is out of range [0, 16)"),
    (ROTARY, {"position_ids": ids(2**40)}, "position_ids value 1099511627776 at index 0 is out o"),
    (
        {"rotary": 1, "length": 3},
        {"position_ids": ids(0, 1, 16)},
        "position_ids value 16 at index 2 is out of range [0, 16)",
    ),
    (
        {"rotary": 1, "length": 5},
        {"position_ids": ids(12, 0, 0, 0, 0)},
        "position_ids base value 12 with sequence_length 5 exceeds cos/sin cache range [0, 16)",
    ),
    (
        {"rotary": 1, "length": 5},
        {"position_ids": ids(-1, 0, 0, 0, 0)},
        "position_ids base value -1 with sequence_length 5 exceeds cos/sin cache range [0, 16)",
    ),
    (
        {"rotary": 1, "length": 5},
        {**WINDOW, "position_ids": ids(12, 0, 0, 0, 0)},
        "position_ids base value 12 with sequence_length 5 exceeds cos/sin cache range [0, 16)",
    ),
    (
        {"rotary": 1, "length": 3, "batch": 2},
        {"query_seqlens": i32(1, 2), "position_ids": np.array([[1, 99, 99], [1, 99, 2]])},
        "position_ids value 99 at index 1 is out of range [0, 16)",
    ),
    (
        INT8,
        {"past_key": i8(1, 1, 8, 16).view("u1"), "past_value": i8(1, 1, 8, 16).view("u1")},
        "Tensor type mismatch. ",
    ),
    (
        INT4,
        {"past_key": i8(1, 1, 8, 8), "past_value": i8(1, 1, 8, 8)},
        "Tensor type mismatch. ",
    ),
    (
        {},
        {"past_key": i8(1, 1, 8, 16), "past_value": i8(1, 1, 8, 16)},
        "Tensor type mismatch. ",
    ),
    (INT8, {"past_value": i8(1, 1, 8, 16).view("u1")}, "Type Error: "),
    ({}, {"query": np.zeros((1, 1, 32))}, "Type Error: "),
    ({}, {"key": np.zeros((1, 1, 16), np.float16)}, "Type Error: "),
    ({"dtype": np.float16}, {"head_sink": f32(2)}, "Type Error: "),
    ({}, {"query_seqlens": np.array([1])}, "Type Error: "),
    ({}, {"seqlens_k": np.array([4])}, "Type Error: "),
    ({}, {"total_sequence_length": np.array([5])}, "Type Error: "),
    ({}, {"position_ids": np.zeros((1, 1), np.int32)}, "Type Error: "),
    (INT8, {"k_scale": np.ones(1)}, "Type Error: "),
]


@pytest.mark.parametrize(
    ("call", "changes", "words"), MESSAGES, ids=[f"{i}-{row[2]}" for i, row in enumerate(MESSAGES)]
)
def test_a_broken_call_gives_the_words_of_onnxruntime(
    call: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    attributes, inputs = broken_call(call, changes)
    with pytest.raises(InvalidArgument) as caught:
        validate(Attributes(**attributes), Inputs(**inputs))
    assert words in str(caught.value)
    assert words in ort_error(attributes, inputs)


# valid call, changes both accept
ACCEPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {**ONE, "total_sequence_length": i32(1000)}),
    ({"total": 9}, ONE),
    (CHUNK, {"query_seqlens": i32(0)}),
    ({"capacity": 4}, WINDOW),
    ({"length": 3, "batch": 2}, {"query_seqlens": i32(3, 1), "seqlens_k": i32(4, 0)}),
    ({}, {**WINDOW, "seqlens_k": i32(2**31 - 2)}),
    ({"total": 2**31 - 1}, WINDOW),
    ({"length": 3, "total": 2}, {**WINDOW, "seqlens_k": i32(4)}),
    ({"length": 5, "batch": 2}, {**WINDOW, "seqlens_k": i32(9, 4)}),
    ({"batch": 2}, {**WINDOW, "seqlens_k": i32(0, 9)}),
    ({"length": 12, "total": 60}, {**WINDOW, **ONE, "seqlens_k": i32(50)}),
    ({"dtype": np.float16, "bits": 4, "rotary": 1}, {}),
    ({"dtype": np.float16}, {"past_key": f32(1, 1, 8, 16), "past_value": f32(1, 1, 8, 16)}),
]


@pytest.mark.parametrize("row", range(len(ACCEPTED)))
def test_a_call_onnxruntime_accepts_is_accepted(row: int) -> None:
    attributes, inputs = broken_call(*ACCEPTED[row])
    validate(Attributes(**attributes), Inputs(**inputs))
    assert ort_error(attributes, inputs) == ""
