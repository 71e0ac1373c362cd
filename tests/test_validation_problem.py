"""What a valid call means: phase, lengths, types and positions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ort_errors import WINDOW, f32, i32, valid_call, validated

from gqa_tvm.validation import Phase

Call = dict[str, Any]
BF16 = ml_dtypes.bfloat16
INT8: Call = {"bits": 8}
SCALES = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "v_scale": f32(16)}
NORM = {"q_norm_weight": f32(16), "k_norm_weight": f32(16)}


def test_seqlens_k_and_total_of_every_accepted_shape() -> None:
    for shape in ((2,), (2, 1), (1, 2), (1, 2, 1)):
        for total in (np.array(5, np.int32), i32(5)):
            lengths = i32(2, 4).reshape(shape)
            problem = validated({"batch": 2}, seqlens_k=lengths, total_sequence_length=total)
            assert problem.total_lengths.tolist() == [3, 5]
            assert problem.past_lengths.tolist() == [2, 4]
            assert problem.total_lengths.dtype == problem.past_lengths.dtype == np.int32


def test_phases_and_lengths() -> None:
    decode = validated({})
    assert decode.phase is Phase.TOKEN_GENERATION
    assert (decode.present_length, decode.past_capacity, decode.total_sequence_length) == (8, 8, 5)
    assert (decode.head_size, decode.packed_head_size, decode.group_size) == (16, 16, 2)
    chunk = validated({"length": 3})
    assert (chunk.phase, chunk.past_lengths.tolist()) == (Phase.CHUNK, [2])
    prompt = validated({"length": 5, "batch": 2}, seqlens_k=i32(4, 1))
    assert (prompt.phase, prompt.past_lengths.tolist()) == (Phase.FIRST_PROMPT, [0, 0])
    assert prompt.total_lengths.tolist() == [5, 2]
    growing = validated({"total": 9})
    assert (growing.present_length, growing.past_lengths.tolist()) == (9, [8])


def test_a_prompt_without_past_equals_one_with_an_empty_past() -> None:
    for changes in ({}, {"past_key": None, "past_value": None}):
        for bits in (0, 8, 4):
            problem = validated({"length": 5, "capacity": 0, "bits": bits}, **changes)
            assert (problem.past_capacity, problem.present_length) == (0, 5)
            assert problem.packed_head_size == (8 if bits == 4 else 16)


def test_shared_kv_appends_nothing() -> None:
    problem = validated({}, key=f32(1, 0, 16), value=f32(1, 0, 16))
    assert (problem.kv_sequence_length, problem.past_lengths.tolist()) == (0, [4])
    assert validated({}, key=None, value=None, query=f32(1, 1, 64)).packed_qkv


@pytest.mark.parametrize("head_size", [1, 3, 7, 10, 46, 80])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_head_sizes_and_rotary_widths_ort_refuses(head_size: int, bits: int) -> None:
    packed = (head_size + 1) // 2 if bits == 4 else head_size
    past = valid_call(bits=bits)[1]["past_key"][..., :1].repeat(packed, axis=3)
    changes = {"query": f32(1, 1, 2 * head_size), "past_key": past, "past_value": past}
    changes |= {"key": f32(1, 1, head_size), "value": f32(1, 1, head_size)}
    tables = f32(5, head_size // 2)
    problem = validated({"bits": bits, "rotary": 1}, **changes, cos_cache=tables, sin_cache=tables)
    assert (problem.head_size, problem.packed_head_size) == (head_size, packed)
    assert problem.rotary_dim == 2 * (head_size // 2)
    assert (problem.positions is None) == (head_size == 1)


def positions_of(call: Call, **changes: Any) -> list[list[int]]:
    """Rotary positions of a call, checked for type and layout."""
    positions = validated(call, **changes).positions
    assert positions is not None and positions.dtype == np.int64
    assert positions.flags.c_contiguous and positions.flags.aligned
    return positions.tolist()  # type: ignore[no-any-return]


def test_rotary_positions() -> None:
    assert validated({}, cos_cache=f32(5, 8), sin_cache=f32(5, 8)).positions is None
    assert positions_of({"rotary": 1, "batch": 2}, seqlens_k=i32(1, 4)) == [[1], [4]]
    assert positions_of({"rotary": 1, "length": 3}) == [[2, 3, 4]]
    assert positions_of({"rotary": 1, "length": 3}, position_ids=np.array([[9, 7, 8]])) == [[9, 7, 8]]
    prompt = {"rotary": 1, "length": 3, "total": 3, "batch": 2}
    assert positions_of(prompt) == [[0, 1, 2]] * 2
    only_the_first = np.array([[4, 99, -1], [99, 99, 99]])
    assert positions_of(prompt, position_ids=only_the_first) == [[4, 5, 6]] * 2


def test_position_ids_wider_than_the_query_keep_their_own_rows() -> None:
    wide = np.array([[7, 99], [3, 99]])
    assert positions_of({"rotary": 1, "batch": 2}, position_ids=wide) == [[7], [3]]


def test_unused_values_are_not_read() -> None:
    validated({}, position_ids=np.array([[99]]))
    validated({}, k_scale=np.array([np.nan], "f4"), v_scale=f32(3))
    validated({"bits": 8}, k_scale=f32(1), v_scale=np.array([[[-1]]], "f4"))


def test_bias_sink_and_scales_of_accepted_shapes() -> None:
    for batch, heads in ((1, 1), (2, 1), (1, 2), (2, 2)):
        validated({"batch": 2}, attention_bias=f32(batch, heads, 1, 5), head_sink=f32(2))
    for shape in ((16,), (1, 1, 1, 16), (16, 1), (2, 8)):
        validated(INT8, **SCALES | {"k_scale": f32(*shape)})
    validated(INT8, k_scale=f32(), v_scale=f32(1, 1))


@pytest.mark.parametrize("query", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("past", [None, np.float32, np.float16, BF16])
def test_query_and_cache_are_of_any_two_float_types(query: Any, past: Any) -> None:
    changes: Call = {"past_key": None, "past_value": None}
    if past is not None:
        changes = dict.fromkeys(changes, np.zeros((1, 1, 8, 16), past))
    problem = validated({"dtype": query, "length": 5, "rotary": 1}, **changes)
    assert problem.query_dtype == query
    assert problem.cache_dtype == (query if past is None else past)


@pytest.mark.parametrize("query", [np.float32, np.float16, BF16])
@pytest.mark.parametrize(("bits", "codes"), [(8, np.int8), (4, np.uint8)])
def test_a_quantized_cache_has_its_type_with_and_without_past(query: Any, bits: int, codes: Any) -> None:
    for changes in ({}, {"past_key": None, "past_value": None}):
        problem = validated({"dtype": query, "bits": bits, "length": 5}, **changes)
        assert (problem.query_dtype, problem.cache_dtype) == (query, codes)


def test_all_float_inputs_take_the_type_of_the_query() -> None:
    bias, sink, weight = (np.ones(shape, BF16) for shape in ((1, 1, 1, 5), (2,), (16,)))
    call = {"dtype": BF16, "rotary": 1, "bits": 8}
    validated(call, attention_bias=bias, head_sink=sink, q_norm_weight=weight, k_norm_weight=weight)


def test_norm_weights_are_taken_with_shared_kv_and_packed_qkv() -> None:
    validated({}, **NORM, key=f32(1, 0, 16), value=f32(1, 0, 16))
    assert validated({}, **NORM, key=None, value=None, query=f32(1, 1, 64)).packed_qkv


def lengths_of(call: Call, **changes: Any) -> tuple[Phase, list[int], list[int], list[int]]:
    """Phase, past, new and total lengths of a call, checked for their types."""
    problem = validated(call, **changes)
    lengths = (problem.past_lengths, problem.query_lengths, problem.total_lengths)
    for array in lengths:
        assert array.dtype == np.int32 and array.flags.c_contiguous and array.flags.owndata
    return problem.phase, *(array.tolist() for array in lengths)  # type: ignore[return-value]


def test_every_token_counts_without_query_seqlens() -> None:
    assert lengths_of({"batch": 2}) == (Phase.TOKEN_GENERATION, [4, 4], [1, 1], [5, 5])
    ragged = lengths_of({"length": 5, "batch": 2}, seqlens_k=i32(4, 1))
    assert ragged == (Phase.FIRST_PROMPT, [0, 0], [5, 5], [5, 2])


@pytest.mark.parametrize("window", [{}, WINDOW])
def test_query_seqlens_make_a_padded_chunk_of_any_call(window: Call) -> None:
    chunk = lengths_of({"length": 3, "batch": 3}, query_seqlens=i32(3, 1, 0), seqlens_k=i32(4, 0, 2), **window)
    assert chunk == (Phase.PADDED_CHUNK, [2, 0, 3], [3, 1, 0], [5, 1, 3])
    one = lengths_of({"batch": 2}, query_seqlens=i32(1, 0), **window)
    assert one == (Phase.PADDED_CHUNK, [4, 5], [1, 0], [5, 5])
    prompt = lengths_of({"length": 5}, query_seqlens=i32(2), **window)
    assert prompt == (Phase.PADDED_CHUNK, [3], [2], [5])


def test_query_seqlens_let_the_cache_grow_to_any_bound() -> None:
    problem = validated({}, query_seqlens=i32(1), total_sequence_length=i32(1000))
    assert (problem.present_length, problem.total_lengths.tolist()) == (1000, [5])


@pytest.mark.parametrize(
    ("call", "seqlens", "lengths"),
    [
        ({"batch": 2}, (19, 2), (Phase.TOKEN_GENERATION, [19, 2], [1, 1], [20, 3])),
        ({"length": 3}, (11,), (Phase.CHUNK, [9], [3], [12])),
        ({"length": 3, "total": 2}, (11,), (Phase.CHUNK, [9], [3], [12])),
        ({"length": 5, "batch": 2}, (4, 8), (Phase.FIRST_PROMPT, [0, 4], [5, 5], [5, 9])),
        ({"length": 20, "total": 20}, (19,), (Phase.FIRST_PROMPT, [0], [20], [20])),
        ({"total": 30}, (2**31 - 2,), (Phase.TOKEN_GENERATION, [2**31 - 2], [1], [2**31 - 1])),
    ],
)
def test_lengths_of_a_sliding_window_are_absolute(call: Call, seqlens: tuple[int, ...], lengths: Any) -> None:
    assert lengths_of(call, **WINDOW, seqlens_k=i32(*seqlens)) == lengths
    problem = validated(call, **WINDOW, seqlens_k=i32(*seqlens))
    assert (problem.sliding_window, problem.present_length, problem.past_capacity) == (True, 8, 8)
    assert not validated({}, local_window_size=4).sliding_window


def test_positions_of_padding_are_zero_and_never_checked() -> None:
    padded: Call = {"rotary": 1, "length": 3, "batch": 2}
    lengths = {"query_seqlens": i32(2, 0), "seqlens_k": i32(4, 3)}
    assert positions_of(padded, **lengths) == [[3, 4, 0], [0, 0, 0]]
    ids = np.array([[9, 8, 99, 7], [-1, 2**40, 99, 7]])
    assert positions_of(padded, **lengths, position_ids=ids) == [[9, 8, 0], [0, 0, 0]]
    prompt = {"rotary": 1, "length": 3, "total": 3}
    assert positions_of(prompt, query_seqlens=i32(2), position_ids=np.array([[9, 4, 99]])) == [[9, 4, 0]]


def test_positions_in_a_sliding_window() -> None:
    assert positions_of({"rotary": 1, "length": 3}, **WINDOW, seqlens_k=i32(11)) == [[9, 10, 11]]
    # S == T starts at 0 as in onnxruntime, also where an entry is longer than T.
    prompt = {"rotary": 1, "length": 3, "total": 3, "batch": 2}
    longer = WINDOW | {"seqlens_k": i32(5, 2)}
    assert positions_of(prompt, **longer) == [[0, 1, 2]] * 2
    assert positions_of(prompt, **longer, position_ids=np.array([[10, 3, 4], [1, 2, 3]])) == [[10, 11, 12]] * 2
