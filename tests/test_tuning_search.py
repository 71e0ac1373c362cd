"""The search itself: traces that mean what their sizes say, a cost model that converges, runs that fail and resume."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.cost_model.xgb_model import XGBConfig, XGBModel

from gqa_tvm import cli
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.lowering import apply_schedule, fitted_sizes, lower
from gqa_tvm.targets import best_target, find_target, missing_features, target_facts
from gqa_tvm.tuned_sizes import SizesTable, TunedRecord
from gqa_tvm.tuning import session
from gqa_tvm.tuning.cost_model import converging_config
from gqa_tvm.tuning.logs import unpack_database
from gqa_tvm.tuning.operator_bench import OperatorBench
from gqa_tvm.tuning.runner import evaluator_config
from gqa_tvm.tuning.search import SearchOptions, WorkloadSearch
from gqa_tvm.tuning.searcher import ScheduleSearcher
from gqa_tvm.tuning.space import chunk_variants, inner_candidates, outer_points
from gqa_tvm.tuning.strategy import SharedModule, decide, decisions
from gqa_tvm.tuning.task import Task
from gqa_tvm.tuning.workload import Workload, symbolic_module
from gqa_tvm.variants import untuned_variant

FEATURES = Path(__file__).parent / "data" / "tuning_features.npz"
KERNELS = (
    ("flash_prefill_f32_f32_h16", 2),
    ("flash_prefill_f32_i4_h48_r32", 4),
    ("flash_decode_f32_f32_h16_r1", 1),
    ("flash_decode_f16_f16_h16_r1", 1),
    ("flash_decode_f32_i8_h64_r2", 2),
    ("flash_decode_f32_i8_h64_r1", 1),
)


def workload(name: str, group_size: int, target: str | None = None) -> Workload:
    variant = untuned_variant(target or best_target())
    spec = KernelSpec.parse(name)
    task = Task(spec, group_size, (512,), (1,))
    sizes = fitted_sizes(spec, variant.sizes.default)
    return Workload(spec, sizes, task.shape(512), variant.target, target_facts(variant.target))


def traced(work: Workload):
    schedule = s_tir.Schedule(work.module())
    work.schedule(schedule)
    return schedule.trace


def points_of(work: Workload) -> list[tuple[int, ...]]:
    """The default, and every field at its first and last value that goes with the others."""
    own, axes = work.default_point(), list(work.candidates().values())
    points = {own, tuple(0 for _ in axes), tuple(len(axis) - 1 for axis in axes)}
    return [point for point in sorted(points) if work.sizes_at(point) is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name,group_size", KERNELS, ids=[name for name, _ in KERNELS])
def test_a_static_trace_makes_the_shipped_kernel(name, group_size):
    """A trace of the static workload, applied to the symbolic kernel, is what its sizes build."""
    work = workload(name, group_size)
    trace = traced(work)
    for point in points_of(work):
        sizes = work.sizes_at(point)
        replayed = SharedModule(symbolic_module(work.spec, sizes)).replay(decide(trace, point))
        built = s_tir.Schedule(symbolic_module(work.spec, sizes))
        built.work_on("main")
        apply_schedule(built, work.spec, work.target, sizes)
        assert tvm_ffi.structural_equal(replayed.mod, built.mod), sizes
        assert decisions(decide(trace, point)) == point
    # As text: lowering makes new nodes that only their identity tells apart.
    lowered, expected = (lower(schedule.mod, work.spec, work.target, sizes).script() for schedule in (replayed, built))
    assert lowered == expected


def test_static_workloads_have_tensors_of_constant_shape_only():
    for name, group_size in KERNELS:
        work = workload(name, group_size)
        text = work.module().script()
        assert "TypeVar" not in text and "entries" not in text and "positions" not in text
        dtypes = {str(parameter.dtype) for parameter in work.module()["main"].params}
        assert dtypes <= {"float32", "float16", "int8", "uint8"}


def test_sampled_sizes_divide_what_they_split():
    facts = target_facts(find_target(best_target()))
    for name, _ in KERNELS:
        spec = KernelSpec.parse(name)
        for sizes in outer_points(spec, untuned_variant(best_target()).sizes.default, facts):
            sizes = fitted_sizes(spec, sizes)
            for field, values in inner_candidates(spec, sizes).items():
                assert len(values) > 1
                if field == "sv_row_tile":
                    assert all(sizes.q_block % value == 0 for value in values)


def test_outer_points_begin_with_the_default_and_hold_both_forms():
    if missing_features("x86-avx512-vnni"):
        pytest.skip("needs VNNI")
    variant = untuned_variant("x86-avx512-vnni")
    spec = KernelSpec.parse("flash_decode_f32_i8_h64_r1")
    points = outer_points(spec, variant.sizes.default, target_facts(variant.target))
    assert points[0] == variant.sizes.default
    assert {sizes.splits_integers("i8", 64, 1) for sizes in points} == {True, False}
    assert all(sizes.kv_chunk != points[0].kv_chunk for sizes in chunk_variants(spec, points[0]))


def _logged_errors(caplog, config: XGBConfig) -> list[float]:
    """p-rmse of the training rounds as TVM's model logs them."""
    caplog.clear()
    data = np.load(FEATURES)
    model = XGBModel(config=config, num_warmup_samples=0)
    features = list(data["features"].astype(np.float32))
    with caplog.at_level(logging.DEBUG, "tvm.s_tir.meta_schedule.cost_model.xgb_model"), np.errstate(all="ignore"):
        model._train(features, (data["seconds"].min() / data["seconds"]).astype(np.float32))
    found = re.findall(r"XGB iter +\d+: tr-p-rmse: (\S+)", caplog.text)
    return [float(value) for value in found]


