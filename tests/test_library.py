"""One `.so` of many kernels for several targets: built, loaded by path, refused with a reason."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from library_calls import SMALL_KERNELS, check_calls, elf, with_changed_manifest, write_library, write_manifest
from operator_calls import RUNNABLE_TARGETS, assert_close, expected, make_call

from gqa_tvm import BuildError, GroupQueryAttention, InvalidArgument, build, kernel_cache, load, object_cache, runtime
from gqa_tvm.build import LIBRARY_ROW_TILES, _sizes_of, _targets, library_kernels, usual_kernels
from gqa_tvm.kernels import KernelSpec, row_tile_for
from gqa_tvm.library_file import read_manifest
from gqa_tvm.prepared_call import PreparedCall
from gqa_tvm.runtime import KernelLibrary
from gqa_tvm.strategy import Strategy, StrategyRules
from gqa_tvm.targets import ARCHITECTURES, FALLBACKS, LIBRARY_TARGETS, architecture, best_target, find_target
from gqa_tvm.tuned_sizes import SizesTable, TunedRecord
from gqa_tvm.validation import Inputs, validate
from gqa_tvm.variants import family_variant, machine_variant

CHAIN = LIBRARY_TARGETS[architecture()]
FEATURES = Path(runtime.__file__).parent / "native" / "cpu_features.h"


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in RUNNABLE_TARGETS if target in CHAIN])
def test_every_target_of_a_library(target, small_library):
    library = load(small_library, target)
    assert (library.target, library.target_reason) == (target, f"asked for, one of {len(CHAIN)} in libgqa.so")
    for tokens in (1, 40):
        attributes, inputs = make_call("i8", tokens=tokens, total=70)
        op = GroupQueryAttention(**attributes, library=str(small_library))
        op._library = library
        assert_close(op(**inputs).output, expected(attributes, inputs).output)
        assert op.last_plan.target == target


@pytest.mark.slow
def test_the_best_target_of_a_library(small_library):  # B139
    plan = check_calls(library=str(small_library)).last_plan
    assert plan.target == best_target()
    assert plan.target_reason.startswith(f"the best of {len(CHAIN)} in libgqa.so for this CPU")
    manifest = read_manifest(small_library)
    assert list(manifest.targets) == list(CHAIN)
    for name, target in manifest.targets.items():
        assert sorted(target.kernels) == sorted(SMALL_KERNELS)
        assert target.table().default == family_variant(name).sizes.default


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 40])
@pytest.mark.parametrize(("tokens", "total"), [(1, 60), (1, 2100), (3, 60), (20, 60)])
def test_a_tile_serves_other_group_sizes(group, tokens, total, small_library):
    attributes, inputs = make_call("i8", tokens=tokens, total=total, heads=2 * group)
    op = GroupQueryAttention(**attributes, library=str(small_library))
    assert_close(op(**inputs).output, expected(attributes, inputs).output)
    assert set(op.last_plan.kernels) <= set(SMALL_KERNELS)


@pytest.mark.slow
def test_a_library_has_the_same_bytes_every_time(tmp_path, monkeypatch, small_library):
    seen = []
    (again,) = build(
        output=tmp_path / "again.so",
        kernels=SMALL_KERNELS,
        progress=lambda done, total, name: seen.append((done, total)),
    )
    assert again.read_bytes() == small_library.read_bytes()
    assert seen == [(len(set(_symbols(small_library))),) * 2]  # nothing was compiled
    contents = []
    for name in ("one", "two"):
        monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path / name))
        (path,) = build("generic", tmp_path / f"{name}.so", kernels=["append_f32_i4_h2"])
        contents.append(path.read_bytes())
        assert str(tmp_path).encode() not in contents[-1]
    assert contents[0] == contents[1]


def _symbols(library):
    return [symbol for target in read_manifest(library).targets.values() for symbol in target.kernels.values()]


def test_unchanged_code_is_not_compiled_again(tmp_path, monkeypatch):
    lowering = pytest.importorskip("gqa_tvm.lowering")
    spec, variant = KernelSpec("append", "f32", "i4", 2), family_variant("generic")
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path))
    first = object_cache.build_object(spec, variant)
    monkeypatch.setattr(kernel_cache, "build_stamp", lambda: "0" * 16)
    monkeypatch.setattr(lowering, "generate_code", lambda *_: pytest.fail("compiled again"))
    second = object_cache.build_object(spec, variant)
    assert second != first and second.read_bytes() == first.read_bytes()
    with pytest.raises(pytest.fail.Exception):
        object_cache.build_object(KernelSpec("append", "f32", "i4", 3), variant)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 10, 1000, -1, -1000], ids="{} bytes".format)
def test_a_truncated_library(kept, small_library, tmp_path):
    path = tmp_path / "cut.so"
    path.write_bytes(small_library.read_bytes()[:kept])
    reason = "it is no shared object" if 0 <= kept <= 10 else "it does not end with a manifest: .*cut off"
    with pytest.raises(BuildError, match=rf"cut\.so cannot be used: {reason}"):
        load(path)


BROKEN = {
    "no shared object": (lambda path: path.write_text("hello"), "it is no shared object"),
    "foreign": (lambda path: path.write_bytes(elf() + bytes(1000)), "a foreign file"),
    "other format": (lambda path: write_library(path, format=99), "its manifest has format 99, wanted 1"),
    "image of another size": (lambda path: write_library(path, image_bytes=65), "its code has 64 bytes, wanted 65"),
    "no targets": (lambda path: write_library(path, targets={}), "its manifest has 0 targets of"),
    "unknown field": (lambda path: write_library(path, colour="red"), "its manifest is broken: TypeError"),
    "list as manifest": (lambda path: write_manifest(path, elf(), [1]), "its manifest is broken: TypeError"),
    "broken sizes": (write_library, "cannot be used: "),
    "folder": (lambda path: path.mkdir(), "cannot be read: "),
    "absent": (lambda path: None, "cannot be read: No such file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_are_no_library(case, tmp_path):
    make, message = BROKEN[case]
    make(tmp_path / "libgqa.so")
    with pytest.raises(BuildError, match=rf"libgqa\.so .*{message}"):
        load(tmp_path / "libgqa.so")


def test_library_or_target():
    with pytest.raises(InvalidArgument, match="not both"):
        GroupQueryAttention(num_heads=1, kv_num_heads=1, library="libgqa.so", target="generic")


@pytest.mark.slow
def test_a_missing_kernel_is_built_or_named(small_library, tmp_path, monkeypatch):
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path))
    library, spec = load(small_library), KernelSpec("append", "f32", "f32", 7)
    with monkeypatch.context() as no_compiler:
        no_compiler.setenv("PATH", "")
        no_compiler.delenv("CC", raising=False)
        with pytest.raises(
            BuildError,
            match=r"libgqa\.so has no kernel append_f32_f32_h7 \(head size 7\) for .*; it has head sizes 64 with "
            r"query:cache formats f32:i8\. building append_f32_f32_h7 for .* needs a C compiler",
        ):
            library.kernel(spec)
    assert callable(library.kernel(spec))


# Says so when its two workers compile.
BUILD = """
from gqa_tvm import build
if __name__ == "__main__":
    def progress(done, total, name):
        if done == 1:
            print("compiling", flush=True)
    build("generic", "unused.so", kernels=["append_f32_i4_h2", *(f"naive_f32_i4_h{h}" for h in range(2, 20))],
          progress=progress)
