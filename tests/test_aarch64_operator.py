"""The operator on AArch64 code: the NumPy reference's results, the very cache bytes that this machine writes."""

from __future__ import annotations

import numpy as np
import pytest
from aarch64 import needs_aarch64
from operator_calls import CACHES, TOLERANCES, add_rotary, assert_close, assert_same_cache, copies, expected, make_call

from gqa_tvm import GroupQueryAttention
from gqa_tvm.runtime import library_for

pytestmark = needs_aarch64

# Query and cache formats; a cache in the query's own format has no scales.
MODES = {
    "f32": ("f32", "f32"),
    "f16": ("f16", "f16"),
    "bf16": ("bf16", "bf16"),
    **{name: ("f32", name) for name in CACHES if name != "f32"},
}
# Tokens and keys of a call: a prompt, one more token in one chunk of keys and in several.
STEPS = {"prompt": (70, 70), "token": (1, 63), "chunks": (1, 1100)}


class _OnlyAppends:
    """This machine's kernels, of which attention does nothing: what is left are the caches."""

    def __init__(self):
        self._library = library_for(None)
        self.sizes = self._library.sizes
        self.target, self.target_reason = self._library.target, "for its caches"

    def offered(self, spec, rows):
        return spec

    def kernel(self, spec):
        return self._library.kernel(spec) if spec.operation == "append" else lambda *arguments: None


def _run(library, attributes, inputs, **keywords):
    op = GroupQueryAttention(**attributes, **keywords)
    op._library = library
    return op(**copies(inputs)), op.last_plan


def _check(arm, attributes, inputs, dtype="f32", **keywords):
    """Output as the reference has it, caches as this machine's kernels write them; returns the plan."""
    got, plan = _run(arm, attributes, inputs, **keywords)
    wanted = expected(attributes, inputs)
    for name in ("output", "output_qk"):
        if getattr(wanted, name) is not None:
            ours, theirs = (getattr(result, name).astype(np.float64) for result in (got, wanted))
            assert_close(ours, theirs, TOLERANCES[dtype])
    here, _ = _run(_OnlyAppends(), attributes, inputs, **keywords)
    assert_same_cache(got, here)
    assert plan.target == arm.target
    return plan


def _call(mode, step, **sizes):
    dtype, cache = MODES[mode]
    tokens, total = STEPS[step]
    attributes, inputs = make_call(cache, dtype=dtype, tokens=tokens, total=total, **sizes)
    add_rotary(attributes, inputs)
    return attributes, inputs, dtype


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("mode", MODES)
def test_every_kernel(arm, mode, head_size):
    kernels = set()
    for step in STEPS:
        attributes, inputs, dtype = _call(mode, step, head_size=head_size)
        kernels |= set(_check(arm, attributes, inputs, dtype).kernels)
    attributes, inputs, dtype = _call(mode, "prompt", head_size=head_size)
    for qk_output in (1, 2):
        kernels |= set(_check(arm, attributes | {"qk_output": qk_output}, inputs, dtype).kernels)
    assert {name.split(f"_{dtype}")[0] for name in kernels} == {"append", "flash_prefill", "flash_decode", "naive"}


@pytest.mark.parametrize("step", ["prompt", "token"])
def test_a_cache_mode(arm, step):
    """The quick one of the above."""
    attributes, inputs, dtype = _call("i8-channel", step, head_size=64)
    plan = _check(arm, attributes, inputs, dtype, strategy="naive")
    assert plan.kernels == ("append_f32_i8_h64", "naive_f32_i8_h64")


def _window(attributes, inputs):
    attributes["local_window_size"] = 20


def _softcap(attributes, inputs):
    attributes["softcap"] = 3.0


def _bias(attributes, inputs):
    shape = (1, attributes["num_heads"], inputs["query"].shape[1], int(inputs["total_sequence_length"][0]))
    inputs["attention_bias"] = np.random.default_rng(1).standard_normal(shape, np.float32)
    inputs["attention_bias"][..., ::3] = -np.inf


def _sink(attributes, inputs):
    inputs["head_sink"] = np.linspace(-2, 2, attributes["num_heads"], dtype=np.float32)


def _smooth_softmax(attributes, inputs):
    attributes["smooth_softmax"] = 1


def _norms(attributes, inputs):
    for name in ("q_norm_weight", "k_norm_weight"):
        inputs[name] = np.linspace(0.5, 2, inputs["query"].shape[2] // attributes["num_heads"], dtype=np.float32)


def _interleaved_rotary(attributes, inputs):
    add_rotary(attributes, inputs, interleaved=1, rotary_dim=32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [_window, _softcap, _bias, _sink, _smooth_softmax, _norms, _interleaved_rotary],
    ids=lambda f: f.__name__[1:],
)
@pytest.mark.parametrize("mode", ["f32", "i8-channel", "i4"])
def test_every_choice_of_a_call(arm, mode, change):
    for step in STEPS:
        attributes, inputs, dtype = _call(mode, step, head_size=64)
        change(attributes, inputs)
        for strategy in ("auto", "naive"):
            _check(arm, attributes, inputs, dtype, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 25])
@pytest.mark.parametrize("mode", ["f32", "i8", "i4-channel"])
def test_chunks_of_tokens(arm, mode, tokens):
    """Two tokens of two heads are the rows of a register tile, 25 those of small prefill tasks, the last not full."""
    attributes, inputs = make_call(mode, tokens=tokens, total=90)
    kernel = {2: "flash_decode_f32_{}_h64_r4", 25: "flash_prefill_f32_{}_h64_r32"}[tokens]
    assert _check(arm, attributes, inputs).kernels[-1] == kernel.format(mode.split("-")[0])


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 3, 5, 8])
def test_row_tiles(arm, heads):
    for total in (5, 130):
        attributes, inputs = make_call("i8", total=total, heads=heads, kv_heads=1)
        assert _check(arm, attributes, inputs).kernels[-1] == f"flash_decode_f32_i8_h64_r{heads}"