def test_the_cost_model_converges(caplog):
    """Features and times of a prefill kernel, recorded by a real run of 24 candidates."""
    rows = np.load(FEATURES)["features"].shape[1]
    errors = _logged_errors(caplog, converging_config(rows))
    assert len(errors) > 2 and errors[-1] < 0.8 * errors[0]
    assert errors == sorted(errors, reverse=True)


def test_the_default_step_would_diverge(caplog):
    errors = _logged_errors(caplog, XGBConfig(nthread=1))
    assert not errors[-1] < 10 * errors[0]


SMALL = ("--kernel", "flash_decode_f32_f32_h8_r1", "--group-size", "1", "--total", "2", "--threads", "1")


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """Kernels, databases and logs of a test's own."""
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path / "cache"))
    return ["--output", str(tmp_path / "logs")]


def test_a_run_that_takes_no_time_by_the_clock_is_a_failure(tmp_path):  # B133
    search = WorkloadSearch(workload(*KERNELS[2]), tmp_path, None, SearchOptions())
    assert search._timed(ms.runner.RunnerResult([0.0, 1e-3], None)).error_msg is not None
    assert [float(s) for s in search._timed(ms.runner.RunnerResult([2e-3, 1e-3], None)).run_secs] == [1e-3]
    assert search.found.failures == {"time": 1} and evaluator_config().min_repeat_ms >= 10


@pytest.mark.slow
def test_a_run_and_its_resumption(own_folders, tmp_path, capsys, monkeypatch):  # B133
    monkeypatch.setattr(OperatorBench, "measure", lambda self, task, cell, sizes: [1.0, *[0.5] * (len(sizes) - 1)])
    points = ScheduleSearcher.points
    monkeypatch.setattr(ScheduleSearcher, "points", lambda self, task: points(self, task)[:1])
    monkeypatch.setattr(ScheduleSearcher, "chunk_variants", lambda self, task, sizes: [])
    monkeypatch.setattr(session, "_FINALISTS", 2)
    options = [*SMALL, *own_folders, "--trials", "2", "--cost-model", "random"]
    assert cli.main(["tune", *options]) == 0
    first = capsys.readouterr().out
    files = "tuning/*/*/*/*/database_tuning_record.json"
    databases = sorted((tmp_path / "cache").glob(files))
    counts = [len(file.read_text().splitlines()) for file in databases]
    assert "1 kernels tuned" in first and counts == [2]
    sizes_file = tmp_path / "logs" / best_target() / "block_sizes.json"
    assert sizes_file.exists() and (sizes_file.parent / "database_workload.json.gz").exists()
    # Finished: nothing is done again. With more trials: only the new ones are measured.
    assert cli.main(["tune", *options]) == 0
    assert "0 kernels tuned, 1 finished by an earlier run" in capsys.readouterr().out
    assert cli.main(["tune", *options, "--trials", "3"]) == 0
    made = [json.dumps(json.loads(line)[1][0][1]) for line in databases[0].read_text().splitlines()]
    assert len(set(made)) == len(made) == 3
    _accepted_record_builds_its_sizes(sizes_file.parent, tmp_path)