"""


@pytest.mark.slow
def test_workers_end_with_the_build(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BUILD)
    environment = {**os.environ, "GQA_TVM_CACHE": str(tmp_path / "cache")}
    build_process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, cwd=tmp_path, env=environment, start_new_session=True
    )
    assert build_process.stdout.readline() == b"compiling\n"
    build_process.kill()
    build_process.wait()
    deadline = time.monotonic() + 20
    while _processes_of(build_process.pid):
        assert time.monotonic() < deadline, "workers go on"
        time.sleep(0.05)


def _processes_of(session):
    """Numbers of the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            found += [stat.parent.name] if int(its_session) == session and state != "Z" else []
    return found


# Runs kernels of a library and of the cache in one process, in this order; prints the threads that were there before
# and after. Two threads a call: one worker, if there is one pool.
POOL = """
import os, sys
from operator_calls import make_call
from gqa_tvm import GroupQueryAttention
for library in sys.argv[1:]:
    attributes, inputs = make_call("i8", total=4000)
    GroupQueryAttention(**attributes, library=library or None, num_threads=2)(**inputs)
    names = [open(f"/proc/self/task/{task}/stat").read().split()[1] for task in os.listdir("/proc/self/task")]
    print(len(names), end=" ")
"""


@pytest.mark.slow
@pytest.mark.parametrize("library_first", [True, False])
def test_a_process_has_one_pool(library_first, small_library):
    check_calls()  # builds what is missing
    order = [str(small_library), ""] if library_first else ["", str(small_library)]
    command = [sys.executable, "-c", POOL, *order]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent)
    first, second = map(int, done.stdout.split())
    assert first == second


