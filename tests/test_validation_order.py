"""The order of rules: of two faults the one onnxruntime names is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ort_errors import NO_PAST, WINDOW, broken_call, f32, i32, ort_error, validated

from gqa_tvm.errors import InvalidArgument

Call = dict[str, Any]
Rows = list[tuple[Call, str]]

# broken inputs of one call in onnxruntime's order
FULL: Rows = [
    ({"k_scale": None}, "k_scale must be provided"),
    ({"v_scale": None}, "v_scale must be provided"),
    ({"query": f32(1, 32)}, "Input 'query' is expected to have 3"),
    ({"key": f32(16)}, "Input 'key' is expected to have 3"),
    ({"key": f32(2, 1, 16)}, "Input 'query' and 'key' shall have same dim 0"),
    ({"key": f32(1, 1, 24)}, "kv_hidden_size / kv_num_heads must be"),
    ({"value": f32(16)}, "Input 'value' is expected to have 3"),
    ({"value": f32(1, 1, 24)}, "Input 'value' is expected to have same hidden"),
    ({"past_key": np.zeros((1, 8, 16), np.int8)}, "Input 'past_key' is expected to have 4"),
    ({"past_value": np.zeros((1, 8, 16), np.int8)}, "Input 'past_value' is expected to have 4"),
    ({"past_key": np.zeros((2, 1, 8, 16), np.int8)}, "Input 'past_key' dimension 0 should"),
    ({"past_value": np.zeros((2, 1, 8, 16), np.int8)}, "Input 'past_value' dimension 0 should"),
    ({"past_key": np.zeros((1, 2, 8, 16), np.int8)}, "Input 'past_key' shall have kv_num_heads"),
    ({"past_value": np.zeros((1, 2, 8, 16), np.int8)}, "Input 'past_value' shall have kv_num_he"),
    ({"past_key": np.zeros((1, 1, 8, 8), np.int8)}, "Input 'past_key' dimension 3 should"),
    ({"past_value": np.zeros((1, 1, 8, 8), np.int8)}, "Input 'past_value' dimension 3 should"),
    ({"key": f32(1, 2, 16), "value": f32(1, 2, 16)}, "query and key must have the same sequence length when"),
    ({"seqlens_k": np.array(4, np.int32)}, "seqlens_k must be at least 1D"),
    ({"seqlens_k": i32(4, 4)}, "seqlens_k must have batch_size (1) elements"),
    ({"total_sequence_length": i32(5, 5)}, "total_sequence_length tensor must be of one element"),
    ({"total_sequence_length": i32(0)}, "total_sequence_length must be positive"),
    ({"total_sequence_length": i32(10)}, "total_sequence_length must equal"),
    ({"sin_cache": None}, "Input 'cos_cache' and 'sin_cache' shall"),
    ({"sin_cache": f32(16, 4)}, "cos_cache and sin_cache must have the same shape"),
    ({"cos_cache": f32(4, 16), "sin_cache": f32(4, 16)}, "cos_cache dimension 0 shall"),
    ({"cos_cache": f32(16, 16), "sin_cache": f32(16, 16)}, "cos_cache dimension 1 must"),
    ({"seqlens_k": i32(20)}, "out of range for rotary cache dimension 0"),
    ({"position_ids": np.zeros((2, 1), np.int64)}, "position_ids dimension 0 must"),
    ({"position_ids": np.zeros((1, 0), np.int64)}, "position_ids dimension 1 must"),
    ({"attention_bias": f32(1)}, "attention_bias must be a 4D tensor"),
    ({"attention_bias": f32(1, 1, 1, 4)}, "attention_bias dimension 3 must"),
    ({"head_sink": f32(3)}, "head_sink dimension 0 must"),
    ({"k_scale": f32(3)}, "k_scale shape mismatch"),
    ({"v_scale": f32(3)}, "v_scale shape mismatch"),
    ({"seqlens_k": i32(8)}, "is out of range [0, 8)"),
    ({"position_ids": np.array([[16]])}, "position_ids value 16 at index 0"),
]

TABLES: Rows = [
    ({"sin_cache": f32(32, 8)}, "Input 'cos_cache' and 'sin_cache' shall"),
    ({"sin_cache": f32(32, 8), "cos_cache": f32(32, 4)}, "cos_cache and sin_cache must have the same shape"),
    ({"cos_cache": f32(4, 8), "sin_cache": f32(4, 8)}, "cos_cache dimension 0 shall"),
    ({"cos_cache": f32(32, 16), "sin_cache": f32(32, 16)}, "cos_cache dimension 1 must"),
    ({"cos_cache": f32(32, 8), "sin_cache": f32(32, 8), "seqlens_k": i32(-1)}, "for rotary cache dimension 0"),
]
SHARED_KV = {"key": f32(1, 0, 16), "value": f32(1, 0, 16)}

# the same with query_seqlens = [2] and three new tokens
PADDED: Rows = [
    ({"causal": 0}, "query_seqlens requires causal=1."),
    ({"query": f32(1, 32)}, "Input 'query' is expected to have 3"),
    ({"past_key": f32(1, 2, 8, 16)}, "Input 'past_key' shall have kv_num_heads"),
    (
        {"total_sequence_length": i32(2), "key": f32(1, 3, 16)},
        "total_sequence_length must be at least kv_sequence_length",
    ),
    *TABLES,
    ({"query_seqlens": i32(2, 2)}, "query_seqlens must be a 1D tensor"),
    (NO_PAST | {"key": f32(1, 3, 16)}, "query_seqlens requires past_key and past_value"),
    (SHARED_KV, "query_seqlens requires new key/value"),
    ({"seqlens_k": i32(-3)}, "seqlens_k[0] = -3 must not be negative"),
    ({"query_seqlens": i32(4)}, "must be in [0, min(sequence_length, seqlens_k[0] + 1)]"),
    ({"seqlens_k": i32(5)}, "seqlens_k[0] + 1 = 6 exceeds total_sequence_length (5) when"),
    ({"seqlens_k": i32(10), "total_sequence_length": i32(20)}, "leaves 9 cached tokens, but"),
    ({"seqlens_k": i32(7), "total_sequence_length": i32(8)}, "leaves 6 cached tokens, and the padded chunk"),
    ({"position_ids": np.zeros((2, 3), np.int64)}, "position_ids dimension 0 must"),
    ({"attention_bias": f32(1, 1, 3, 4)}, "attention_bias dimension 3 must"),
    ({"head_sink": f32(3)}, "head_sink dimension 0 must"),
    ({"do_rotary": 1}, "cos_cache and sin_cache must be provided"),
]

# the same with a sliding window of 4 and one new token
WINDOWED: Rows = [
    ({"query": f32(1, 32)}, "Input 'query' is expected to have 3"),
    ({"past_key": f32(1, 2, 8, 16)}, "Input 'past_key' shall have kv_num_heads"),
    ({"total_sequence_length": i32(0)}, "total_sequence_length must be positive"),
    (NO_PAST | {"key": f32(1, 1, 16)}, "sliding_window_cache=1 requires past_key"),
    (SHARED_KV, "is not supported when kv_sequence_length == 0"),
    ({"local_window_size": 9}, "KV cache capacity (8) must be at least local_window_size (9)"),
    *TABLES,
    ({"query_seqlens": i32(1, 1)}, "query_seqlens must be a 1D tensor"),
    ({"query_seqlens": i32(2), "seqlens_k": i32(4)}, "must be in [0, min(sequence_length"),
    ({"position_ids": np.zeros((2, 1), np.int64)}, "position_ids dimension 0 must"),
    ({"attention_bias": f32(1, 1, 2, 5)}, "attention_bias dimension 2 must"),
    ({"head_sink": f32(3)}, "head_sink dimension 0 must"),
    ({"seqlens_k": i32(-1)}, "seqlens_k[0] = -1 is out of range [0, 8)"),
    ({"seqlens_k": i32(9), "attention_bias": f32(1, 1, 1, 5)}, "exceeds the attention_bias sequence dimension 5"),
    ({"do_rotary": 1}, "cos_cache and sin_cache must be provided"),
]

CASES: list[tuple[str, Call, Call, Rows]] = [
    ("full", {"bits": 8, "rotary": 1}, {}, FULL),
    ("padded", {"length": 3}, {"query_seqlens": i32(2)}, PADDED),
    ("windowed", {}, WINDOW, WINDOWED),
]


@pytest.mark.parametrize(
    ("call", "base", "rows", "first"),
    [
        pytest.param(call, base, rows, first, id=f"{name}-{first}")
        for name, call, base, rows in CASES
        for first in range(len(rows))
    ],
)
def test_the_earlier_of_two_faults_is_reported(call: Call, base: Call, rows: Rows, first: int) -> None:
    earlier, words = rows[first]
    for later, _ in [({}, ""), *rows[first + 1 :]]:
        if not earlier.keys() & later.keys():
            changes = base | earlier | later
            with pytest.raises(InvalidArgument) as caught:
                validated(call, **changes)
            assert words in str(caught.value), later
            assert words in ort_error(*broken_call(call, changes)), later
