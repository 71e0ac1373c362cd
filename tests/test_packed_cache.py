"""Packed caches: as BNSH ones to the bit in prefill and to rounding in decode, with every feature."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_calls import FLOATS, TOLERANCES, add_rotary, assert_close, expected
from packed_calls import TARGET, assert_packed_bytes, needs_vnni, packed_call, run_bnsh, run_packed

from gqa_tvm import GroupQueryAttention, KVCache, build, pack_kv_cache, unpack_kv_cache
from gqa_tvm.build import library_kernels
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.library_file import read_manifest
from gqa_tvm.targets import FALLBACKS
from gqa_tvm.variants import family_variant

CACHES = ("i8", "i4", "i8-channel", "i4-channel")
# Decode over BNSH joins four sums of a head in float32, over a packed cache one.
ROUNDING = 2e-6


def check(attributes, inputs, exact=False, tolerance=1e-5, **keywords):
    """Compare with BNSH and the reference; returns the packed result."""
    packed, bnsh = (run(attributes, inputs, **keywords) for run in (run_packed, run_bnsh))
    assert_packed_bytes(packed, bnsh)
    wanted = expected(attributes, inputs).output.astype(np.float32)
    assert_close(packed.output.astype(np.float32), wanted, tolerance)
    if exact:
        np.testing.assert_array_equal(packed.output, bnsh.output)
    elif tolerance == 1e-5:
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
@pytest.mark.parametrize("cache", ["i8", "i4"])
def test_decode_at_every_length(cache):
    """The rest of the last group of keys holds codes that no result may show, and that must stay."""
    for total in (*range(1, 36), 63, 64, 65):
        attributes, inputs = packed_call(cache, total, seed=total)
        # The sink sees scores themselves, not only their differences.
        attributes["smooth_softmax"] = 1
        check(attributes, inputs)


@needs_vnni
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "group", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
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
        check(attributes, inputs)


@needs_vnni
@pytest.mark.parametrize(("cache", "head_size"), [("i8", 64), ("i4-channel", 128)])
@pytest.mark.parametrize(("past", "tokens"), [(0, 150), (37, 60), (3, 20), (128, 17)])
def test_prefill_is_that_of_bnsh_to_the_bit(cache, head_size, past, tokens):
    attributes, inputs = packed_call(cache, past + tokens, tokens=tokens, head_size=head_size)
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
@pytest.mark.parametrize("tokens", [1, 3, 40])
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
        check(attributes, inputs, tolerance=TOLERANCES[dtype])


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


def _attributes(**changes):
    attributes, _ = packed_call("i8", 20)
    return {**attributes, **changes}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_layout": "blocked"}, "kv_layout must be one of bnsh, packed"),
        ({"kv_cache_bit_width": 0, "k_quant_type": "NONE", "v_quant_type": "NONE"}, "a float cache has none"),
        ({"qk_output": 1}, "output_qk"),
        ({"strategy": "naive"}, "naive"),
        ({"sliding_window_cache": 1, "local_window_size": 4}, "sliding_window_cache"),
    ],
)
def test_operators_without_a_packed_form(options, words):
    with pytest.raises(ValueError, match=words):
        GroupQueryAttention(**{"kv_layout": "packed", **_attributes(**options)})


def test_disabled_flash_has_no_packed_form(monkeypatch):
    monkeypatch.setenv("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")
    with pytest.raises(ValueError, match="ORT_GQA_DISABLE_FLASH_ATTENTION"):
        GroupQueryAttention(**_attributes(), kv_layout="packed")


def _bad_call(change):
    attributes, inputs = packed_call("i8", 20)
    past = pack_kv_cache(inputs["past_key"], inputs["past_value"])
    for name, array in zip(("key", "value"), past, strict=True):
        inputs[f"past_{name}"] = inputs[f"present_{name}"] = array
    change(inputs)
    return attributes, inputs


def _bnsh_past(inputs):
    inputs["past_key"] = np.zeros((1, 2, 32, 64), np.int8)


def _gaps(inputs):
    inputs["past_key"] = inputs["present_key"] = np.zeros((1, 2, 2, 32, 16, 4), np.int8)[:, :, :, ::2]


def _copied_present(inputs):
    inputs["present_value"] = inputs["past_value"].copy()


def _no_room(inputs):
    inputs["total_sequence_length"], inputs["seqlens_k"] = np.array([33], np.int32), np.array([32], np.int32)


def _wrong_type(inputs):
    for name in ("key", "value"):
        inputs[f"past_{name}"] = inputs[f"present_{name}"] = inputs[f"past_{name}"].view(np.uint8)


@needs_vnni
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_bnsh_past, r"\[B, N_kv, C / 16, columns / 4, 16, 4\]"),
        (_gaps, "side by side"),
        (_copied_present, "present_value must be the array past_value"),
        (lambda inputs: inputs.pop("present_key"), "present_key must be the array past_key"),
        (_no_room, "no room for total_sequence_length 33"),
        (_wrong_type, "Tensor type mismatch"),
    ],
)
def test_calls_that_cannot_run_leave_everything_as_it_was(change, words):
    attributes, inputs = _bad_call(change)
    before = {name: array.copy() for name, array in inputs.items()}
    with pytest.raises(ValueError, match=words):
        GroupQueryAttention(**attributes, kv_layout="packed")(**inputs)
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, before[name])


def test_targets_without_dot_products_refuse():
    attributes, inputs = _bad_call(lambda inputs: None)
    with pytest.raises(ValueError, match="x86-avx512-vnni"):
        GroupQueryAttention(**attributes, kv_layout="packed", target="generic")(**inputs)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pack_kv_cache(np.zeros((1, 1, 4, 24), np.int8), np.zeros((1, 1, 4, 24), np.int8)), "multiple of 16"),
        (lambda: pack_kv_cache(np.zeros((1, 1, 4, 16), np.int8), np.zeros((1, 1, 5, 16), np.int8)), "same shape"),
        (lambda: pack_kv_cache(*[np.zeros((1, 1, 4, 16), np.float32)] * 2), "int8 or uint8"),
        (lambda: unpack_kv_cache(*[np.zeros((1, 1, 4, 16), np.int8)] * 2), "6 dimensions"),
        (lambda: KVCache(1, 1, 16, 64, kv_layout="packed"), "bits=8"),
        (lambda: KVCache(1, 1, 16, 40, 8, k_scale=1, v_scale=1, kv_layout="packed"), "multiple of 16"),
    ],
)
def test_what_cannot_be_packed(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("operation", ["append", "flash_decode", "flash_prefill"])
def test_kernel_names_have_the_layout(operation):
    spec = KernelSpec(operation, "f32", "i8", 64, 2, layout="packed")
    assert spec.name.endswith("_f32_i8_packed_h64_r2") and KernelSpec.parse(spec.name) == spec


def test_packed_kernels_of_a_library():
    """Only where they are asked for, of targets that have them; a BNSH kernel of the same sizes is there as well."""
    for target in FALLBACKS["x86-64"]:
        variant = family_variant(target, "x86-64")
        plain, both = (set(library_kernels(variant, [64], layout=layout)) for layout in ("", "packed"))
        packed = both - plain
        assert plain < both if target == TARGET else plain == both
        assert {spec.operation for spec in packed} <= {"append", "flash_decode", "flash_prefill"}
        assert {replace(spec, layout="") for spec in packed} <= plain and not any(s.is_float_cache for s in packed)


@needs_vnni
@pytest.mark.slow
def test_a_library_of_packed_kernels(tmp_path):
    names = ("append_f32_i8_packed_h64", "flash_decode_f32_i8_packed_h64_r2", "flash_prefill_f32_i8_packed_h64")
    (library,) = build([TARGET, "x86-avx2"], tmp_path / "libgqa.so", kernels=names)
    found = read_manifest(library).targets
    assert set(found[TARGET].kernels) == set(names) and not found["x86-avx2"].kernels
    for tokens in (1, 40):
        attributes, inputs = packed_call("i8", 70, tokens=tokens)
        past = pack_kv_cache(inputs["past_key"], inputs["past_value"])
        wanted = expected(attributes, inputs).output
        for name, array in zip(("key", "value"), past, strict=True):
            inputs[f"past_{name}"] = inputs[f"present_{name}"] = array
        op = GroupQueryAttention(**attributes, kv_layout="packed", library=str(library))
        assert_close(op(**inputs).output, wanted)
        assert set(op.last_plan.kernels) <= set(names)
