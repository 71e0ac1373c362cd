"""Known faults of libraries on the wrong CPU or of another build: each test is the smallest case that showed one."""

from __future__ import annotations

import numpy as np
import pytest
from library_calls import MACHINES, check_calls, elf, with_changed_manifest, write_library
from operator_calls import assert_close, expected, make_call

from gqa_tvm import BuildError, GroupQueryAttention, InvalidArgument, load, targets
from gqa_tvm.kernel_cache import library_stamp
from gqa_tvm.targets import FALLBACKS, LIBRARY_TARGETS, architecture

x86_only = pytest.mark.skipif(architecture() != "x86-64", reason="the fallback chain of x86-64")
AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
LESSER_CPUS = [(AVX2, "x86-avx2"), (frozenset({"sse4_2"}), "generic")]
OTHERS = [name for name in MACHINES if name != architecture()]


@x86_only
@pytest.mark.parametrize(("features", "target"), LESSER_CPUS)
def test_a_lesser_cpu_gets_a_lesser_variant(features, target, monkeypatch):  # B134, B139
    if targets.missing_features(target):
        pytest.skip(f"this CPU cannot run {target}")
    monkeypatch.delenv("GQA_TVM_TARGET", raising=False)
    monkeypatch.setattr(targets, "cpu_features", lambda: features)
    attributes, inputs = make_call("i8", total=20, head_size=8)
    op = GroupQueryAttention(**attributes)
    assert_close(op(**inputs).output, expected(attributes, inputs).output)
    assert op.last_plan.target == target
    better = FALLBACKS["x86-64"][0]
    with pytest.raises(InvalidArgument, match=f"target {better} needs CPU features this machine lacks: .*avx512bw"):
        GroupQueryAttention(**attributes, target=better)


@pytest.mark.slow
@x86_only
@pytest.mark.parametrize(("features", "target"), LESSER_CPUS)
def test_a_lesser_cpu_gets_a_lesser_target_of_a_library(features, target, monkeypatch, small_library):  # B134, B139
    if targets.missing_features(target):
        pytest.skip(f"this CPU cannot run {target}")
    load(small_library)  # so that the launcher does not ask the CPU later
    monkeypatch.setattr(targets, "cpu_features", lambda: features)
    library = load(small_library)
    chain = LIBRARY_TARGETS["x86-64"]
    better = chain[chain.index(target) - 1]
    assert library.target == target
    assert library.target_reason.startswith(f"the best of 4 in libgqa.so for this CPU: {better} needs avx")
    with pytest.raises(BuildError, match=f"target {better} needs CPU features this machine lacks: .*avx"):
        load(small_library, better)


@x86_only
def test_a_library_without_a_target_for_this_cpu(tmp_path, monkeypatch):  # B134
    monkeypatch.setattr(targets, "cpu_features", frozenset)
    path = write_library(tmp_path / "libgqa.so", target="x86-avx512")
    with pytest.raises(BuildError, match=r"libgqa\.so cannot be used: none of the targets x86-avx512 runs on this CPU"):
        load(path)


@pytest.mark.parametrize("listed", [frozenset({"avx2", "avx512f", "sse4_2"}), None])
@pytest.mark.parametrize("confirmed", [frozenset({"avx2", "fma"}), None])
def test_the_system_and_the_cpu_must_agree(listed, confirmed, monkeypatch):  # B134
    monkeypatch.setattr(targets, "_listed_features", lambda: listed)
    monkeypatch.setattr(targets, "_confirmed", confirmed)
    known = [features for features in (listed, confirmed) if features is not None]
    assert targets.cpu_features() == (frozenset.intersection(*known) if known else frozenset())


@pytest.mark.parametrize("target", ["arm64-sve9", "x86-avx1024", ""])
def test_targets_this_version_does_not_know(target, tmp_path):  # B134
    path = write_library(tmp_path / "libgqa.so", target=target)
    with pytest.raises(BuildError, match=f"none of the targets {target} runs on this CPU"):
        load(path)
    with pytest.raises(BuildError, match=f"unknown target '{target or 'x'}'"):
        load(path, target or "x")


@pytest.mark.parametrize("machine", OTHERS)
def test_a_library_of_another_machine(machine, tmp_path):  # B136
    path = write_library(tmp_path / "libgqa.so", elf(MACHINES[machine]), architecture=machine)
    message = rf"libgqa\.so cannot be used: it is for another architecture: {machine}, wanted {architecture()}"
    with pytest.raises(BuildError, match=message):
        load(path)


@pytest.mark.slow
def test_a_library_of_another_build(small_library, tmp_path):  # B138
    versions = {"gqa-tvm": "9.8.7", "apache-tvm": "0.99.0", "apache-tvm-ffi": "0.55.0"}
    path = with_changed_manifest(small_library, tmp_path / "libgqa.so", stamp="0123456789abcdef", versions=versions)
    message = (
        f"its stamp is 0123456789abcdef, wanted {library_stamp()} .*"
        r"gqa-tvm 9\.8\.7, apache-tvm 0\.99\.0, apache-tvm-ffi 0\.55\.0; here is gqa-tvm .*apache-tvm-ffi 0\.1"
    )
    with pytest.raises(BuildError, match=message):
        load(path)


@x86_only
@pytest.mark.parametrize("target", ["generic", "x86-avx2"])
def test_the_environment_chooses_a_target(target, monkeypatch):  # B139
    if targets.missing_features(target):
        pytest.skip(f"this CPU cannot run {target}")
    attributes, inputs = make_call("i8", total=20, head_size=8)
    monkeypatch.setenv("GQA_TVM_TARGET", target)
    op = GroupQueryAttention(**attributes)
    forced = op(**inputs)
    assert (op.last_plan.target, op.last_plan.target_reason) == (target, "forced by GQA_TVM_TARGET")
    monkeypatch.delenv("GQA_TVM_TARGET")
    best = op.__class__(**attributes)
    assert_close(best(**inputs).output, forced.output)
    assert best.last_plan.target == targets.best_target()
    np.testing.assert_array_equal(best(**inputs).present_key, forced.present_key)


@pytest.mark.slow
def test_the_environment_chooses_a_target_of_a_library(small_library, monkeypatch):  # B139
    monkeypatch.setenv("GQA_TVM_TARGET", "generic")
    plan = check_calls(library=str(small_library)).last_plan
    count = len(LIBRARY_TARGETS[architecture()])
    assert plan.target == "generic"
    assert plan.target_reason == f"forced by GQA_TVM_TARGET, one of {count} in libgqa.so"


def test_the_environment_cannot_choose_what_does_not_run(monkeypatch, tmp_path):  # B134, B139
    attributes, inputs = make_call("i8", total=20, head_size=8)
    monkeypatch.setenv("GQA_TVM_TARGET", "x86-avx1024")
    with pytest.raises(ValueError, match=r"unknown target 'x86-avx1024'; known: .*generic"):
        GroupQueryAttention(**attributes)(**inputs)
    best = FALLBACKS[architecture()][0]
    monkeypatch.setenv("GQA_TVM_TARGET", best)
    with pytest.raises(BuildError, match=f"target {best}, forced by GQA_TVM_TARGET, is not in it; it has generic"):
        load(write_library(tmp_path / "libgqa.so"))
