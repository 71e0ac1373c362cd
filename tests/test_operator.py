"""The operator's own promises: strategies agree, threads do not matter, memory is treated with care."""

from __future__ import annotations

import numpy as np
import pytest
from operator_calls import CACHES, assert_close, expected, make_call

from gqa_tvm import GroupQueryAttention, InvalidArgument
from gqa_tvm.targets import FALLBACKS, architecture, missing_features


def _copy(inputs):
    return {name: value.copy() for name, value in inputs.items()}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("tokens,total", [(1, 63), (1, 64), (1, 65), (1, 1100), (7, 70), (40, 40), (40, 129)])
def test_strategies_agree_with_the_reference(cache, tokens, total):
    attributes, inputs = make_call(cache, tokens=tokens, total=total)
    wanted = expected(attributes, inputs)
    for strategy in ("naive", "flash", "flash_decoding"):
        got = GroupQueryAttention(**attributes, strategy=strategy)(**inputs)
        assert_close(got.output, wanted.output)
        np.testing.assert_array_equal(got.present_key, wanted.present_key)
        np.testing.assert_array_equal(got.present_value, wanted.present_value)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["f32", "i8-channel", "i4-channel"])
@pytest.mark.parametrize("head_size", [1, 5, 8, 40, 80, 128])
def test_head_sizes(cache, head_size):
    for tokens, total in ((1, 200), (50, 130)):
        attributes, inputs = make_call(cache, tokens=tokens, total=total, head_size=head_size)
        wanted = expected(attributes, inputs)
        for strategy in ("naive", "auto"):
            got = GroupQueryAttention(**attributes, strategy=strategy)(**inputs)
            assert_close(got.output, wanted.output)
            np.testing.assert_array_equal(got.present_key, wanted.present_key)


@pytest.mark.slow
@pytest.mark.parametrize("heads,kv_heads", [(3, 3), (4, 2), (6, 2), (7, 1), (9, 1), (28, 4)])  # B73
@pytest.mark.parametrize("cache", ["f32", "i8", "i4"])
def test_group_sizes(cache, heads, kv_heads):
    for tokens, total in ((1, 300), (5, 90)):
        attributes, inputs = make_call(cache, tokens=tokens, total=total, heads=heads, kv_heads=kv_heads)
        got = GroupQueryAttention(**attributes)(**inputs)
        assert_close(got.output, expected(attributes, inputs).output)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["generic", "x86-avx2", "x86-avx512"])
@pytest.mark.parametrize("cache", ["f32", "i8-channel", "i4-channel"])
def test_targets_give_the_same_cache_and_result(target, cache):  # B53
    if target not in FALLBACKS[architecture()] or missing_features(target):
        pytest.skip(f"this CPU cannot run {target}")
    for tokens, total in ((1, 131), (30, 131)):
        attributes, inputs = make_call(cache, tokens=tokens, total=total, head_size=80)
        wanted = expected(attributes, inputs)
        for strategy in ("naive", "auto"):
            op = GroupQueryAttention(**attributes, target=target, strategy=strategy)
            got = op(**inputs)
            assert op.last_plan.target == target
            assert_close(got.output, wanted.output)
            np.testing.assert_array_equal(got.present_key, wanted.present_key)
            np.testing.assert_array_equal(got.present_value, wanted.present_value)


@pytest.mark.parametrize("tokens,total", [(1, 3000), (100, 300)])
def test_results_do_not_depend_on_threads_or_batch_mates(tokens, total):  # B111
    attributes, inputs = make_call("i8", tokens=tokens, total=total)
    results = [GroupQueryAttention(**attributes, num_threads=threads)(**inputs).output for threads in (1, 2, 5, 2)]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
    if tokens == 1:
        both = _copy(inputs)
        for name in ("query", "key", "value", "past_key", "past_value", "seqlens_k"):
            both[name] = np.concatenate([both[name]] * 2)
        both["seqlens_k"][1] = 17
        np.testing.assert_array_equal(GroupQueryAttention(**attributes)(**both).output[:1], results[0])


@pytest.mark.parametrize("cache", CACHES)
def test_in_place_changes_only_the_new_rows(cache):  # B80
    attributes, inputs = make_call(cache, total=20, capacity=32)
    before = _copy(inputs)
    got = GroupQueryAttention(**attributes)(
        **inputs, present_key=inputs["past_key"], present_value=inputs["past_value"]
    )
    assert got.present_key is inputs["past_key"] and got.present_value is inputs["past_value"]
    for name in ("past_key", "past_value"):
        kept = np.delete(inputs[name], 19, axis=2)
        np.testing.assert_array_equal(kept, np.delete(before[name], 19, axis=2))
        assert (inputs[name][:, :, 19] != before[name][:, :, 19]).any()
    for name in set(inputs) - {"past_key", "past_value"}:
        np.testing.assert_array_equal(inputs[name], before[name])  # B33


def test_garbage_beyond_the_valid_length_is_never_used():  # B50
    attributes, inputs = make_call("f32", total=20, capacity=64)
    wanted = expected(attributes, inputs)
    for name in ("past_key", "past_value"):
        inputs[name][:, :, 19:] = np.nan
    for strategy in ("naive", "flash", "flash_decoding"):
        got = GroupQueryAttention(**attributes, strategy=strategy)(**inputs)
        assert_close(got.output, wanted.output)


