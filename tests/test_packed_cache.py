"""Packed caches: as BNSH ones to the bit where those multiply integers, with every feature."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_calls import FLOATS, TOLERANCES, add_rotary, assert_close, expected
from packed_calls import assert_packed_bytes, needs_vnni, packed_call, run_bnsh, run_packed
from query_kinds import QUERIES

from gqa_tvm import GroupQueryAttention, KVCache, pack_kv_cache, unpack_kv_cache

CACHES = ("i8", "i4", "i8-channel", "i4-channel")
# Where BNSH multiplies in float32, or with block sizes that tuning found.
ROUNDING = 2e-6
SLOW_I4 = pytest.param("i4", marks=pytest.mark.slow)


def check_alone(attributes, inputs, tolerance=1e-5, **keywords):
    """Compare with the reference; returns the packed result."""
    packed, wanted = run_packed(attributes, inputs, **keywords), expected(attributes, inputs, in_place=True)
    assert_packed_bytes(packed, wanted)
    assert_close(packed.output.astype(np.float32), wanted.output.astype(np.float32), tolerance)
    return packed


def check(attributes, inputs, exact=False, **keywords):
    """Compare with BNSH, too."""
    packed, bnsh = check_alone(attributes, inputs, **keywords), run_bnsh(attributes, inputs, **keywords)
    assert_packed_bytes(packed, bnsh)
    if exact:
        np.testing.assert_array_equal(packed.output, bnsh.output)
    else:
        assert_close(packed.output, bnsh.output, ROUNDING)
    return packed


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.sampled_from([16, 32, 48, 128])),
    st.sampled_from([np.int8, np.uint8]),
)
def test_packing_is_a_permutation(shape, dtype):
    rng = np.random.default_rng(0)
    keys, values = (rng.integers(0, 256, shape).astype(np.uint8).view(dtype) for _ in range(2))
    packed = pack_kv_cache(keys, values)
    for got, wanted in zip(unpack_kv_cache(*packed, length=shape[2]), (keys, values), strict=True):
        np.testing.assert_array_equal(got, wanted)
    t, c = rng.integers(shape[2]), rng.integers(shape[3])
    np.testing.assert_array_equal(packed[0][:, :, t // 16, c // 4, t % 16, c % 4], keys[:, :, t, c])
    np.testing.assert_array_equal(packed[1][:, :, t // 4, c, t % 4], values[:, :, t, c])
    for array, rest in zip(packed, unpack_kv_cache(*packed), strict=True):
        assert array.ctypes.data % 64 == 0 and not rest[:, :, shape[2] :].any()


@needs_vnni
@pytest.mark.parametrize("cache", ["i8", SLOW_I4])
def test_decode_at_every_length(cache):
    """The rest of the last group of keys holds codes that no result may show, and that must stay."""
    for total in (*range(1, 36), 63, 64, 65):
        attributes, inputs = packed_call(cache, total, seed=total)
        # The sink sees scores themselves, not only their differences.
        attributes["smooth_softmax"] = 1
        check(attributes, inputs)


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_decode_of_every_format_and_group(cache, group):
    attributes, inputs = packed_call(cache, 200, heads=2 * group, head_size=128)
    attributes["smooth_softmax"] = 1
    inputs["query"] *= 0.05
    check(attributes, inputs)


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), [("i8", 16), ("i8", 80), ("i4", 96), ("i4", 31)])
def test_head_sizes(cache, head_size):
    for tokens in (1, 30):
        attributes, inputs = packed_call(cache, 70, tokens=tokens, heads=2, kv_heads=1, head_size=head_size)
        check_alone(attributes, inputs)


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), [("i8", 64), ("i4-channel", 128)])
@pytest.mark.parametrize(("past", "tokens"), [(0, 150), (37, 60), (3, 20), (128, 17)])
def test_prefill_is_that_of_bnsh_to_the_bit(cache, head_size, past, tokens):
    attributes, inputs = packed_call(cache, past + tokens, tokens=tokens, head_size=head_size)
    check(attributes, inputs, exact=True)


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), [("i8", 64), ("i8-channel", 192), ("i4-channel", 256)])
@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (3, 1), (8, 1), (2, 3)])
def test_decode_is_that_of_bnsh_to_the_bit(cache, head_size, group, tokens):
    shape = {"tokens": tokens, "heads": group, "kv_heads": 1, "head_size": head_size}
    attributes, inputs = packed_call(cache, 2100, **shape)
    attributes["smooth_softmax"] = 1
    inputs["query"] *= 0.05
    check(attributes, inputs, exact=True)


def _rotary(attributes, inputs):
    add_rotary(attributes, inputs, interleaved=1, rotary_dim=32)


def _bias(attributes, inputs):
    shape = (1, 1, inputs["query"].shape[1], int(inputs["total_sequence_length"].item()))
    inputs["attention_bias"] = np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def _norms(attributes, inputs):
    for name in ("q_norm_weight", "k_norm_weight"):
        inputs[name] = np.linspace(0.5, 2, 64, dtype=np.float32)


def _sinks(attributes, inputs):
    inputs["head_sink"] = np.array([0.5, -1, 2, 0], np.float32)


def _shared(attributes, inputs):
    inputs["key"], inputs["value"] = inputs["key"][:, :0], inputs["value"][:, :0]


def _packed_qkv(attributes, inputs):
    inputs["query"] = np.concatenate([inputs[name] for name in ("query", "key", "value")], axis=2)
    inputs["key"] = inputs["value"] = None


FEATURES = {
    "rotary": _rotary,
    "norms": _norms,
    "bias": _bias,
    "sinks": _sinks,
    "shared": _shared,
    "packed qkv": _packed_qkv,
    "softcap": lambda attributes, inputs: attributes.update(softcap=2.0),
    "window": lambda attributes, inputs: attributes.update(local_window_size=21),
    "not causal": lambda attributes, inputs: attributes.update(causal=0),
}


@needs_vnni
@pytest.mark.parametrize("tokens", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 40))])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, tokens):
    attributes, inputs = packed_call("i8", 75, tokens=tokens)
    FEATURES[feature](attributes, inputs)
    check(attributes, inputs, exact=tokens == 40)


@needs_vnni
def test_entries_of_different_lengths():
    attributes, inputs = packed_call("i8", 75, batch=3)
    inputs["seqlens_k"] = np.array([74, 15, 0], np.int32)
    result = check(attributes, inputs)
    for b in range(3):
        alone = {n: a[b : b + 1] if a.shape[0] == 3 else a for n, a in inputs.items()}
        np.testing.assert_array_equal(run_packed(attributes, alone).output[0], result.output[b])


@needs_vnni
@pytest.mark.slow
def test_padded_chunks():
    attributes, inputs = packed_call("i8", 75, tokens=20, batch=3, capacity=96)
    inputs["seqlens_k"] = np.array([74, 33, 4], np.int32)
    inputs["query_seqlens"] = np.array([20, 1, 0], np.int32)
    check(attributes, inputs, exact=True)


@needs_vnni
def test_chunks_of_keys_and_threads():
    attributes, inputs = packed_call("i8", 3000, batch=2)
    inputs["seqlens_k"] = np.array([2999, 1030], np.int32)
    first = check(attributes, inputs, num_threads=1).output
    for threads in (2, 5):
        np.testing.assert_array_equal(run_packed(attributes, inputs, num_threads=threads).output, first)
    check(attributes, inputs, strategy="flash")


@needs_vnni
@pytest.mark.slow
def test_half_precision(dtype="f16"):
    for tokens in (1, 30):
        attributes, inputs = packed_call("i8", 70, dtype=dtype, tokens=tokens)
        assert inputs["query"].dtype == FLOATS[dtype]
        check_alone(attributes, inputs, tolerance=TOLERANCES[dtype])


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"precision": "balanced"}, 1),
        ({"precision": "fast"}, 1),
        ({"approximate_qk": True}, 1),
        ({"precision": "balanced"}, 30),
        ({"approximate_qk": True}, 30),
    ],
    ids=str,
)
def test_lower_precision(options, tokens):
    attributes, inputs = packed_call("i8", 200, tokens=tokens)
    packed, bnsh = (run(attributes, inputs, **options).output for run in (run_packed, run_bnsh))
    # Where a score rounds otherwise, so may a probability of 16 bits.
    assert_close(packed, bnsh, 2.0**-16)
    assert not np.array_equal(packed, run_packed(attributes, inputs).output)


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), [("i8", 256), ("i4", 512)])
def test_sums_at_their_bounds_do_not_overflow(cache, head_size):
    """Keys of the least code win, whose values are the largest code, as in `test_split_integer`; a lane sums a head."""
    for tokens in (1, 20):
        attributes, inputs = packed_call(cache, 200, tokens=tokens, heads=1, kv_heads=1, head_size=head_size)
        least, largest = (-128, 127) if cache == "i8" else (0, 0xFF)
        for name, winning, losing in (("past_key", least, largest), ("past_value", largest, least)):
            inputs[name][:, :, ::2], inputs[name][:, :, 1::2] = winning, losing
        attributes["scale"], inputs["query"][:], inputs["k_scale"][:] = 1.0, -1.98, 1.0
        inputs["key"][:], inputs["value"][:] = np.float32(-1e6), np.float32(1e6)
        wanted = (127 if cache == "i8" else 7) * inputs["v_scale"][0]
        np.testing.assert_allclose(run_packed(attributes, inputs).output, wanted, rtol=3e-7)


class PageEnd:
    """Memory of so many bytes before a page that nothing may touch."""

    def __init__(self, nbytes):
        size = mmap.PAGESIZE
        pages = -(-nbytes // size)
        self._memory = mmap.mmap(-1, (pages + 1) * size)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        no_access = 0
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + pages * size), size, no_access) == 0
        self.offset = pages * size - nbytes

    def hold(self, array):
        held = np.ndarray(array.shape, array.dtype, self._memory, self.offset)
        held[...] = array
        return held


@needs_vnni
@pytest.mark.parametrize("tokens", [1, 20])
def test_nothing_beyond_the_last_group_is_touched(tokens):
    attributes, inputs = packed_call("i8", 33 + tokens, tokens=tokens, kv_heads=1, heads=2)
    wanted = run_packed(attributes, inputs).output
    past = pack_kv_cache(inputs["past_key"], inputs["past_value"])
    pages = [PageEnd(array.nbytes) for array in past]
    for name, page, array in zip(("key", "value"), pages, past, strict=True):
        inputs[f"past_{name}"] = inputs[f"present_{name}"] = page.hold(array)
    np.testing.assert_array_equal(GroupQueryAttention(**attributes, kv_layout="packed")(**inputs).output, wanted)


def _in_slots(array, step):
    """The array as every other head of memory that starts at an odd byte; step -1: entries in reverse order."""
    b, n, *rest = array.shape
    memory = np.zeros(1 + 2 * array.nbytes, np.uint8)
    slots = memory[1:].view(array.dtype).reshape(b, 2 * n, *rest)[::step, ::2]
    slots[...] = array
    return slots


@needs_vnni
@pytest.mark.parametrize("step", [1, -1])
def test_caches_in_memory_of_any_kind(step):
    attributes, inputs = packed_call("i8", 40, batch=2)
    wanted = run_packed(attributes, inputs)
    for name in ("key", "value"):
        array = pack_kv_cache(inputs["past_key"], inputs["past_value"])[name == "value"]
        inputs[f"present_{name}"] = _in_slots(array, step)
    inputs["past_key"], inputs["past_value"] = inputs["present_key"], inputs["present_value"]
    got = GroupQueryAttention(**attributes, kv_layout="packed")(**inputs)
    np.testing.assert_array_equal(got.output, wanted.output)
    for name in ("key", "value"):
        assert getattr(got, f"present_{name}") is inputs[f"present_{name}"]
        np.testing.assert_array_equal(inputs[f"past_{name}"], getattr(wanted, f"present_{name}"))


@needs_vnni
@pytest.mark.parametrize("kind", QUERIES)
def test_errors_are_those_of_float32(kind):
    worst = np.zeros(2)
    for seed in range(3):
        attributes, inputs = packed_call("i8-channel", 300, seed=seed)
        QUERIES[kind](inputs)
        exact = expected(attributes, inputs).output.astype(np.float64)
        single = GroupQueryAttention(**attributes, target="x86-avx512")(**inputs).output
        outputs = run_packed(attributes, inputs).output, single
        worst = np.maximum(worst, [np.abs(output - exact).max() for output in outputs])
    assert worst[0] <= 2 * worst[1] + 2e-7 * np.abs(exact).max(), worst


@needs_vnni
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_query_that_is_not_finite_gives_nan_in_its_rows_alone(tokens):
    attributes, inputs = packed_call("i8", 75, tokens=tokens)
    wanted = run_packed(attributes, inputs).output.reshape(tokens, 4, 64)
    inputs["query"][0, 0, 3] = np.inf
    output = run_packed(attributes, inputs).output.reshape(tokens, 4, 64)
    assert np.isnan(output[0, 0]).all()
    output[0, 0] = wanted[0, 0]
    np.testing.assert_array_equal(output, wanted)


@needs_vnni
def test_a_first_prompt_makes_its_cache():
    attributes, inputs = packed_call("i8", 40, tokens=40)
    inputs["past_key"] = inputs["past_value"] = None
    packed = run_packed(attributes, inputs)
    wanted = expected(attributes, inputs)
    assert packed.present_key.shape == (1, 2, 3, 16, 16, 4) and packed.present_value.shape == (1, 2, 12, 64, 4)
    for got, cache in zip(
        unpack_kv_cache(packed.present_key, packed.present_value),
        (wanted.present_key, wanted.present_value),
        strict=True,
    ):
        np.testing.assert_array_equal(got[:, :, :40], cache)
        assert not got[:, :, 40:].any()
    assert_close(packed.output, wanted.output)


@needs_vnni
@pytest.mark.slow
def test_a_growing_cache():
    """A prompt and steps through KVCache, which grows twice, as over BNSH."""
    rng = np.random.default_rng(3)
    attributes = {"num_heads": 4, "kv_num_heads": 2, "k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    attributes["kv_cache_bit_width"] = 8
    layouts = ("packed", "bnsh")
    caches = [KVCache(2, 2, 10, 64, 8, k_scale=0.03, v_scale=0.03, kv_layout=layout) for layout in layouts]
    ops = [GroupQueryAttention(**attributes, kv_layout=layout) for layout in layouts]
    for counts in ([9, 5], *[[1, 1]] * 9, [20, 3], 1):
        tokens = counts if isinstance(counts, int) else max(counts)
        q, k, v = (rng.standard_normal((2, tokens, n * 64)).astype(np.float32) for n in (4, 2, 2))
        outputs = []
        for op, cache in zip(ops, caches, strict=True):
            given = counts if isinstance(counts, int) else np.array(counts)
            outputs.append(op(q, k, v, **cache.arguments(given)).output)
            cache.advance()
        assert_close(*outputs, ROUNDING)
    assert caches[0].capacity == 64 and caches[0].key.shape == (2, 2, 4, 16, 16, 4)
    caches[0].rewind(2)
    assert caches[0].length.tolist() == [37, 16]
