"""The kernels of x86-avx-vnni: instructions of the target's own code, and results of the same code in another encoding.

Results are those of `avx_vnni.AvxVnniLibrary`, where this CPU can run it.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest
from avx_vnni import BASE, TARGET, VEX_DOT, assembly, needs_stand_in, operator
from operator_calls import assert_close, assert_same_cache, copies, expected, make_call, run
from query_kinds import QUERIES

from gqa_tvm.kernels import KernelSpec
from gqa_tvm.variants import family_variant

pytest.importorskip("tvm")


def own(name: str) -> bool:
    variant = family_variant(TARGET, "x86-64")
    return variant.owner(KernelSpec.parse(name)) is variant


def test_which_kernels_are_its_own():
    for name in ("flash_decode_f32_i8_h64_r2", "flash_decode_f32_i4_h64_r8", "flash_prefill_f32_i8_h80"):
        assert own(name)
    # Formats, steps and rows that have no such code; wider rows could overflow.
    for name in ("flash_decode_f32_f32_h64_r1", "naive_f32_i8_h64", "append_f32_i8_h64", "flash_decode_f32_i4_h32_r1"):
        assert not own(name)
    assert own("flash_decode_f32_i8_h256_r1") and not own("flash_decode_f32_i8_h512_r1")


KERNELS = ("flash_decode_f32_i8_h64_r1", "flash_decode_f32_i4_h128_r4", "flash_prefill_f32_i8_h64")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize("name", KERNELS)
def test_its_instructions_are_those_of_the_family(name, tmp_path):
    """Dot products in VEX form, and nothing of AVX-512: no EVEX prefix, which begins with 62."""
    from gqa_tvm.object_cache import build_object

    path = build_object(KernelSpec.parse(name), family_variant(TARGET, "x86-64"))
    listing = subprocess.run(["objdump", "-d", "-w", str(path)], capture_output=True, text=True, check=True).stdout
    code = re.findall(r"^\s+[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t(.*)$", listing, re.M)
    dots = [prefix for prefix, instruction in code if "vpdpbusd" in instruction]
    assert len(dots) >= 12 and all(prefix.startswith("c4 ") for prefix in dots)
    assert not [instruction for prefix, instruction in code if prefix.startswith("62 ") or "%zmm" in instruction]


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_sums_stay_in_registers(name):
    text = assembly(KernelSpec.parse(name)).replace(VEX_DOT, "vpdpbusd")
    loops = re.findall(r"^(\.L\w+):\n((?:\t.*\n)+?)\tj\w+\t\1$", text, re.M)
    # Loops that do little else: at the end of a cache a block is so short that its loop is unrolled.
    tiles = [body for _, body in loops if 12 <= body.count("vpdpbusd") > 0.4 * body.count("\n")]
    assert len(tiles) >= 2
    for body in tiles:
        # Results of a loop are stored with an index.
        assert not re.search(r"vmov\w+\t%ymm\d+, -?\d*\(%r[sb]p\)", body)


def errors(attributes, inputs):
    """(error of integer products, error of float32, largest output) against float64; the caches are the same bytes."""
    exact = expected(attributes, inputs)
    op = operator(attributes)
    split, single = op(**copies(inputs)), run(attributes, inputs, target=BASE)
    assert own(op.last_plan.kernels[-1])
    assert_same_cache(split, exact)
    worst = [np.abs(result.output - exact.output.astype(np.float64)).max() for result in (split, single)]
    return *worst, np.abs(exact.output).max()


def call(cache, group=2, total=900, tokens=1, head_size=64, seed=0):
    shape = {"heads": group, "kv_heads": 1, "head_size": head_size, "capacity": total}
    return make_call(cache, tokens=tokens, total=total, seed=seed, **shape)


@needs_stand_in
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), [("i8-channel", 64), ("i4", 128)])
@pytest.mark.parametrize(("tokens", "total"), [(1, 900), (70, 130)], ids=["decode", "prefill"])
@pytest.mark.parametrize("kind", QUERIES)
def test_errors_are_those_of_float32(kind, tokens, total, cache, head_size):
    worst = np.zeros(2)
    for seed in range(3):
        attributes, inputs = call(cache, 2, total, tokens, head_size, seed)
        QUERIES[kind](inputs)
        split, single, scale = errors(attributes, inputs)
        worst = np.maximum(worst, [split, single])
    # A few rounding units of the output: below that the two differ by chance.
    assert worst[0] <= 2 * worst[1] + 2e-7 * scale, worst


@needs_stand_in
@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3])
def test_row_tiles_and_lengths(group):
    for cache in ("i8", "i4-channel"):
        for total in (1, 63, 65, 1030):
            split, single, scale = errors(*call(cache, group, total, head_size=128))
            assert split <= 2 * single + 4e-7 * scale


@needs_stand_in
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["i8", "i4"])
def test_sums_at_their_bounds_do_not_overflow(cache):
    """The largest sums of all: keys of the least code win, whose values are the largest code."""
    head_size = 256 if cache == "i8" else 1024
    attributes, inputs = call(cache, 1, 200, head_size=head_size)
    least, largest = (-128, 127) if cache == "i8" else (0, 0xFF)
    for name, winning, losing in (("past_key", least, largest), ("past_value", largest, least)):
        inputs[name][:, :, ::2], inputs[name][:, :, 1::2] = winning, losing
    attributes["scale"], inputs["query"][:], inputs["k_scale"][:] = 1.0, -1.98, 1.0
    inputs["key"][:], inputs["value"][:] = np.float32(-1e6), np.float32(1e6)
    op = operator(attributes)
    wanted = (127 if cache == "i8" else 7) * inputs["v_scale"][0]
    np.testing.assert_allclose(op(**copies(inputs)).output, wanted, rtol=3e-7)
    assert own(op.last_plan.kernels[-1])


CHOICES = ({"softcap": 3.0}, {"local_window_size": 20}, {"smooth_softmax": 1}, {"causal": 0})


@needs_stand_in
@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_choices_of_a_call(choice):
    for tokens, total in ((1, 130), (1, 1100), (70, 130)):
        attributes, inputs = call("i8-channel", 2, total, tokens)
        attributes |= choice
        assert_close(operator(attributes)(**copies(inputs)).output, expected(attributes, inputs).output)


@needs_stand_in
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"precision": "fast"}, {"approximate_qk": True}], ids=str)
def test_less_precise_kernels(options):
    bound = 4e-2 if "approximate_qk" in options else 2e-4
    for tokens, total in ((1, 300), (70, 130)):
        attributes, inputs = call("i8", 2, total, tokens)
        op = operator(attributes, **options)
        exact = expected(attributes, inputs).output
        assert np.abs(op(**copies(inputs)).output - exact).max() <= bound * np.abs(exact).max()
        assert op.last_plan.precision != "exact"