@pytest.mark.slow
def test_the_installed_library_comes_first(small_library, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "_libraries", {})
    monkeypatch.setattr(runtime, "prebuilt_path", lambda: small_library)
    assert "in libgqa.so for this CPU" in check_calls().last_plan.target_reason
    other = with_changed_manifest(small_library, tmp_path / "other.so", stamp="0" * 16)
    monkeypatch.setattr(runtime, "_libraries", {})
    monkeypatch.setattr(runtime, "prebuilt_path", lambda: other)
    assert "other.so cannot be used: it was built from other sources" in check_calls().last_plan.target_reason


def test_targets_of_a_build(tmp_path):
    with pytest.raises(InvalidArgument, match="must be of one architecture"):
        build(["x86-avx2", "arm64-neon"], tmp_path / "x.so")
    with pytest.raises(InvalidArgument, match="unknown target 'x86-sse9'"):
        build("x86-sse9", tmp_path / "x.so")
    # Not every target is in a library that does not ask for it.
    assert _targets("x86-64", True)[0] == [name for name in FALLBACKS["x86-64"] if name != "x86-avx-vnni"]
    assert _targets(["x86-64", "x86-avx-vnni"], True)[0] == list(FALLBACKS["x86-64"])
    with pytest.raises(ValueError, match="not a kernel name"):
        build("generic", tmp_path / "x.so", kernels=["flash"])


def test_the_launcher_knows_the_features_of_all_targets():  # B134
    known = FEATURES.read_text()
    for name in ARCHITECTURES:
        for target in FALLBACKS[name]:
            assert all(f'"{feature}"' in known for feature in find_target(target, name).features)


def test_tuned_kernels_are_among_the_usual_ones():
    variant = family_variant("generic")
    records = [
        TunedRecord("flash_prefill_f32_i8_h64", 2, 1024, 1, {"kv_block": 16}, 2.0, 1.0, 10),
        TunedRecord("flash_prefill_f32_i8_h65", 2, 1024, 1, {"kv_block": 16}, 2.0, 1.0, 10),
        TunedRecord("naive_f32_i8_h64", 2, 1024, 1, {}, 2.0, 2.0, 10),
    ]
    tuned = variant._replace(sizes=SizesTable(variant.sizes.default, records))
    more = set(usual_kernels(tuned, [64])) - set(usual_kernels(variant, [64]))
    assert {spec.name for spec in more} == {f"flash_prefill_f32_i8_h64_t{records[0].digest}"}
    # A library's sizes name no kernel that it lacks.
    naive, prefill = KernelSpec.parse("naive_f32_i8_h64"), KernelSpec.parse("flash_prefill_f32_i8_h64")
    assert _sizes_of([naive, prefill], tuned).records == (records[2],)
    assert _sizes_of([*more], tuned).records == (records[0],)


def test_a_library_keeps_records_of_the_default_sizes():
    """They tell that a length between two records is not for the other, tuned one."""
    variant = family_variant("generic")
    name, block = "flash_prefill_f32_i8_h64", variant.sizes.default.kv_block
    records = [
        TunedRecord(name, 2, 512, 1, {"kv_block": block, "qk_key_tile": 4}, 2.0, 2.0, 10),
        TunedRecord(name, 2, 32768, 1, {"kv_block": block, "qk_key_tile": 2}, 2.0, 1.0, 10),
    ]
    tuned = variant._replace(sizes=SizesTable(variant.sizes.default, records))
    specs = library_kernels(tuned, [64])
    table = _sizes_of(specs, tuned)
    spec = KernelSpec.parse(name)
    assert table.records == tuple(records)
    assert table.choose(spec, 2, 200, 1).spec == spec and table.choose(spec, 2, 30000, 1).spec in specs


