"""A CPU family is a line in the table and a file of schedules: here a made-up one that runs on any x86-64 with AVX2."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from gqa_tvm.schedules import generic
from gqa_tvm.schedules.block_sizes import default_block_sizes
from operator_calls import assert_close, assert_same_cache, expected, make_call

from gqa_tvm import GroupQueryAttention, InvalidArgument, runtime, targets
from gqa_tvm.cli import main
from gqa_tvm.targets import FAMILIES, Target, architecture, best_target, family_facts, missing_features, own_chain

pytestmark = pytest.mark.skipif(
    architecture() != "x86-64" or bool(missing_features("x86-avx2")), reason="the made-up CPU needs AVX2"
)

# AVX2 without multiply-add or float16 conversions, and a small second-level cache.
MADE_UP = Target(
    "x86-made-up",
    "x86-64",
    "sandybridge",
    frozenset({"avx2"}),
    *(32, 16, 128 << 10),
    mattr=("+avx2",),
    fused_multiply_add=False,
    converts_float16=False,
)


@pytest.fixture
def line(monkeypatch):
    """The line: best of its architecture."""
    monkeypatch.delenv("GQA_TVM_TARGET", raising=False)
    monkeypatch.setattr(targets, "FAMILIES", (MADE_UP, *FAMILIES))


@pytest.fixture
def used(monkeypatch):
    """The file: generic's schedules with one of its own; the names of those that were asked for."""
    names = []
    module = ModuleType("gqa_tvm.schedules.x86_made_up")
    for name in ("append", "flash_prefill", "flash_decode", "naive"):

        def schedule(sch, sizes, *arguments, name=name):
            names.append(name)
            getattr(generic, f"schedule_{name}")(sch, sizes, *arguments)

        setattr(module, f"schedule_{name}", schedule)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return names


def test_it_is_chosen_where_it_runs(line, monkeypatch):
    others = own_chain()[1:]
    assert own_chain() == ("x86-made-up", *others) and best_target() == "x86-made-up"
    assert best_target(others) == next(name for name in others if not missing_features(name))
    monkeypatch.setattr(targets, "cpu_features", lambda: frozenset({"sse2"}))
    assert best_target() == "generic"
    monkeypatch.setenv("GQA_TVM_TARGET", "x86-made-up")
    with pytest.raises(InvalidArgument, match="target x86-made-up needs CPU features this machine lacks: avx2"):
        best_target()


def test_its_sizes_are_derived():
    sizes = default_block_sizes(family_facts(MADE_UP))
    assert (sizes.lanes, sizes.qk_key_tile, sizes.qk_row_vectors, sizes.kv_block) == (8, 4, 2, 48)
    assert not sizes.split_integers


@pytest.mark.slow
def test_it_builds_and_runs(line, used, monkeypatch, tmp_path, capsys):
    runtime.launcher()
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path))
    monkeypatch.setattr(runtime, "_libraries", {})
    for cache, tokens in (("i8", 1), ("i8", 30), ("f16", 5)):
        attributes, inputs = make_call(cache, tokens=tokens, total=70, dtype="f16" if cache == "f16" else "f32")
        op = GroupQueryAttention(**attributes)
        got, wanted = op(**inputs), expected(attributes, inputs)
        assert_close(got.output, wanted.output, 1e-3 if cache == "f16" else 1e-5)
        assert_same_cache(got, wanted)
        assert op.last_plan.target == "x86-made-up"
    assert set(used) == {"append", "flash_prefill", "flash_decode"}
    assert main(["info"]) == 0
    told = capsys.readouterr().out
    assert "x86-made-up        runs here" in told and "chosen: x86-made-up" in told


def test_other_targets_can_still_be_forced(line, monkeypatch):
    monkeypatch.setenv("GQA_TVM_TARGET", "generic")
    assert best_target() == "generic" and runtime.KernelLibrary().target == "generic"
