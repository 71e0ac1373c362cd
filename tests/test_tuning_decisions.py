"""Which candidates a tuning run takes, with searches and measurements that tests make up."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from gqa_tvm.schedules.block_sizes import BlockSizes, default_block_sizes

from gqa_tvm.errors import BuildError
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.targets import family_facts, find_target
from gqa_tvm.tuned_sizes import SizesTable, TunedRecord
from gqa_tvm.tuning.decide import accepted, proposals
from gqa_tvm.tuning.fields import recorded_fields
from gqa_tvm.tuning.logs import SizesLog
from gqa_tvm.tuning.session import Candidate, Found, Session
from gqa_tvm.tuning.task import Cell, Task

TARGET = find_target("x86-avx512", "x86-64")
DEFAULT = default_block_sizes(family_facts(TARGET))
UNROLLED = replace(DEFAULT, decode_sv_unroll=8)
LONG_BLOCKS = replace(DEFAULT, decode_kv_block=256)
TASK = Task(KernelSpec.parse("flash_decode_f32_f32_h64_r1"), 1, (512, 4096), (1,))
SHORT, LONG = TASK.cells


class FakeSearcher:
    """Finds the same sizes everywhere; fails: what every search says, found: None for searches without a result."""

    def __init__(self, found: Sequence[BlockSizes], error: Exception | None = None, failures: int = 0) -> None:
        self.found, self.error, self.failures = found, error, failures
        self.searches: list[tuple[int, int]] = []

    def points(self, task):
        return [DEFAULT]

    def chunk_variants(self, task, sizes):
        return []

    def search(self, task, point, total, trials, deadline, progress):
        self.searches.append((total, trials))
        if self.error is not None:
            raise self.error
        found = Found([Candidate(sizes, 1e-3) for sizes in self.found], len(self.found))
        for _ in range(self.failures):
            found.fail("build", "Traceback\n  linker not found")
        progress(found.trials)
        return found


class FakeBench:
    """speeds: the default's seconds over a candidate's, one list entry for each measurement of a cell."""

    def __init__(self, speeds: dict[BlockSizes, dict[Cell, list[float]]], wrong: Sequence[BlockSizes] = ()) -> None:
        self.speeds, self.wrong = speeds, wrong
        self.measured: dict[Cell, int] = {}

    def check(self, task, sizes):
        return "wrong result: error 0.5" if sizes in self.wrong else None

    def measure(self, task, cell, candidates):
        turn = self.measured.get(cell, 0)
        self.measured[cell] = turn + 1
        speed = lambda sizes: self.speeds.get(sizes, {}).get(cell, [1.0, 1.0])[turn]  # noqa: E731
        return [1e-3 / speed(sizes) if speed(sizes) else 0.0 for sizes in candidates]


class FakeLog:
    def __init__(self) -> None:
        self.records: list[TunedRecord] = []

    def add(self, records, sources):
        self.records += records


def tune(searcher, bench, tasks=(TASK,), deadline=math.inf):
    log = FakeLog()
    session = Session(searcher, bench, log, 16, deadline, lambda count, text: None)
    return session.run(tasks), log.records


def speeds(short: list[float], long: list[float]) -> dict[Cell, list[float]]:
    return {SHORT: short, LONG: long}


@pytest.mark.parametrize(
    "sizes,short,long,taken",
    [
        pytest.param(UNROLLED, [1.1, 1.1], [1.2, 1.2], (True, True), id="faster"),
        pytest.param(UNROLLED, [1.1, 1.1], [1.01, 1.2], (True, False), id="below the margin in one cell"),
        pytest.param(UNROLLED, [1.1, 1.1], [1.2, 0.9], (True, False), id="not repeated in one cell"),
        pytest.param(UNROLLED, [1.1, 1.0], [1.2, 1.0], None, id="not repeated"),
        pytest.param(UNROLLED, [0.9, 0.9], [1.0, 1.0], None, id="slower"),
        pytest.param(UNROLLED, [0.0, 0.0], [0.0, 0.0], None, id="no time has passed"),  # B133
        pytest.param(LONG_BLOCKS, [1.1, 1.1], [1.2, 1.2], (True, True), id="another order, faster"),
        pytest.param(LONG_BLOCKS, [1.0, 1.0], [1.2, 1.2], (True, True), id="another order, not slower anywhere"),
        pytest.param(LONG_BLOCKS, [0.95, 0.95], [1.5, 1.5], None, id="another order, slower in one cell"),
    ],
)
def test_what_is_taken(sizes, short, long, taken):
    summary, records = tune(FakeSearcher([sizes]), FakeBench({sizes: speeds(short, long)}))
    defaults = recorded_fields(TASK.spec, DEFAULT)
    assert [record.sizes != defaults for record in records] == list(taken or ())
    assert [record.total for record in records] == ([512, 4096] if taken else [])
    assert summary.accepted == sum(taken or ())
    SizesTable(DEFAULT, records)


def test_one_order_of_additions_for_all_cells():
    """The fastest candidate of each cell would add in two orders: one of them serves both."""
    bench = FakeBench({UNROLLED: speeds([1.3, 1.3], [1.0, 1.0]), LONG_BLOCKS: speeds([1.1, 1.1], [1.5, 1.5])})
    _, records = tune(FakeSearcher([UNROLLED, LONG_BLOCKS]), bench)
    assert [record.sizes["decode_kv_block"] for record in records] == [256, 256]


def test_a_proposal_that_fails_leaves_room_for_the_next_order():
    bench = FakeBench({UNROLLED: speeds([1.1, 1.0], [1.1, 1.1]), LONG_BLOCKS: speeds([1.3, 0.8], [1.3, 0.8])})
    bench.speeds[UNROLLED] = speeds([1.1, 1.0, 1.1], [1.1, 1.0, 1.1])
    bench.speeds[LONG_BLOCKS] = speeds([1.3, 0.8, 0.8], [1.3, 0.8, 0.8])
    bench.speeds[DEFAULT] = speeds([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    _, records = tune(FakeSearcher([UNROLLED, LONG_BLOCKS]), bench)
    assert [record.sizes["decode_sv_unroll"] for record in records] == [8, 8]


def test_wrong_numbers_are_never_taken():
    bench = FakeBench({UNROLLED: speeds([2.0, 2.0], [2.0, 2.0])}, wrong=[UNROLLED])
    summary, records = tune(FakeSearcher([UNROLLED, replace(DEFAULT, key_vectors=1)]), bench)
    assert not records and summary.failures == {"result": 1} and not summary.found_nothing


@pytest.mark.parametrize(
    "searcher,failures,reason",
    [
        (FakeSearcher([], failures=3), {"build": 3}, "build: linker not found"),  # B126
        (FakeSearcher([], ValueError("ScheduleError: not affine")), {"schedule": 1}, "schedule: ScheduleError"),  # B127
    ],
    ids=["every candidate fails", "the schedule fails"],
)
def test_nothing_found_is_said_with_the_reason(searcher, failures, reason):
    summary, records = tune(searcher, FakeBench({}), (replace(TASK, totals=(512,)),))
    assert summary.found_nothing and not records
    assert summary.failures == failures and reason in summary.first_reason


def test_a_task_that_fails_does_not_end_the_run():  # B127
    class OneFails(FakeSearcher):
        def search(self, task, point, *rest):
            if task.group_size == 1:
                raise RuntimeError("cannot be scheduled")
            return super().search(task, point, *rest)

    other = replace(TASK, spec=replace(TASK.spec, row_tile=2), group_size=2)
    bench = FakeBench({UNROLLED: speeds([1.2] * 2, [1.2] * 2)})
    summary, records = tune(OneFails([UNROLLED]), bench, (TASK, other))
    assert {record.group_size for record in records} == {2} and not summary.found_nothing


def test_an_interrupt_keeps_what_was_accepted():
    class Interrupted(FakeSearcher):
        def search(self, task, *rest):
            if task.group_size == 2:
                raise KeyboardInterrupt
            return super().search(task, *rest)

    other = replace(TASK, spec=replace(TASK.spec, row_tile=2), group_size=2)
    summary, records = tune(Interrupted([UNROLLED]), FakeBench({UNROLLED: speeds([1.2] * 2, [1.2] * 2)}), (TASK, other))
    assert summary.interrupted and {record.group_size for record in records} == {1}


def test_no_task_begins_after_the_deadline():
    searcher = FakeSearcher([UNROLLED])
    summary, _ = tune(searcher, FakeBench({}), deadline=0.0)
    assert summary.tasks == 0 and not searcher.searches


def test_trials_are_shared_out():
    searcher = FakeSearcher([UNROLLED])
    tune(searcher, FakeBench({}))
    assert searcher.searches == [(4096, 8), (512, 8)]


def test_every_length_sends_its_best_candidates():
    class ByLength(FakeSearcher):
        def search(self, task, point, total, *rest):
            return Found([Candidate(replace(DEFAULT, decode_sv_unroll=n), n * 1e-3) for n in self.by_total[total]])

    searcher = ByLength([])
    searcher.by_total = {4096: (1, 2, 16), 512: (8, 32)}
    checked: list[int] = []
    bench = FakeBench({})
    bench.check = lambda task, sizes: checked.append(sizes.decode_sv_unroll)
    tune(searcher, bench)
    assert checked == [1, 8, 2, 32]


def test_default_and_candidate_of_the_same_order_need_no_agreement():
    times = {SHORT: [1.0, 0.5], LONG: [1.0, 2.0]}
    choice = proposals([DEFAULT, UNROLLED], times)[0]
    assert choice == {SHORT: 1, LONG: 0}
    assert accepted([DEFAULT, UNROLLED], choice, times, times) == choice


def record(total: int, sizes: dict[str, object], group_size: int = 1) -> TunedRecord:
    return TunedRecord(TASK.spec.name, group_size, total, 1, sizes, 2.0, 1.0, 8)


def test_logs_replace_what_they_contradict(tmp_path):
    log = SizesLog(tmp_path, TARGET, DEFAULT)
    log.merge([record(512, {"decode_kv_block": 256}), record(4096, {"decode_kv_block": 256})], {"cpu": "a"})
    log.merge([record(4096, {}, group_size=2)], {"cpu": "a"})
    again = SizesLog(tmp_path, TARGET, DEFAULT)
    again.merge([record(512, {"decode_sv_unroll": 8})], {"cpu": "b"})
    content = json.loads(again.path.read_text())
    assert content["cpu"] == "b" and content["target"] == "x86-avx512"
    assert [(r["group_size"], r["total"], r["sizes"]) for r in content["records"]] == [
        (1, 512, {"decode_sv_unroll": 8}),
        (2, 4096, {}),
    ]
    SizesTable(DEFAULT, SizesLog(tmp_path, TARGET, DEFAULT).records)


@pytest.mark.parametrize(
    "content,message",
    [
        ("{", "not a table"),
        ('{"target": "x86-avx2", "architecture": "x86-64", "records": []}', "of x86-avx2 on x86-64"),
    ],
)
def test_logs_of_another_target_or_broken_ones_stay_as_they_are(tmp_path, content, message):
    file = tmp_path / "x86-avx512" / "block_sizes.json"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(BuildError, match=message):
        SizesLog(tmp_path, TARGET, DEFAULT)
    assert file.read_text() == content
