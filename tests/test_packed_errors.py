"""Packed caches: what they refuse, the names of their kernels, libraries that hold them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from operator_calls import assert_close, expected
from packed_calls import TARGET, needs_vnni, packed_call

from gqa_tvm import GroupQueryAttention, KVCache, build, pack_kv_cache, unpack_kv_cache
from gqa_tvm.build import library_kernels
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.library_file import read_manifest
from gqa_tvm.targets import FALLBACKS
from gqa_tvm.variants import family_variant


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
        (lambda: build("x86-avx2", "unused.so", kernels=["append_f32_i8_packed_h64"]), "none of the targets x86-avx2"),
        (lambda: build(TARGET, "unused.so", kernels=["naive_f32_i8_packed_h64"]), "none of the targets"),
        (lambda: build(TARGET, "unused.so", kernels=["flash_decode_f32_i8_packed_h72_r1"]), "none of the targets"),
        (lambda: build(TARGET, "unused.so", kv_layout="paged"), "kv_layout must be one of"),
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
