"""Known faults of libraries on the wrong CPU or of another build: each test is the smallest case that showed one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from operator_calls import assert_close, expected, make_call

from gqa_tvm import BuildError, GroupQueryAttention, InvalidArgument, load, targets
from gqa_tvm.kernel_cache import build_stamp, manifest_path
from gqa_tvm.targets import FALLBACKS, architecture

x86_only = pytest.mark.skipif(architecture() != "x86-64", reason="the fallback chain of x86-64")
AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})


def write_library(folder, content, **changes):
    """A file that claims to be a library of this build, with changes to its manifest."""
    path = folder / "libgqa.so"
    path.write_bytes(content)
    manifest = {"stamp": build_stamp(), "target": "generic", "bytes": len(content), "kernels": []}
    manifest_path(path).write_text(json.dumps(manifest | changes))
    return path


@x86_only
@pytest.mark.parametrize(("features", "target"), [(AVX2, "x86-avx2"), (frozenset({"sse4_2"}), "generic")])
def test_a_lesser_cpu_gets_a_lesser_variant(features, target, monkeypatch, tmp_path):  # B134, B139
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
    # Refused by its manifest, before the system's loader sees the file.
    with pytest.raises(BuildError, match=f"target {better} needs CPU features this machine lacks: .*avx512bw"):
        load(write_library(tmp_path, b"no code", target=better))


@pytest.mark.parametrize("target", ["arm64-sve9", "x86-avx1024", ""])
def test_targets_this_version_does_not_know(target, tmp_path):  # B134
    with pytest.raises(BuildError, match=f"unknown target '{target}'"):
        load(write_library(tmp_path, b"no code", target=target))


def elf(machine):
    """The header of a 64-bit little-endian shared object for an ELF machine number."""
    header = bytearray(64)
    header[:7] = b"\x7fELF\x02\x01\x01"
    header[16:24] = (3).to_bytes(2, "little") + machine.to_bytes(2, "little") + (1).to_bytes(4, "little")
    header[52:58] = (64).to_bytes(2, "little") + (56).to_bytes(2, "little") + (0).to_bytes(2, "little")
    return bytes(header)


@pytest.mark.parametrize("machine", [183, 62, 243], ids=["aarch64", "x86-64", "riscv"])
def test_a_library_of_another_machine(machine, tmp_path):  # B136
    path = write_library(tmp_path, elf(machine))
    with pytest.raises(BuildError, match=r"libgqa\.so cannot be loaded"):
        load(path)


def test_a_library_of_another_build(tmp_path):  # B138
    path = write_library(tmp_path, b"no code", stamp="0123456789abcdef")
    with pytest.raises(BuildError, match=f"its stamp is 0123456789abcdef, wanted {build_stamp()}"):
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
    assert op.last_plan.target == target
    monkeypatch.delenv("GQA_TVM_TARGET")
    best = op.__class__(**attributes)
    assert_close(best(**inputs).output, forced.output)
    assert best.last_plan.target == targets.best_target()
    np.testing.assert_array_equal(best(**inputs).present_key, forced.present_key)


def test_the_environment_cannot_choose_what_does_not_run(monkeypatch):  # B134, B139
    attributes, inputs = make_call("i8", total=20, head_size=8)
    monkeypatch.setenv("GQA_TVM_TARGET", "x86-avx1024")
    with pytest.raises(ValueError, match=r"unknown target 'x86-avx1024'; known: .*generic"):
        GroupQueryAttention(**attributes)(**inputs)
