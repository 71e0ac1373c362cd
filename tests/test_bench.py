"""The benchmark tool: what it counts, what it refuses to time, what it prints and draws. No time is asserted."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import callers
import disturbance
import document
import gate
import plot
import report
import run
import timing
from calls import make_call, make_gemm
from contenders import ORT_FLASH, ORT_NAIVE, OURS, OURS_NAIVE, Contender, operator_contenders
from limits import MIB, Limits
from timing import MIN_ROUNDS, Spread, sample
from workloads import CACHE_BITS, FEATURES, SELECTIONS, Workload, chunk, decode, prefill

DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
SMALL = decode("i8", 24, 4, 2, 16)
LIMITS = Limits(1, 100e9, {MIB: 100e9, 100 * MIB: 10e9})


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_are_well_formed(name):
    workloads = SELECTIONS[name]
    names = [workload.name for workload in workloads]
    every_name = {workload.name for workload in SELECTIONS["all"]}
    assert names and len(set(names)) == len(names)
    for workload in workloads:
        assert workload.name in every_name
        assert workload.cache in CACHE_BITS and workload.feature in FEATURES
        assert workload.heads % workload.kv_heads == 0
        assert workload.is_gemm or 1 <= workload.tokens <= min(workload.totals)
        assert workload.flops > 0 and workload.read_bytes > 0 and re.fullmatch(r"[a-z0-9_]+", workload.name)


@pytest.mark.parametrize(
    ("workload", "name", "flops", "read_bytes"),
    [
        # 4096 keys, 16 heads, 4 operations for each of 128 columns; 8 heads of 4096 rows of 128 bytes, twice
        (decode("i8", 4096), "decode_i8_t4096_n16_kv8_h128", 4096 * 16 * 4 * 128, 2 * 8 * 4096 * 128),
        # 1 + 2 + 3 keys
        (prefill("i4", 3, 2, 1, 8), "prefill_i4_s3_n2_kv1_h8", 6 * 2 * 4 * 8, 2 * 3 * 4),
        # tokens at positions 8 and 9 see 9 and 10 keys, or 4 each, of 5 rows
        (Workload("chunk", "f32", 2, 10, 1, 1, 8), "chunk_f32_s2_t10_n1_kv1_h8", 19 * 32, 2 * 10 * 32),
        (
            Workload("chunk", "f32", 2, 10, 1, 1, 8, window=4),
            "chunk_f32_s2_t10_n1_kv1_h8_w4",
            8 * 32,
            2 * 5 * 32,
        ),
        # entries of 8 and 6 keys
        (
            decode("f16", 8, 2, 2, 4, query="f16", batch=2, ragged=True),
            "decode_f16_f16_t8_n2_kv2_h4_b2_ragged",
            14 * 2 * 16,
            2 * 2 * 14 * 8,
        ),
        (Workload("qk_gemm", "i4", 3, 5, 1, 1, 8), "qk_gemm_i4_m3_n5_k8", 2 * 3 * 5 * 8, 5 * 4),
    ],
)
def test_work_by_hand(workload, name, flops, read_bytes):
    assert (workload.name, workload.flops, workload.read_bytes) == (name, flops, read_bytes)


def test_cold_caches_do_not_fit():
    cold = decode("i8", 4096, cold=True)
    assert cold.name.endswith("_cold") and cold.copies == 12 and cold.working_set == 12 * cold.read_bytes
    assert decode("i8", 4096).working_set == cold.read_bytes


def test_limits():
    assert LIMITS.bandwidth(1) == 100e9 and LIMITS.bandwidth(1000 * MIB) == 10e9
    assert LIMITS.bandwidth(10 * MIB) == pytest.approx(10**10.5)
    assert LIMITS.seconds(1e9, MIB, MIB) == 0.01
    assert LIMITS.seconds(1, 10**9, 100 * MIB) == 0.1


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", [decode, prefill], ids=["decode", "prefill"])
def test_every_feature_passes_the_gate(shape, feature):
    workload = shape("i8", 20, 4, 2, 16, feature=feature)
    call = make_call(workload)
    contenders = operator_contenders(workload, [call], 1)
    assert [c.name for c in gate.check_operator(workload, call, contenders)] == [c.name for c in contenders]


@pytest.mark.parametrize(
    "workload",
    [
        *(decode(cache, 20, 4, 2, 16, query="f16" if cache == "f16" else "f32") for cache in CACHE_BITS),
        decode("f16", 20, 4, 2, 16),
        chunk("i4c", 3, 20),
        decode("i8", 20, 4, 2, 16, batch=3, ragged=True),
        decode("i8", 20, 4, 2, 16, window=4),
    ],
    ids=lambda workload: workload.name,
)
def test_large_calls_are_compared_with_another_path(workload, monkeypatch):
    monkeypatch.setattr(gate, "_REFERENCE_FLOPS", 0)
    call = make_call(workload)
    contenders = operator_contenders(workload, [call], 1)
    if len(contenders) == 1:
        with pytest.raises(gate.WrongResult, match="nothing to compare with"):
            gate.check_operator(workload, call, contenders)
    else:
        assert gate.check_operator(workload, call, contenders) == contenders


def _with_fault(contender, call, fault):
    """The contender, wrong in its output or in the cache."""

    def spoil():
        contender.runs[0]()
        if fault == "cache":
            call.inputs["past_value"][0, 0, SMALL.total - 1, 0] += 1

    error = {"output": 1e-3, "nan": np.nan, "cache": 0.0}[fault]
    return Contender(contender.name, [spoil], lambda: contender.output() + np.float32(error), keep=[contender])


@pytest.mark.parametrize("fault", ["output", "nan", "cache"])
@pytest.mark.parametrize("limit", [0, 10**9], ids=["other path", "reference"])
def test_a_wrong_result_is_refused(fault, limit, monkeypatch):
    monkeypatch.setattr(gate, "_REFERENCE_FLOPS", limit)
    call = make_call(SMALL)
    ours, *others = operator_contenders(SMALL, [call], 1)
    wrong = _with_fault(ours, call, fault)
    if limit == 0 and not others:
        pytest.skip("a path to compare with needs onnxruntime, which has no wheel for this Python")
    with pytest.raises(gate.WrongResult, match=r"gqa_tvm: (off by|the rows)"):
        gate.check_operator(SMALL, call, [wrong, *others])
    # A wrong competitor is left out.
    competitor = _with_fault(ours, call, fault)
    competitor.name = ORT_FLASH
    right = gate.check_operator(SMALL, call, [ours, competitor, *others])
    assert competitor not in right and ours in right


def test_an_inexact_result_has_a_tolerance_of_its_own(capsys):
    call = make_call(SMALL)
    ours = operator_contenders(SMALL, [call], 1)[0]

    def inexact(name, part):
        def output():
            got = ours.output()
            return got + np.float32(part) * np.abs(got).max()

        return Contender(name, ours.runs, output, writes_cache=False, tolerance=0.02)

    near, far = inexact("torch inexact", 0.019), inexact("vllm inexact", 0.021)
    assert gate.check_operator(SMALL, call, [ours, near, far]) == [ours, near]
    assert "left out: vllm inexact: off by" in capsys.readouterr().err


@pytest.mark.parametrize("operation", ["qk_gemm", "sv_gemm"])
def test_a_wrong_product_is_refused(operation):
    workload = Workload(operation, "i8c", 2, 24, 1, 1, 16)
    gemms = [make_gemm(workload)]
    contenders = run.gemm_contenders(workload, gemms, 1)
    gate.check_gemm(workload, gemms[0], contenders)
    wrong = Contender(OURS, contenders[0].runs, lambda: contenders[0].output() * np.float32(1.001))
    with pytest.raises(gate.WrongResult):
        gate.check_gemm(workload, gemms[0], [wrong])


def test_wrong_rows_are_not_printed(monkeypatch, capsys, tmp_path):
    def wrong(workload, call, contenders):
        raise gate.WrongResult("gqa_tvm: off by 1")

    monkeypatch.setattr(run, "check_operator", wrong)
    monkeypatch.setattr(run, "measure_limits", lambda threads: LIMITS)
    monkeypatch.setattr(run, "SELECTIONS", {"quick": (SMALL,)})
    path = tmp_path / "results.jsonl"
    assert run.main(["--json", str(path)]) == 1
    assert [record["kind"] for record in report.read_records(path)] == ["machine", "limits"]
    assert "|" not in capsys.readouterr().out


def test_a_run_writes_what_it_prints(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "measure_limits", lambda threads: LIMITS)
    monkeypatch.setattr(run, "SELECTIONS", {"quick": (SMALL, decode("i8", 12, 4, 2, 16))})
    path = tmp_path / "results.jsonl"
    assert run.main(["--json", str(path), "--filter", "t24", "--seconds-per-row", "0"]) == 0
    machine, limits, row = report.read_records(path)
    assert machine["line"] in capsys.readouterr().out and limits["flops"] == LIMITS.flops
    assert row["name"] == SMALL.name and row["seconds"][OURS]["samples"] == MIN_ROUNDS
    assert run.main(["--filter", "no such row"]) == 2


@pytest.mark.parametrize(
    ("patience", "busy", "kept"), [(0, [0.6], 0.6), (60, [0.0], 0.0), (60, [0.6, 0.3, 0.01], 0.01)]
)
def test_disturbed_rows_are_sampled_again(monkeypatch, patience, busy, kept):
    calls = iter(busy)
    monkeypatch.setattr(run, "watched", lambda work: (work(), next(calls)))
    monkeypatch.setattr(run, "wait_until_calm", lambda deadline: None)
    options = argparse.Namespace(seconds_per_row=0, patience=patience, peers=[])
    assert run.measure(SMALL, LIMITS, options)["others"] == kept
    assert list(calls) == []


def test_others_are_seen():
    """A process that computes all the time keeps a core busy; this one waits for it and does not count."""
    command = [sys.executable, "-c", "import time; end = time.time() + 0.5\nwhile time.time() < end: pass"]
    result, others = disturbance.watched(lambda: subprocess.run(command, check=False).returncode)
    assert result == 0 and others > 0.2


def test_turns_are_taken():
    calls = []

    def contender(name, copies):
        runs = [lambda c=copy: calls.append((name, c)) for copy in range(copies)]
        return Contender(name, runs, lambda: np.zeros(1))

    samples = sample([contender("a", 2), contender("b", 2)], 0)
    assert {name: len(values) for name, values in samples.items()} == {"a": MIN_ROUNDS, "b": MIN_ROUNDS}
    first = {name: next(copy for n, copy in calls if n == name) for name in "ab"}
    assert first == {"a": 0, "b": 1}


def test_threads_get_their_rest(monkeypatch):
    rests = []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    sample(
        [Contender(name, [lambda: None], lambda: np.zeros(1), rest=rest) for name, rest in (("a", 0), ("b", 0.5))], 0
    )
    assert rests == [0.5] * (MIN_ROUNDS + 1)


def test_spread():
    assert Spread.of([4.0]) == (4.0, 4.0, 4.0, 1)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0, 4.0, 5)


PEER_SAMPLES = {"vllm": [0.001] * 2, "openvino inexact bf16": [0.003, 0.005], "torch": [0.004] * 2}


def _records(threads=1):
    limits = Limits(threads, 100e9, {8 * MIB: 100e9, 256 * MIB: 10e9})
    rows = []
    for tokens in (512, 1024):
        samples = {OURS: [0.010, 0.011], OURS_NAIVE: [0.020] * 2, ORT_FLASH: [0.030] * 2, ORT_NAIVE: [0.040] * 2}
        rows.append(report.row_record(prefill("i8", tokens), limits, samples))
        samples = {OURS: [0.002, 0.002], ORT_FLASH: [0.003] * 2, ORT_NAIVE: [0.001, 0.001], **PEER_SAMPLES}
        rows.append(report.row_record(decode("f32", tokens), limits, samples))
    return [report.machine_record(), report.limits_record(limits), *json.loads(json.dumps(rows))]


def test_rows_are_compared_with_the_better_path():
    rows = _records()[2:]
    assert rows[0]["best_onnxruntime"] == ORT_FLASH and rows[1]["best_onnxruntime"] == ORT_NAIVE
    assert rows[0]["ratio"]["median"] == pytest.approx((3 + 30 / 11) / 2) and rows[1]["ratio"]["median"] == 0.5
    assert {name: ratio["median"] for name, ratio in rows[1]["peer_ratios"].items()} == {
        **{"vllm": 0.5, "openvino inexact bf16": 2, "torch": 2}
    }
    assert rows[0]["peer_ratios"] == {}
    # 1,075,838,976 operations at 100e9 a second
    assert rows[0]["limit"] == pytest.approx(0.01075838976)


def test_table():
    lines = report.row_table(_records()[2:4]).splitlines()
    assert lines[0].startswith("| row | ms |") and lines[0].endswith(
        "| torch ratio | openvino inexact bf16 ratio | vllm ratio |"
    )
    assert len({line.count("|") for line in lines}) == 1
    assert (
        lines[2] == "| `prefill_i8_s512_n16_kv8_h128` | 10.5 | 2 | 30.0 flash | 2.86 | 0.100 | 102 | 102 | - | - | - |"
    )
    assert lines[3].startswith("| `decode_f32_t512_n16_kv8_h128` | 2.00 | 0 | 1.00 naive | **0.50** | 2.10 |")
    assert lines[3].endswith("| 2.00 | 2.00 | **0.50** |")


def test_documents_are_rewritten():
    text = (
        "a\n<!-- begin rows threads=1 match=^prefill -->\nold\n<!-- end -->\nb\n<!-- begin losses -->\n<!-- end -->\n"
    )
    new = document.rewrite(text, _records())
    assert "old" not in new and new.count("| `prefill_i8") == 2
    assert "0 of 2 rows" in new and document.rewrite(new, _records()) == new
    assert "Not measured." in document.rewrite(text.replace("^prefill", "^chunk"), _records())
    with pytest.raises(ValueError, match="unknown section"):
        document.rewrite(text.replace("losses", "wins"), _records())


def test_documents_show_losses_and_peers():
    records = _records()
    for record in records[2:]:
        record.pop("peer_ratios", None)
    losses = document.rewrite("<!-- begin losses -->\n<!-- end -->", records)
    assert "2 of 4 rows" in losses and losses.count("`decode_f32_t512_n16_kv8_h128`, threads 1: 0.50") == 1
    shown = document.rewrite("<!-- begin peers threads=1 match=_t512_ -->\n<!-- end -->", _records())
    assert shown.count("| `decode_f32") == 1 and "prefill" not in shown


def test_memory_table():
    peaks = {"gqa_tvm flash": -4096, "gqa_tvm naive": MIB, ORT_FLASH: 33 * MIB, ORT_NAIVE: 300 * MIB}
    record = {"kind": "memory", "name": "x", "threads": 1, "peak_bytes": peaks, "scratch_bytes": {}}
    assert report.memory_table([record]).splitlines()[2] == "| `x` | 1 | 0.000 | - | 1.00 | - | 33.0 | 300 |"


def test_pictures_are_valid(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in [*_records(), *_records(2)[1:]]))
    assert plot.main([str(tmp_path / "pictures"), str(path)]) == 0
    drawn = sorted(file.name for file in (tmp_path / "pictures").iterdir())
    # No decode row of an INT8 cache: that picture is left out.
    assert drawn == sorted(
        f"{name}_{threads}.svg"
        for name in ("decode_latency", "naive_against_flash_prefill", "roofline", "speed_up")
        for threads in (1, 2)
    )
    for name in drawn:
        root = ElementTree.parse(tmp_path / "pictures" / name).getroot()
        assert root.tag.endswith("svg") and not re.search("nan|inf", ElementTree.tostring(root, "unicode").lower())


@pytest.mark.parametrize(("threads", "selection"), [("1", "documentation"), ("2", "scaling")])
def test_documented_rows_are_measured(threads, selection):
    """Every table of docs/performance.md asks for rows that its selection has."""
    names = [workload.name for workload in SELECTIONS[selection]]
    expressions = re.findall(rf"<!-- begin (?:rows|peers) threads={threads} match=(\S+) -->", DOCUMENT.read_text())
    assert expressions
    for expression in expressions:
        assert any(re.search(expression, name) for name in names), expression


def test_callers_at_once(monkeypatch, capsys):
    """Every caller has a call of its own, and all of them are counted."""
    monkeypatch.setattr(callers, "WORKLOADS", (SMALL,))
    found = callers.callers_of(SMALL, 2)
    assert OURS in found and all(len(set(map(id, runs))) == 2 for runs in found.values())
    seen = []
    rate = callers.rate_of([lambda: seen.append(0), lambda: seen.append(1)], 0.01)
    assert set(seen) == {0, 1} and rate.calls > 0 and rate.cpu > 0
    assert callers.main(["--callers", "1", "2", "--seconds-per-row", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [[f"| `{SMALL.name}`", "1"], [f"| `{SMALL.name}`", "2"]]
    assert callers.main(["--filter", "no such row"]) == 2


def test_row_of_callers():
    ours = [callers.Rate(calls, 2.5e-6) for calls in (2400.0, 3000.0, 3600.0)]
    samples = {ORT_FLASH: [callers.Rate(1000.0, 1.0)], ORT_NAIVE: [callers.Rate(1500.0, 5e-3)], OURS: ours}
    row = callers.row_of(SMALL, 2, samples)
    assert row == f"| `{SMALL.name}` | 2 | 3,000 | 10 | 2.5 | 1,500 | 5,000 | 2.00 |"
    assert callers.row_of(SMALL, 1, {OURS: ours}).endswith("| 2.5 | - | - | - |")
