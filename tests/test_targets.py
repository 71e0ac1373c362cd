"""The target table, the facts of a machine, and block sizes derived from them."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import get_args

import pytest
from gqa_tvm.schedules.block_sizes import default_block_sizes
from operator_calls import assert_close, expected, make_call

from gqa_tvm import GroupQueryAttention, InvalidArgument, targets
from gqa_tvm.kernels import Operation
from gqa_tvm.targets import (
    FALLBACKS,
    FAMILIES,
    architecture,
    best_target,
    family_facts,
    find_target,
    llvm_target,
    own_chain,
    require_runnable,
    target_facts,
    usable_cores,
)
from gqa_tvm.variants import family_variant

KIB = 1 << 10
BY_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.architecture}-{f.name}")
OTHER_ARCHITECTURE = {"x86-64": "aarch64", "aarch64": "x86-64"}.get(architecture(), "x86-64")


def test_fallbacks_end_at_a_target_that_needs_nothing():
    assert FALLBACKS["x86-64"] == ("x86-avx512-vnni", "x86-avx512", "x86-avx-vnni", "x86-avx2", "generic")
    assert FALLBACKS["aarch64"] == ("arm64-neon-dotprod", "arm64-neon", "generic")
    for name, chain in FALLBACKS.items():
        assert not find_target(chain[-1], name).features
    assert own_chain() == FALLBACKS[architecture()]


@BY_FAMILY
def test_a_target_has_every_schedule_and_its_base_equal_vectors(family):
    schedules = import_module(f"gqa_tvm.schedules.{family.name.replace('-', '_')}")
    for operation in get_args(Operation):
        assert callable(getattr(schedules, f"schedule_{operation}"))
    if family.base:
        base = find_target(family.base, family.architecture)
        assert base.features < family.features and base.vector_bytes == family.vector_bytes


def test_names_that_several_architectures_have():
    assert find_target("generic", "aarch64").architecture == "aarch64"
    assert find_target("generic").architecture == architecture()
    assert find_target(FALLBACKS[OTHER_ARCHITECTURE][0]).architecture == OTHER_ARCHITECTURE
    with pytest.raises(InvalidArgument, match="unknown target 'x86-avx3'; known: x86-avx512-vnni, "):
        find_target("x86-avx3")
    with pytest.raises(InvalidArgument, match="target x86-avx2 is not for aarch64"):
        find_target("x86-avx2", "aarch64")


def test_a_target_of_another_architecture_is_compiled_for_but_not_run():
    foreign = find_target(FALLBACKS[OTHER_ARCHITECTURE][0])
    assert llvm_target(foreign)["mtriple"].startswith({"x86-64": "x86_64", "aarch64": "aarch64"}[OTHER_ARCHITECTURE])
    assert "mtriple" not in llvm_target(find_target("generic"))
    with pytest.raises(InvalidArgument, match=f"target {foreign.name} is not for {architecture()}"):
        require_runnable(foreign.name)
    with pytest.raises(InvalidArgument, match="is not for"):
        GroupQueryAttention(num_heads=1, kv_num_heads=1, target=foreign.name)


def test_the_best_target_is_the_first_that_runs(monkeypatch):
    monkeypatch.delenv("GQA_TVM_TARGET", raising=False)
    monkeypatch.setattr(targets, "architecture", lambda: "x86-64")
    for features, wanted in (
        ((), "generic"),
        (("avx2", "fma"), "generic"),
        (("avx2", "fma", "f16c", "bmi2"), "x86-avx2"),
        (("avx2", "fma", "f16c", "bmi2", "avx_vnni"), "x86-avx-vnni"),
        ((*find_target("x86-avx512", "x86-64").features, "avx2", "fma", "f16c", "bmi2"), "x86-avx512"),
        (find_target("x86-avx512-vnni", "x86-64").features, "x86-avx512-vnni"),
    ):
        monkeypatch.setattr(targets, "cpu_features", lambda f=frozenset(features): f)
        assert best_target() == wanted
        assert best_target(["generic"]) == "generic"
    with pytest.raises(InvalidArgument, match="none of the targets arm64-neon, x86-avx3 runs on this CPU"):
        best_target(["x86-avx3", "arm64-neon"])
    monkeypatch.setattr(targets, "cpu_features", frozenset)
    monkeypatch.setenv("GQA_TVM_TARGET", "x86-avx2")
    with pytest.raises(InvalidArgument, match="lacks: avx2, bmi2, f16c, fma"):
        best_target()


@BY_FAMILY
def test_derived_sizes_fit_registers_and_caches(family):
    facts = family_facts(family)
    sizes = default_block_sizes(facts)
    assert sizes == family_variant(family.name, family.architecture).sizes.default
    assert sizes.lanes * 4 == family.vector_bytes
    operands = sizes.qk_row_vectors + (1 if facts.fused_multiply_add else 2)
    assert sizes.qk_key_tile * sizes.qk_row_vectors + operands <= family.vector_registers
    assert sizes.sv_row_tile * sizes.sv_column_vectors + operands <= family.vector_registers + 2
    assert sizes.decode_accumulators + 4 <= family.vector_registers
    assert 4 * sizes.kv_block * (sizes.q_block + 256) <= facts.l2_bytes // 2
    assert not sizes.split_integers or family.dot_bytes


@BY_FAMILY
@pytest.mark.parametrize("l2_kib", [32, 128, 256, 1024])
def test_blocks_of_keys_follow_the_second_level_cache(family, l2_kib):
    facts = replace(family_facts(family), l2_bytes=l2_kib * KIB)
    sizes = default_block_sizes(facts)
    smallest = math.lcm(sizes.lanes, sizes.qk_key_tile)
    assert sizes.kv_block <= 96
    assert sizes.kv_block <= smallest or 4 * sizes.kv_block * (sizes.q_block + 256) <= facts.l2_bytes // 2
    assert sizes.kv_block <= default_block_sizes(replace(facts, l2_bytes=2 * facts.l2_bytes)).kv_block


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize("registers", [4, 8, 16, 24, 32, 64])
@pytest.mark.parametrize("fused", [True, False])
def test_sizes_exist_for_any_cpu(vector_bytes, registers, fused):
    numbers = {"vector_bytes": vector_bytes, "vector_registers": registers, "fused_multiply_add": fused}
    for l2_bytes in (1, 64 * KIB, 4096 * KIB):
        # BlockSizes refuses sizes that do not divide each other.
        default_block_sizes(replace(family_facts(find_target("generic")), **numbers, l2_bytes=l2_bytes))


def test_facts_are_read_from_the_machine(monkeypatch):
    monkeypatch.delenv("GQA_TVM_FACTS", raising=False)
    monkeypatch.setattr(targets, "_cache_bytes", lambda index: {0: 48 * KIB, 2: 2048 * KIB}[index])
    facts = target_facts(find_target("generic"))
    assert (facts.l1_bytes, facts.l2_bytes, facts.cores) == (48 * KIB, 2048 * KIB, usable_cores())
    monkeypatch.setattr(targets, "_cache_bytes", lambda index: 0)
    facts = target_facts(find_target("generic"))
    assert (facts.l1_bytes, facts.l2_bytes) == (32 * KIB, find_target("generic").l2_bytes)
    foreign = find_target(FALLBACKS[OTHER_ARCHITECTURE][0])
    assert target_facts(foreign) == family_facts(foreign)


@pytest.mark.parametrize(
    "text,message",
    [
        ("l2_bytes", "must look like l2_bytes=262144,cores=4, got 'l2_bytes'"),
        ("l2_bytes=1M", "must look like"),
        ("l2_bytes=1=2", "must look like"),
        ("l3_bytes=1", "l3_bytes=1; known: vector_bytes, vector_registers, dot_bytes, l1_bytes, l2_bytes, cores"),
        ("l2_bytes=0", "l2_bytes=0; known"),
        ("cores=-1", "cores=-1; known"),
        ("vector_bytes=24", r"vector_bytes must be one of \(16, 32, 64\), got 24"),
        ("dot_bytes=16", r"dot_bytes must be one of \(0, 0\), got 16"),
    ],
)
def test_malformed_facts_are_refused(text, message, monkeypatch):
    monkeypatch.setenv("GQA_TVM_FACTS", text)
    with pytest.raises(InvalidArgument, match=message):
        target_facts(find_target("generic"))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["l2_bytes=65536,cores=3", "vector_bytes=16,vector_registers=8,dot_bytes=0"])
def test_other_facts_other_sizes_same_result(text, monkeypatch, tmp_path):
    from gqa_tvm import runtime

    runtime.launcher()
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path))
    monkeypatch.setenv("GQA_TVM_FACTS", text)
    monkeypatch.setattr(runtime, "_libraries", {})
    for tokens in (1, 33):
        attributes, inputs = make_call("i8", tokens=tokens, total=90)
        op = GroupQueryAttention(**attributes)
        assert_close(op(**inputs).output, expected(attributes, inputs).output)
        assert op.last_plan.block_sizes != default_block_sizes(family_facts(find_target(op.last_plan.target)))
    assert len(list(tmp_path.rglob("*.so"))) == 3