def _accepted_record_builds_its_sizes(folder, tmp_path):
    """The committed trace, opened by MetaSchedule and applied to the kernel, is what the recorded sizes build."""
    unpack_database(folder, tmp_path)
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    record = database.get_all_tuning_records()[0]
    (entry,) = {str(r["sizes"]): r for r in json.loads((folder / "block_sizes.json").read_text())["records"]}.values()
    spec = KernelSpec.parse(entry["kernel"])
    table = SizesTable(untuned_variant(best_target()).sizes.default, [TunedRecord(**entry)])
    sizes = table.choose(spec, 1, 2, 1).sizes
    replayed = SharedModule(symbolic_module(spec, sizes)).replay(record.trace)
    built = s_tir.Schedule(symbolic_module(spec, sizes))
    built.work_on("main")
    apply_schedule(built, spec, find_target(best_target()), sizes)
    assert tvm_ffi.structural_equal(replayed.mod, built.mod)


@pytest.mark.slow
def test_a_broken_compiler_is_an_error_and_leaves_the_logs(own_folders, tmp_path, capsys, monkeypatch):  # B126
    """Candidates cannot be linked, nothing is measured."""
    sizes_file = tmp_path / "logs" / best_target() / "block_sizes.json"
    sizes_file.parent.mkdir(parents=True)
    target = find_target(best_target())
    content = f'{{"target": "{target.name}", "architecture": "{target.architecture}", "records": []}}'
    sizes_file.write_text(content)
    monkeypatch.setenv("CC", "/bin/false")
    options = [*SMALL, *own_folders, "--trials", "2", "--cost-model", "random", "--strategy", "replay-trace"]
    assert cli.main(["tune", *options]) == 1
    assert "no candidate could be used; the first failed with build:" in capsys.readouterr().err
    assert sizes_file.read_text() == content and len(list(sizes_file.parent.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name,group_size", [("flash_decode_f32_f32_h16_r2", 2), ("flash_prefill_f32_f32_h16", 2)])
def test_other_fields_change_no_bit(name, group_size):
    """Records of one kernel may differ in every field that is not among ORDER_FIELDS."""
    bench = OperatorBench(best_target())
    task = Task(KernelSpec.parse(name), group_size, (512,), (1,))
    default = fitted_sizes(task.spec, bench.variant.sizes.default)
    others = {
        "flash_decode": ({"decode_accumulators": 8, "decode_sv_unroll": 1}, {"key_vectors": 4, "decode_sv_unroll": 8}),
        "flash_prefill": (
            {"qk_key_tile": 4, "qk_row_vectors": 1, "elementwise_vectors": 1, "reduction_vectors": 1},
            {"sv_row_tile": 2, "sv_column_vectors": 1, "elementwise_vectors": 3},
        ),
    }[task.spec.operation]
    wanted = bench.output(task, default)
    for fields in others:
        assert np.array_equal(bench.output(task, replace(default, **fields)), wanted), fields


def test_missing_packages_are_named(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "xgboost", None)
    assert cli.main(["tune", *SMALL]) == 1
    assert "gqa_tvm[build]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options,message",
    [
        (["--kernel", "append_f32_f32_h64"], "only flash_decode and flash_prefill"),
        (["--kernel", "flash"], "is not a kernel name"),
        (["--rpc", "here:1"], "belong together"),
        (["--rpc", "here", "--device-key", "k"], "host:port"),
        (["--rpc", "127.0.0.1:1", "--device-key", "k"], "no device 'k' at the RPC tracker"),
    ],
)
def test_options_that_cannot_work(options, message, capsys, own_folders):
    assert cli.main(["tune", *options, *own_folders]) == 1
    assert message in capsys.readouterr().err