def _attention_specs(group, library, longest=299):
    """The attention kernels that calls of any number of tokens ask a library for."""
    for tokens in range(1, longest + 1):
        attributes, inputs = make_call("i8", tokens=tokens, total=300, heads=group, kv_heads=1)
        op = GroupQueryAttention(**attributes)
        problem = validate(op.attributes, Inputs(**{n: inputs.get(n) for n in Inputs._fields}))
        rules = StrategyRules(Strategy.AUTO, False, library.sizes.default.few_rows)
        arguments = (op.attributes, Inputs(**{n: inputs.get(n) for n in Inputs._fields}), problem, library, rules, 1)
        PreparedCall(*arguments).attention(problem)
    return library.asked


class _Asked:
    """A library that notes what it is asked for; names: of its kernels, None = whatever it is asked for."""

    def __init__(self, variant, names=None):
        self.asked, self.target, self.target_reason = set(), variant.target.name, ""
        self.sizes = variant.sizes
        self._symbols = names

    def kernel(self, spec):
        self.asked.add(spec)

    def offered(self, spec, rows):
        return spec if self._symbols is None else runtime.FileLibrary.offered(self, spec, rows)


_WRONG_ARGUMENTS = {
    "dtype": (2, np.zeros((1, 1, 4, 64), np.float32)),
    "columns": (2, np.zeros((1, 1, 4, 32), np.int8)),
    "axes": (4, np.zeros(4, np.int32)),
    "absent": (8, None),
    "strided": (8, np.zeros(128, np.float32)[::2]),
    "no number": (11, "0"),
}


@pytest.mark.parametrize(("number", "wrong"), _WRONG_ARGUMENTS.values(), ids=_WRONG_ARGUMENTS)
def test_a_kernel_names_the_argument_it_refuses(number, wrong):
    spec = KernelSpec("append", "f32", "i8", 64)
    f32, cache = np.float32, np.zeros((1, 1, 4, 64), np.int8)
    rotary = (np.zeros((1, 1), np.int64), np.zeros((1, 1), f32), np.zeros((1, 1), f32))
    rows = [np.zeros((1, 1, 64), f32)] * 2
    arguments = [*rows, cache, cache, np.zeros((1, 4), np.int32), *rotary, np.zeros(64, f32), np.ones(1, f32)]
    arguments += [np.ones(1, f32), 0.0, 0, 0, 0]
    kernel = KernelLibrary().kernel(spec)
    kernel(*arguments)
    arguments[number] = wrong
    with pytest.raises(TypeError, match=f"Mismatched argument #{number} of {spec.name}"):
        kernel(*arguments)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_the_usual_kernels_serve_any_number_of_tokens(group):
    variant = machine_variant(best_target())
    assert _attention_specs(group, _Asked(variant)) <= set(usual_kernels(variant, [64]))


@pytest.mark.parametrize("target", CHAIN)
@pytest.mark.parametrize("group", [1, 3, 7, 12])
def test_a_library_serves_any_group_size(group, target):
    variant = family_variant(target)
    kernels = set(library_kernels(variant, [64]))
    assert _attention_specs(group, _Asked(variant, {spec.name for spec in kernels}), 60) <= kernels


@pytest.mark.parametrize(("rows", "tile"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (7, 8), (12, 4), (16, 8), (32, 8)])
def test_the_tile_of_a_library(rows, tile):
    library = _Asked(family_variant("generic"), {f"flash_decode_f32_i8_h64_r{tile}" for tile in LIBRARY_ROW_TILES})
    wanted = KernelSpec("flash_decode", "f32", "i8", 64, row_tile_for(rows))
    assert library.offered(wanted, rows).row_tile == tile
    absent = KernelSpec("flash_decode", "f32", "i8", 65, 3)
    assert library.offered(absent, 3) == absent


@pytest.mark.parametrize("name", ["flash_decode_f32_i8_h128_r2", "append_f32_f32_h1", "naive_f32_i4_h80"])
def test_names_and_specs_are_the_same_thing(name):
    assert KernelSpec.parse(name).name == name


@pytest.mark.parametrize("name", ["", "append", "flash_f32_i8_h128", "naive_f32_i8_h128_x"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="not a kernel name"):
        KernelSpec.parse(name)