def test_strided_misaligned_and_read_only_inputs():  # B99, B101
    attributes, inputs = make_call("i8-channel", tokens=3, total=30)
    wanted = GroupQueryAttention(**attributes)(**inputs)
    odd = {}
    for name, value in inputs.items():
        raw = np.zeros(value.nbytes + 1, np.uint8)
        moved = raw[1:].view(value.dtype).reshape(value.shape)
        moved[...] = value
        moved.flags.writeable = False
        odd[name] = moved
    wide = np.zeros((*inputs["query"].shape[:2], inputs["query"].shape[2] * 2), np.float32)
    wide[..., ::2] = inputs["query"]
    odd["query"] = wide[..., ::2]
    odd["past_key"] = inputs["past_key"].transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    got = GroupQueryAttention(**attributes)(**odd)
    np.testing.assert_array_equal(got.output, wanted.output)
    np.testing.assert_array_equal(got.present_key, wanted.present_key)


class _Tensor:
    """An array that shows nothing but DLPack, as tensors of other libraries do."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **arguments):
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_dlpack_inputs_are_read_and_written_in_place():
    attributes, inputs = make_call("i8", total=20)
    wanted = expected(attributes, inputs, in_place=True)
    tensors = {name: _Tensor(value) for name, value in inputs.items()}
    op = GroupQueryAttention(**attributes)
    got = op(**tensors, present_key=tensors["past_key"], present_value=tensors["past_value"])
    assert_close(got.output, wanted.output)
    np.testing.assert_array_equal(inputs["past_key"], wanted.present_key)
    np.testing.assert_array_equal(inputs["past_value"], wanted.present_value)


def test_a_call_that_raises_leaves_every_array_alone():
    attributes, inputs = make_call("i8", total=20)
    before = _copy(inputs)
    bad = dict(inputs, seqlens_k=np.array([99], np.int32))
    with pytest.raises(InvalidArgument, match="out of range"):
        GroupQueryAttention(**attributes)(**bad, present_key=inputs["past_key"], present_value=inputs["past_value"])
    with pytest.raises(InvalidArgument, match="present_key"):
        GroupQueryAttention(**attributes)(**inputs, present_key=np.zeros((1, 2, 3), np.int8))
    for name in inputs:
        np.testing.assert_array_equal(inputs[name], before[name])


def test_outputs_are_aligned_and_overlaps_refused():
    attributes, inputs = make_call("f32", total=20)
    got = GroupQueryAttention(**attributes)(**inputs)
    for array in (got.output, got.present_key, got.present_value):
        assert array.ctypes.data % 64 == 0
    shared = np.zeros_like(inputs["past_key"])
    with pytest.raises(InvalidArgument, match="share memory"):
        GroupQueryAttention(**attributes)(**inputs, present_key=shared, present_value=shared)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("smooth", [0, 1])
@pytest.mark.parametrize("strategy", ["naive", "flash", "flash_decoding"])
def test_fully_masked_rows_are_zeros(softcap, smooth, strategy):  # B44
    attributes, inputs = make_call("i8", total=20)
    bias = np.full((1, 1, 1, 20), -np.inf, np.float32)
    op = GroupQueryAttention(**attributes, softcap=softcap, smooth_softmax=smooth, strategy=strategy)
    assert not op(**inputs, attention_bias=bias).output.any()


@pytest.mark.parametrize("strategy", ["naive", "flash", "flash_decoding"])
def test_finite_masks_are_ordinary_numbers(strategy):
    attributes, inputs = make_call("f32", total=20)
    inputs["attention_bias"] = np.full((1, 1, 1, 20), np.finfo(np.float32).min, np.float32)
    got = GroupQueryAttention(**attributes, strategy=strategy)(**inputs)
    mean = got.present_value[0, :, :20].mean(axis=1).repeat(2, axis=0).reshape(1, 1, -1)
    assert_close(got.output, mean)


def test_plan_and_forced_strategies(monkeypatch):
    attributes, inputs = make_call("i8", total=2000)
    op = GroupQueryAttention(**attributes)
    op(**inputs)
    assert op.last_plan.strategy.value == "flash_decoding" and "keys" in op.last_plan.reason
    assert op.last_plan.kernels == ("append_f32_i8_h64", "flash_decode_f32_i8_h64_r2")
    with pytest.raises(InvalidArgument, match="output_qk"):
        GroupQueryAttention(**attributes, qk_output=1, strategy="flash")(**inputs)
    with pytest.raises(InvalidArgument, match="strategy must be one of"):
        GroupQueryAttention(**attributes, strategy="fast")
    monkeypatch.setenv("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")
    op = GroupQueryAttention(**attributes)
    op(**inputs)
    assert op.last_plan.strategy.value == "naive"


@pytest.mark.parametrize("shared", ["key", "value"])
@pytest.mark.parametrize("phase", ["prompt", "token", "chunk", "padded chunk", "sliding", "sliding staged"])
def test_only_one_of_key_and_value_in_place(phase, shared):
    tokens = {"token": 1, "sliding": 1}.get(phase, 9)
    total = 9 if phase == "prompt" else 30
    attributes, inputs = make_call("i8", tokens=tokens, total=total, capacity=12 if "sliding" in phase else 40)
    if "sliding" in phase:
        attributes |= {"sliding_window_cache": 1, "local_window_size": 10}
    if phase == "padded chunk":
        inputs["query_seqlens"] = np.array([5], np.int32)
    wanted = {in_place: expected(attributes, inputs, in_place=in_place) for in_place in (False, True)}
    got = GroupQueryAttention(**attributes)(**inputs, **{f"present_{shared}": inputs[f"past_{shared}"]})
    assert_close(got.output, wanted[True].output)
    assert getattr(got, f"present_{shared}") is inputs[f"past_{shared}"]
    for side in ("key", "value"):
        name = f"present_{side}"
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted[side == shared], name))
