"""Validation: rules of our own, rules of onnxruntime we lift, and that nothing else than InvalidArgument is raised."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ort_errors import WINDOW, broken_call, f32, i32, ort_error, valid_call, validated

from gqa_tvm.attributes import Attributes
from gqa_tvm.errors import InvalidArgument
from gqa_tvm.validation import Inputs, Phase, validate

Call = dict[str, Any]


INT8: Call = {"bits": 8}
ROTARY: Call = {"rotary": 1}
SCALES = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "v_scale": f32(16)}

BF16 = ml_dtypes.bfloat16
SWAPPED = np.dtype(BF16).newbyteorder()
NORM = {"q_norm_weight": f32(16), "k_norm_weight": f32(16)}


def huge(name: str, *shape: int) -> Call:
    """An input of any size that takes no memory."""
    return {name: np.broadcast_to(np.float32(0), shape)}


# onnxruntime accepts, truncates, or dies of these
OWN: list[tuple[Call, Call, str]] = [
    ({}, {"query": None}, "Input 'query' is required, got None."),
    ({}, {"seqlens_k": None}, "Input 'seqlens_k' is required, got None."),
    ({}, {"total_sequence_length": None}, "Input 'total_sequence_length' is required, got None."),
    ({}, {"query": [[[1.0]]]}, "Input 'query' must be a NumPy array, got list."),
    ({}, {"total_sequence_length": 5}, "'total_sequence_length' must be a NumPy array, got int."),
    ({}, {"head_sink": "sink"}, "Input 'head_sink' must be a NumPy array, got str."),
    ({}, {"query": np.zeros((1, 1, 32))}, "must be float32, float16 or bfloat16, got float64."),
    ({}, {"query": f32(1, 1, 32).astype(">f4")}, "must be float32, float16 or bfloat16, got >f4."),
    ({}, {"query": np.zeros((1, 1, 32), "c8")}, "must be float32, float16 or bfloat16, got complex64."),
    ({}, {"query": np.zeros((1, 1, 32), ml_dtypes.bfloat16).view(SWAPPED)}, "must be float32, float16 or bfloat1"),
    ({}, {"query": np.ma.masked_array(f32(1, 1, 32))}, "'query' must be a NumPy array, got MaskedArray."),
    ({}, {"value": np.zeros((1, 1, 16), object)}, "'value' must be float32, the type of 'query', got object."),
    ({"dtype": np.float16}, {"key": f32(1, 1, 16)}, "'key' must be float16, the type of 'query', got float32."),
    ({"dtype": BF16}, {"head_sink": f32(2)}, "'head_sink' must be bfloat16, the type of 'query', got float32."),
    ({"dtype": BF16, "bits": 8}, {"k_scale": np.ones(1, BF16)}, "'k_scale' must be float32, got bfloat16."),
    ({}, {"q_norm_weight": np.ones(16, "f2")}, "'q_norm_weight' must be float32, the type of 'query', got float16"),
    ({}, {"past_key": np.zeros(3, "U2")}, "'past_key' must be float32, float16, bfloat16, int8 or uint8, got <U2."),
    ({}, {"past_key": np.zeros((1, 1, 8, 16), "f2")}, "must have the same type, got float16 and float32."),
    ({}, {"seqlens_k": np.array([4])}, "Input 'seqlens_k' must be int32, got int64."),
    ({}, {"total_sequence_length": np.array([5])}, "must be int32, got int64."),
    ({}, {"position_ids": i32(1)[None]}, "Input 'position_ids' must be int64, got int32."),
    (INT8, {"k_scale": np.ones(1)}, "Input 'k_scale' must be float32, got float64."),
    (INT8, {"past_value": np.zeros((1, 1, 8, 16), np.uint8)}, "same type, got int8 and uint8."),
    (INT8, {"past_key": f32(1, 1, 8, 16), "past_value": f32(1, 1, 8, 16)}, "int8 when kv_cache_bi"),
    (
        {},
        {"past_key": np.zeros((1, 1, 8, 16), "i1"), "past_value": np.zeros((1, 1, 8, 16), "i1")},
        "must be float32, float16 or bfloat16 when kv_cache_bit_width is 0, got int8.",
    ),
    ({}, {"q_norm_weight": f32(16)}, "'q_norm_weight' and 'k_norm_weight' shall be both present or both absent."),
    ({}, {"k_norm_weight": f32(16)}, "'q_norm_weight' and 'k_norm_weight' shall be both present or both absent."),
    ({}, NORM | {"q_norm_weight": f32(8)}, "q_norm_weight must be a 1D tensor of shape (head_size=16), got {8}."),
    ({}, NORM | {"k_norm_weight": f32(1, 16)}, "k_norm_weight must be a 1D tensor of shape (head_size=16), got {1,16}"),
    ({"length": 0}, {"query_seqlens": i32(0)}, "sequence_length shall be 1 when it is not prompt. Got 0."),
    ({}, WINDOW | {"seqlens_k": i32(2**31 - 1)}, "seqlens_k[0] = 2147483647 is out of range [0, 2147483647)"),
    (
        {"length": 3, "total": 2**31 - 1},
        WINDOW | {"query_seqlens": i32(2)},
        "query_seqlens[0] = 2 leaves 2147483645 cached tokens, and the padded chunk of 3 tokens does not fit",
    ),
    ({"batch": 2}, huge("query", 2, 2**31, 32), "'query' has a dimension above 2147483647: its shape is {2,2147483648"),
    ({}, huge("query", 1, 2**30, 2**20), "Input 'query' of shape {1,1073741824,1048576} is too large"),
    ({}, huge("past_key", 1, 1, 2**31, 16) | huge("past_value", 1, 1, 2**31, 16), "'past_key' has a dimension above"),
    ({}, huge("cos_cache", 2**31, 8) | huge("sin_cache", 2**31, 8), "'cos_cache' has a dimension above 2147483647"),
    (
        {"batch": 2},
        {"kv_num_heads": 2**19, "num_heads": 2**19, "query_seqlens": i32(1, 1)}
        | huge("query", 2, 1, 2**23)
        | huge("key", 2, 1, 2**23)
        | huge("value", 2, 1, 2**23)
        | huge("past_key", 2, 2**19, 8, 16)
        | huge("past_value", 2, 2**19, 8, 16)
        | {"total_sequence_length": i32(2**21)},
        "Output 'present_key' would need 140737488355328 bytes: total_sequence_length (2097152)",
    ),
    (
        {"length": 2**14, "total": 2**14, "capacity": 2**15},
        {"qk_output": 1, "query_seqlens": i32(1), "total_sequence_length": i32(2**31 - 1)},
        "Output 'output_qk' would need 281474976579584 bytes: total_sequence_length (2147483647)",
    ),
    ({"batch": 0}, {}, "batch_size must be at least 1. Input 'query' has shape {0,1,32}."),
    ({}, {"query": f32(1, 1, 0)}, "head_size must be at least 1. Input 'query' has shape {1,1,0}."),
    ({}, {"query": f32(1, 1, 1)}, "Got hidden size 1 and 2 heads"),
    (
        {},
        {"key": None, "value": None, "query": f32(1, 1, 65)},
        "Packed query hidden size must be divisible by the grouped head count. Got hidden size 65",
    ),
    (ROTARY, {"cos_cache": f32(16), "sin_cache": f32(16)}, "2D tensors, got 1 dimensions."),
    ({}, {"cos_cache": f32(), "sin_cache": f32()}, "must be 2D tensors, got 0 dimensions."),
    (ROTARY, {"cos_cache": f32(16, 8, 1), "sin_cache": f32(16, 8, 1)}, "got 3 dimensions."),
    ({}, {"position_ids": np.array(1)}, "position_ids must be a 2D tensor, got 0 dimensions."),
    (ROTARY, {"position_ids": np.array([1])}, "position_ids must be a 2D tensor, got 1 dimension"),
    ({}, {"seqlens_k": i32(5)}, "seqlens_k[0] + 1 = 6 exceeds total_sequence_length (5)."),
    ({"batch": 3}, {"seqlens_k": i32(4, 6, 7)}, "seqlens_k[1] + 1 = 7 exceeds total_sequence_len"),
    ({"length": 5, "total": 5}, {"causal": 0, "seqlens_k": i32(7)}, "exceeds total_sequence_leng"),
    (INT8, {"k_scale": np.array([np.nan], "f4")}, "k_scale must be finite, got nan at index 0."),
    (INT8, SCALES | {"k_scale": np.array([1] * 5 + [-np.inf] * 11, "f4")}, "got -inf at index 5."),
    (
        {"batch": 2, "rotary": 1},
        {"position_ids": np.array([[1, 99], [77, 1]])},
        "position_ids value 77 at index 1 is out of range [0, 16)",
    ),
]


@pytest.mark.parametrize(("call", "changes", "words"), OWN, ids=[row[2] for row in OWN])
def test_a_rule_of_our_own_says_what_came_and_what_was_wanted(call: Call, changes: Call, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validated(call, **changes)
    assert words in str(caught.value)


# valid call, changes we accept -> what onnxruntime says to them
LIFTED: list[tuple[Call, Call, str]] = [
    ({"head_size": 12}, {}, "head_size must be a multiple of 8. Got head_size % 8 == 4"),
    ({"head_size": 8, "rotary": 1}, {}, "head_size shall be a multiple of 16. Got head_size % 16 == 8"),
    (
        {"head_size": 8, "bits": 8},
        WINDOW,
        "sliding_window_cache: head_size (8) must be a multiple of 16 for an 8-bit KV cache.",
    ),
    ({"bits": 4}, WINDOW, "sliding_window_cache: head_size (16) must be a multiple of 32 for a 4-bit KV cache."),
    (
        ROTARY,
        {"cos_cache": f32(16, 3), "sin_cache": f32(16, 3)},
        "cos_cache dimension 1 must be <= head_size / 2 and a multiple of 8.",
    ),
    (
        {},
        {"q_norm_weight": f32(16), "k_norm_weight": f32(16)},
        "GroupQueryAttention (CPU): q_norm_weight / k_norm_weight inputs are not supported. The per-head Q/K RMS "
        "normalization prologue is implemented only on the CUDA and WebGPU EPs.",
    ),
    ({"dtype": ml_dtypes.bfloat16}, {}, "Could not find an implementation for GroupQueryAttention(1)"),
]


@pytest.mark.parametrize(("call", "changes", "words"), LIFTED, ids=[row[2] for row in LIFTED])
def test_a_call_only_onnxruntime_refuses_is_accepted(call: Call, changes: Call, words: str) -> None:
    attributes, inputs = broken_call(call, changes)
    validate(Attributes(**attributes), Inputs(**inputs))
    assert words in ort_error(attributes, inputs)


def test_results_do_not_alias_inputs_and_inputs_stay_as_they_were() -> None:
    attributes, inputs = valid_call(rotary=1, batch=2)
    inputs["position_ids"] = np.array([[1], [2]])
    inputs["query_seqlens"] = i32(1, 0)
    before = {name: None if x is None else x.copy() for name, x in inputs.items()}
    for array in inputs.values():
        if array is not None:
            array.flags.writeable = False
    problem = validate(Attributes(**attributes), Inputs(**inputs))
    assert problem.positions is not None
    for own in (problem.total_lengths, problem.past_lengths, problem.query_lengths, problem.positions):
        own[:] = -1
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, before[name])


INTEGERS = [-(2**31), -1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 2**31 - 1]
DTYPES = ["f4", "f4", "f4", "i4", "i4", "i8", "i1", "u1", "f8", "f2", ">f4", ">i4", "U1", "O", "?", "c8", "f4,i4", BF16]
KINDS: list[Call] = [{}, WINDOW, {"query_seqlens": i32(1, 0)}, WINDOW | {"query_seqlens": i32(0, 1)}, NORM]
MATRICES = [i32(1, 2)[None].view(np.matrix), f32(1, 1).view(np.matrix)]
SUBCLASSES = [*MATRICES, np.ma.masked_array(i32(4), mask=[True])]


@st.composite
def junk(draw: st.DrawFn) -> Any:
    """An array of any shape and type filled with one edge value, or something else."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([None, 5, 1.5, "text", [1], object(), *SUBCLASSES]))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 32, 64]), max_size=5)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    value = draw(st.sampled_from([*INTEGERS, 2**62, -(2**63)] if dtype.kind == "i" else [0, 1]))
    return np.broadcast_to(np.array(value).astype(dtype), shape)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([0, 1, 2]),
    st.sampled_from([0, 1, 3, 5]),
    st.sampled_from([0, 8, 4]),
    st.sampled_from([0, 1]),
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(Inputs._fields), junk(), max_size=3),
    st.lists(st.sampled_from(INTEGERS), min_size=2, max_size=2),
)
def test_malformed_calls_give_a_problem_or_invalid_argument(
    batch: int, length: int, bits: int, rotary: int, kind: Call, broken: Call, lengths: list[int]
) -> None:
    attributes, inputs = broken_call({"batch": batch, "length": length, "bits": bits, "rotary": rotary}, kind)
    inputs["seqlens_k"] = i32(*lengths[:batch])
    if inputs["query_seqlens"] is not None:
        inputs["query_seqlens"] = inputs["query_seqlens"][:batch]
    try:
        problem = validate(Attributes(**attributes), Inputs(**inputs | broken))
    except InvalidArgument as error:
        assert str(error)
        return
    assert problem.total_lengths.min() >= 1 and problem.past_lengths.min() >= 0
    if problem.sliding_window:
        assert problem.present_length == problem.past_capacity >= 4
    else:
        assert problem.total_lengths.max() <= problem.total_sequence_length <= problem.present_length
    assert 0 <= problem.query_lengths.min() <= problem.query_lengths.max() <= problem.sequence_length
    if problem.phase is not Phase.FIRST_PROMPT:
        assert (problem.past_lengths + problem.query_lengths == problem.total_lengths).all()
    assert problem.positions is None or 0 <= problem.positions.min() <= problem.positions.max() < 2**31


@pytest.mark.parametrize("name", Inputs._fields)
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_an_input_of_any_rank_gives_a_problem_or_invalid_argument(name: str, kind: int) -> None:
    attributes, inputs = broken_call({"batch": 2, "rotary": 1, "bits": 8}, KINDS[kind])
    dtypes = {"position_ids": "i8", "past_key": "i1", "past_value": "i1", "seqlens_k": "i4"}
    dtypes |= {"total_sequence_length": "i4", "query_seqlens": "i4"}
    for shape in [(), (0,), (1,), (2,), (0, 0), (1, 0), (2, 0), (0, 1, 0), (1, 1, 1, 1), (2, 0, 0, 0), (0,) * 6]:
        array = np.zeros(shape, dtypes.get(name, "f4"))
        try:
            validate(Attributes(**attributes), Inputs(**inputs | {name: array}))
        except InvalidArgument as error:
            assert str(error)
