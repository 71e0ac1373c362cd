"""The short way through validation says what the long way says, or nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_calls import CACHES, make_call

from gqa_tvm import GroupQueryAttention, InvalidArgument
from gqa_tvm.attributes import Attributes
from gqa_tvm.validation import Inputs, validate
from gqa_tvm.validation_next_token import next_token


def _inputs(inputs):
    return Inputs(**{name: inputs.get(name) for name in Inputs._fields})


def _decode_call(cache, batch, extras):
    attributes, inputs = make_call(cache, batch=batch, total=12, capacity=16, head_size=8)
    if "rotary" in extras:
        attributes["do_rotary"] = 1
        inputs["cos_cache"] = inputs["sin_cache"] = np.ones((14, 4), np.float32)
    if "bias" in extras:
        inputs["attention_bias"] = np.zeros((1, 1, 1, 12), np.float32)
    if "shared" in extras:
        inputs["key"] = inputs["value"] = np.zeros((batch, 0, 16), np.float32)
    return attributes, inputs


def _same(a, b):
    return a._fields == b._fields and all(
        np.array_equal(x, y) and type(x) is type(y) for x, y in zip(a, b, strict=True)
    )


numbers = st.integers(-2, 18)


@settings(max_examples=300, deadline=None)
@given(
    cache=st.sampled_from(sorted(CACHES)),
    extras=st.sets(st.sampled_from(["rotary", "bias", "shared"])),
    total=numbers,
    seqlens=st.lists(numbers, min_size=1, max_size=3),
    scale=st.sampled_from([0.5, 0.0, -1.0, np.inf, np.nan, 1e30]),
)
def test_agrees_with_validate(cache, extras, total, seqlens, scale):
    attributes, inputs = _decode_call(cache, len(seqlens), extras)
    known_attributes = Attributes(**attributes)
    known = validate(known_attributes, _inputs(inputs))
    inputs["total_sequence_length"] = np.array([total], np.int32)
    inputs["seqlens_k"] = np.array(seqlens, np.int32)
    if "k_scale" in inputs:
        inputs["k_scale"].flat[0] = scale
    short = next_token(known_attributes, _inputs(inputs), known)
    try:
        long = validate(known_attributes, _inputs(inputs))
    except InvalidArgument:
        assert short is None
    else:
        assert short is None or _same(short, long)


@pytest.mark.parametrize("extras", [(), ("rotary",), ("bias",), ("shared",)])
@pytest.mark.parametrize("batch", [1, 3])
def test_is_taken_for_decode_steps(batch, extras):
    attributes, inputs = _decode_call("i8-channel", batch, extras)
    attributes = Attributes(**attributes)
    known = validate(attributes, _inputs(inputs))
    assert next_token(attributes, _inputs(inputs), known) is not None


def test_a_signature_once_valid_does_not_let_others_in():
    attributes, inputs = _decode_call("f32", 1, ())
    op = GroupQueryAttention(**attributes)
    wanted = op(**inputs).output
    np.testing.assert_array_equal(op(**inputs).output, wanted)
    with pytest.raises(InvalidArgument, match="exceeds total_sequence_length"):
        op(**{**inputs, "seqlens_k": np.array([13], np.int32)})
    with pytest.raises(InvalidArgument, match="MaskedArray"):
        op(**{**inputs, "query": np.ma.masked_array(inputs["query"])})
    with pytest.raises(InvalidArgument):
        op(**{**inputs, "query": inputs["query"].astype(">f4")})
    # An operator that met the wrong call first is not spoilt by it.
    op = GroupQueryAttention(**attributes)
    with pytest.raises(InvalidArgument):
        op(**{**inputs, "seqlens_k": np.array([13], np.int32)})
    np.testing.assert_array_equal(op(**inputs).output, wanted)


def test_many_signatures_are_forgotten_in_time():
    attributes, inputs = make_call("f32", total=1, capacity=200, head_size=8)
    op = GroupQueryAttention(**attributes)
    for capacity in range(20, 150):
        inputs["past_key"] = inputs["past_value"] = np.zeros((1, 2, capacity, 8), np.float32)
        op(**inputs)
    assert len(op._prepared) <= 64
