"""Validation: our own rules, the order of rules, what is accepted and what it means."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ort_errors import broken_call, ort_error, valid_call

from gqa_tvm.attributes import Attributes
from gqa_tvm.errors import InvalidArgument
from gqa_tvm.validation import Inputs, Phase, Problem, validate

Call = dict[str, Any]


def f32(*shape: int) -> np.ndarray:
    """Float32 zeros."""
    return np.zeros(shape, np.float32)


def i32(*values: int) -> np.ndarray:
    """An int32 vector."""
    return np.array(values, np.int32)


def run(call: Call, **changes: Any) -> Problem:
    """Validate a valid call with some attributes and inputs replaced."""
    attributes, inputs = broken_call(call, changes)
    return validate(Attributes(**attributes), Inputs(**inputs))


INT8: Call = {"bits": 8}
ROTARY: Call = {"rotary": 1}
SCALES = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "v_scale": f32(16)}

# onnxruntime accepts, truncates, or dies of these
OWN: list[tuple[Call, Call, str]] = [
    ({}, {"query": None}, "Input 'query' is required, got None."),
    ({}, {"seqlens_k": None}, "Input 'seqlens_k' is required, got None."),
    ({}, {"total_sequence_length": None}, "Input 'total_sequence_length' is required, got None."),
    ({}, {"query": [[[1.0]]]}, "Input 'query' must be a NumPy array, got list."),
    ({}, {"total_sequence_length": 5}, "'total_sequence_length' must be a NumPy array, got int."),
    ({}, {"head_sink": "sink"}, "Input 'head_sink' must be a NumPy array, got str."),
    ({}, {"query": np.zeros((1, 1, 32), np.float16)}, "float16 query is not supported yet"),
    ({}, {"query": np.zeros((1, 1, 32), ml_dtypes.bfloat16)}, "bfloat16 query is not supported ye"),
    ({}, {"query": np.zeros((1, 1, 32))}, "Input 'query' must be float32, got float64."),
    ({}, {"query": f32(1, 1, 32).astype(">f4")}, "Input 'query' must be float32, got >f4."),
    ({}, {"value": np.zeros((1, 1, 16), object)}, "Input 'value' must be float32, got object."),
    ({}, {"past_key": np.zeros(3, "U2")}, "'past_key' must be float32 or int8 or uint8, got <U2."),
    ({}, {"seqlens_k": np.array([4])}, "Input 'seqlens_k' must be int32, got int64."),
    ({}, {"total_sequence_length": np.array([5])}, "must be int32, got int64."),
    ({}, {"position_ids": i32(1)[None]}, "Input 'position_ids' must be int64, got int32."),
    (INT8, {"k_scale": np.ones(1)}, "Input 'k_scale' must be float32, got float64."),
    (INT8, {"past_value": np.zeros((1, 1, 8, 16), np.uint8)}, "same type, got int8 and uint8."),
    (INT8, {"past_key": f32(1, 1, 8, 16), "past_value": f32(1, 1, 8, 16)}, "int8 when kv_cache_bi"),
    ({}, {"query_seqlens": i32(1)}, "query_seqlens is not supported yet."),
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
        run(call, **changes)
    assert words in str(caught.value)


# broken inputs of one call in onnxruntime's order
ORDER: list[tuple[Call, str]] = [
    ({"k_scale": None}, "k_scale must be provided"),
    ({"v_scale": None}, "v_scale must be provided"),
    ({"k_norm_weight": f32(16)}, "q_norm_weight / k_norm_weight"),
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


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_earlier_of_two_faults_is_reported(first: int) -> None:
    earlier, words = ORDER[first]
    for later, _ in ORDER[first + 1 :]:
        if not earlier.keys() & later.keys():
            call = {"bits": 8, "rotary": 1}
            with pytest.raises(InvalidArgument) as caught:
                run(call, **earlier, **later)
            assert words in str(caught.value)
            assert words in ort_error(*broken_call(call, earlier | later))


def test_seqlens_k_and_total_of_every_accepted_shape() -> None:
    for shape in ((2,), (2, 1), (1, 2), (1, 2, 1)):
        for total in (np.array(5, np.int32), i32(5)):
            lengths = i32(2, 4).reshape(shape)
            problem = run({"batch": 2}, seqlens_k=lengths, total_sequence_length=total)
            assert problem.total_lengths.tolist() == [3, 5]
            assert problem.past_lengths.tolist() == [2, 4]
            assert problem.total_lengths.dtype == problem.past_lengths.dtype == np.int32


def test_phases_and_lengths() -> None:
    decode = run({})
    assert decode.phase is Phase.TOKEN_GENERATION
    assert (decode.present_length, decode.past_capacity, decode.total_sequence_length) == (8, 8, 5)
    assert (decode.head_size, decode.packed_head_size, decode.group_size) == (16, 16, 2)
    chunk = run({"length": 3})
    assert (chunk.phase, chunk.past_lengths.tolist()) == (Phase.CHUNK, [2])
    prompt = run({"length": 5, "batch": 2}, seqlens_k=i32(4, 1))
    assert (prompt.phase, prompt.past_lengths.tolist()) == (Phase.FIRST_PROMPT, [0, 0])
    assert prompt.total_lengths.tolist() == [5, 2]
    growing = run({"total": 9})
    assert (growing.present_length, growing.past_lengths.tolist()) == (9, [8])


def test_a_prompt_without_past_equals_one_with_an_empty_past() -> None:
    for changes in ({}, {"past_key": None, "past_value": None}):
        for bits in (0, 8, 4):
            problem = run({"length": 5, "capacity": 0, "bits": bits}, **changes)
            assert (problem.past_capacity, problem.present_length) == (0, 5)
            assert problem.packed_head_size == (8 if bits == 4 else 16)


def test_shared_kv_appends_nothing() -> None:
    problem = run({}, key=f32(1, 0, 16), value=f32(1, 0, 16))
    assert (problem.kv_sequence_length, problem.past_lengths.tolist()) == (0, [4])
    assert run({}, key=None, value=None, query=f32(1, 1, 64)).packed_qkv


@pytest.mark.parametrize("head_size", [1, 3, 7, 10, 46, 80])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_head_sizes_and_rotary_widths_ort_refuses(head_size: int, bits: int) -> None:
    packed = (head_size + 1) // 2 if bits == 4 else head_size
    past = valid_call(bits=bits)[1]["past_key"][..., :1].repeat(packed, axis=3)
    changes = {"query": f32(1, 1, 2 * head_size), "past_key": past, "past_value": past}
    changes |= {"key": f32(1, 1, head_size), "value": f32(1, 1, head_size)}
    tables = f32(5, head_size // 2)
    problem = run({"bits": bits, "rotary": 1}, **changes, cos_cache=tables, sin_cache=tables)
    assert (problem.head_size, problem.packed_head_size) == (head_size, packed)
    assert problem.rotary_dim == 2 * (head_size // 2)
    assert (problem.positions is None) == (head_size == 1)


def positions_of(call: Call, **changes: Any) -> list[list[int]]:
    """Rotary positions of a call, checked for type and layout."""
    positions = run(call, **changes).positions
    assert positions is not None and positions.dtype == np.int64
    assert positions.flags.c_contiguous and positions.flags.aligned
    return positions.tolist()  # type: ignore[no-any-return]


def test_rotary_positions() -> None:
    assert run({}, cos_cache=f32(5, 8), sin_cache=f32(5, 8)).positions is None
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
    run({}, position_ids=np.array([[99]]))
    run({}, k_scale=np.array([np.nan], "f4"), v_scale=f32(3))
    run({"bits": 8}, k_scale=f32(1), v_scale=np.array([[[-1]]], "f4"))


def test_bias_sink_and_scales_of_accepted_shapes() -> None:
    for batch, heads in ((1, 1), (2, 1), (1, 2), (2, 2)):
        run({"batch": 2}, attention_bias=f32(batch, heads, 1, 5), head_sink=f32(2))
    for shape in ((16,), (1, 1, 1, 16), (16, 1), (2, 8)):
        run(INT8, **SCALES | {"k_scale": f32(*shape)})
    run(INT8, k_scale=f32(), v_scale=f32(1, 1))


def test_results_do_not_alias_inputs_and_inputs_stay_as_they_were() -> None:
    attributes, inputs = valid_call(rotary=1, batch=2)
    inputs["position_ids"] = np.array([[1], [2]])
    before = {name: None if x is None else x.copy() for name, x in inputs.items()}
    for array in inputs.values():
        if array is not None:
            array.flags.writeable = False
    problem = validate(Attributes(**attributes), Inputs(**inputs))
    assert problem.positions is not None
    for own in (problem.total_lengths, problem.past_lengths, problem.positions):
        own[:] = -1
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, before[name])


INTEGERS = [-(2**31), -1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 2**31 - 1]
DTYPES = ["f4", "f4", "f4", "i4", "i4", "i8", "i1", "u1", "f8", "f2", ">f4", "U1", "O", "?"]


@st.composite
def junk(draw: st.DrawFn) -> Any:
    """An array of any shape and type filled with one edge value, or no array at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([None, 5, 1.5, "text", [1], object()]))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 32, 64]), max_size=5)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    value = draw(st.sampled_from([*INTEGERS, 2**62, -(2**63)] if dtype.kind == "i" else [0, 1]))
    return np.broadcast_to(np.array(value).astype(dtype), shape)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([0, 1, 2]),
    st.sampled_from([0, 1, 3, 5]),
    st.sampled_from([0, 8, 4]),
    st.sampled_from([0, 1]),
    st.dictionaries(st.sampled_from(Inputs._fields), junk(), max_size=3),
    st.lists(st.sampled_from(INTEGERS), min_size=2, max_size=2),
)
def test_malformed_calls_give_a_problem_or_invalid_argument(
    batch: int, length: int, bits: int, rotary: int, broken: Call, lengths: list[int]
) -> None:
    attributes, inputs = valid_call(batch, length, bits=bits, rotary=rotary)
    inputs["seqlens_k"] = i32(*lengths[:batch])
    try:
        problem = validate(Attributes(**attributes), Inputs(**inputs | broken))
    except InvalidArgument as error:
        assert str(error)
        return
    assert 1 <= problem.total_lengths.min() <= problem.total_lengths.max()
    assert problem.total_lengths.max() <= problem.total_sequence_length <= problem.present_length
    assert problem.past_lengths.min() >= 0
    assert problem.positions is None or problem.positions.min() >= 0
