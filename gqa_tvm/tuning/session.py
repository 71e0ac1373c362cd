"""A tuning run: search, check, measure twice, decide and write, task by task."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..schedules.block_sizes import BlockSizes
from ..tuned_sizes import TunedRecord
from .decide import Choice, Times, accepted, gain, geometric_mean, mean_gain, worth_repeating
from .fields import recorded_fields
from .task import Cell, Task

# Outer points that are searched at every length, and candidates that are measured in the operator.
_KEPT_POINTS = 2
_FINALISTS = 8
_PER_WORKLOAD = 2
_LEAST_TRIALS = 2
# Share of a task's time for the search; the rest is for measuring what it found.
_SEARCH_SHARE = 0.7

# A database folder of one workload, and the decisions of a record in it.
Source = tuple[Path, tuple[int, ...]]


@dataclass(frozen=True)
class Candidate:
    """Sizes that a search has found, its seconds for them, and where they are recorded."""

    sizes: BlockSizes
    seconds: float
    source: Source | None = None


@dataclass
class Found:
    """Of a search: candidates, fastest first; trials: measured now; failures by kind, with the first one's reason."""

    candidates: list[Candidate] = field(default_factory=list)
    trials: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first_reason: str = ""

    def fail(self, kind: str, reason: str) -> None:
        """Count a failure; reason: its last line is kept."""
        lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
        self.failures[kind] += 1
        self.first_reason = self.first_reason or f"{kind}: {lines[-1][:300] if lines else 'no reason given'}"


class Searcher(Protocol):
    """Finds candidates."""

    def points(self, task: Task) -> list[BlockSizes]:
        """The outer grid, the default first."""

    def chunk_variants(self, task: Task, sizes: BlockSizes) -> list[BlockSizes]:
        """Sizes that need no search of their own: the same code with another grain."""

    def search(
        self, task: Task, point: BlockSizes, total: int, trials: int, deadline: float, progress: Callable[[int], None]
    ) -> Found:
        """Candidates of an outer point at T = total, up to `trials` with those of earlier runs."""


class Bench(Protocol):
    """Judges candidates."""

    def check(self, task: Task, sizes: BlockSizes) -> str | None:
        """Why a candidate is wrong; None if it is right."""

    def measure(self, task: Task, cell: Cell, candidates: Sequence[BlockSizes]) -> list[float]:
        """Seconds of each; the first is the default."""


class Log(Protocol):
    """Keeps results."""

    def add(self, records: Sequence[TunedRecord], sources: Sequence[Source]) -> None:
        """Write the records of a task."""


@dataclass
class Summary:
    """measured: candidates with a time; right: of those that were checked; failures: by kind.

    accepted, records: of the shapes written. gains: their speed in the default's. outcomes: a line for every task.
    """

    tasks: int = 0
    skipped: int = 0
    measured: int = 0
    right: int = 0
    accepted: int = 0
    records: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first_reason: str = ""
    interrupted: bool = False
    gains: list[float] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)

    def absorb(self, found: Found) -> None:
        self.measured += len(found.candidates)
        self.failures += found.failures
        self.first_reason = self.first_reason or found.first_reason

    @property
    def found_nothing(self) -> bool:
        """Whether no candidate of any task could be used at all."""
        checked = self.right + self.failures["check"] + self.failures["result"]
        return self.tasks > 0 and (self.measured == 0 or (checked > 0 and self.right == 0))


class Session:
    """trials: candidates a task, over its outer points and lengths. deadline: of time.monotonic().

    report: called with (candidates done, what is going on). interrupted: whether the user asked for the end; compiled
    code that is interrupted may raise anything.
    """

    def __init__(
        self,
        searcher: Searcher,
        bench: Bench,
        log: Log,
        trials: int,
        deadline: float,
        report: Callable[[int, str], None],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.searcher, self.bench, self.log, self.interrupted = searcher, bench, log, interrupted
        self.trials, self.deadline, self.report = trials, deadline, report
        self.summary = Summary()

    def run(self, tasks: Sequence[Task], finished: Callable[[Task], None] = lambda task: None) -> Summary:
        """Tune every task for which there is time. finished: called after each that was searched to the
        end. An interrupt ends the run; what was accepted before stays written."""
        try:
            for number, task in enumerate(tasks):
                now = time.monotonic()
                if now >= self.deadline:
                    break
                share = (self.deadline - now) / (len(tasks) - number)
                self.summary.tasks += 1
                search_end = now + _SEARCH_SHARE * share
                candidates = self._search(task, search_end)
                complete = time.monotonic() < search_end
                if self._survives("measure", lambda: self._judge(task, candidates)) and complete:  # noqa: B023
                    finished(task)
        except KeyboardInterrupt:
            self.summary.interrupted = True
        return self.summary

    def _survives(self, kind: str, work: Callable[[], None]) -> bool:
        """Whether `work` ends well; a failure is counted, and ends the run only after an interrupt."""
        try:
            work()
        except Exception as error:  # TVM raises any kind
            if self.interrupted():
                raise KeyboardInterrupt from error
            found = Found()
            found.fail(kind, str(error) or repr(error))
            self.summary.absorb(found)
            return False
        return True

    def _search(self, task: Task, deadline: float) -> list[Candidate]:
        """Finalists: every outer point at the middle length, then the best ones and the default at all lengths."""
        points = self.searcher.points(task)
        middle, *others = task.search_order
        share = 2 if others else 1
        first = max(_LEAST_TRIALS, self.trials // (share * len(points)))
        found = {point: [self._find(task, point, middle, first, deadline)] for point in points}
        ranked = sorted((p for p in points if found[p][0]), key=lambda p: found[p][0][0].seconds)
        kept = list(dict.fromkeys([*ranked[:_KEPT_POINTS], *(points[:1] if found[points[0]][0] else [])]))
        left = self.trials - first * len(points)
        for total in others:
            for point in kept:
                more = max(_LEAST_TRIALS, left // (len(others) * len(kept)))
                found[point].append(self._find(task, point, total, more, deadline))
        return _finalists([searched for point in kept for searched in found[point]])

    def _find(self, task: Task, point: BlockSizes, total: int, trials: int, deadline: float) -> list[Candidate]:
        def progress(count: int) -> None:
            self.report(count, f"{task.name} T={total}")

        found = Found()

        def search() -> None:
            nonlocal found
            found = self.searcher.search(task, point, total, trials, deadline, progress)

        self._survives("schedule", search)
        self.summary.absorb(found)
        if found.candidates:
            best = 1e6 * found.candidates[0].seconds
            self.report(0, f"{task.name} T={total}, best {best:.0f} us")
        return found.candidates

    def _judge(self, task: Task, finalists: Sequence[Candidate]) -> None:
        """Check, measure, decide, write."""
        if not finalists:
            self.summary.outcomes.append(f"{task.name}: nothing found")
            return
        default = self.searcher.points(task)[0]
        sources = {candidate.sizes: candidate.source for candidate in finalists}
        wanted = [candidate.sizes for candidate in finalists]
        for other in self.searcher.chunk_variants(task, wanted[0]):
            wanted.append(other)
            sources.setdefault(other, sources.get(wanted[0]))
        others = [sizes for sizes in dict.fromkeys(wanted) if sizes != default]
        candidates = [default, *(sizes for sizes in others if self._is_right(task, sizes))]
        if len(candidates) == 1:
            self.summary.outcomes.append(f"{task.name}: the default stays, no other candidate is left")
            return
        first: Times = {cell: self._measure(task, cell, candidates) for cell in task.cells}
        proposed = worth_repeating(candidates, first, _KEPT_POINTS)
        for choice in proposed:
            second = {cell: self._again(task, cell, candidates, index) for cell, index in choice.items()}
            kept = accepted(candidates, choice, first, second)
            if kept is not None:
                self._write(task, candidates, kept, second, sources)
                return
        best = (
            f", {mean_gain(first, proposed[0]):.3f} times its speed was not enough or not repeated" if proposed else ""
        )
        self.summary.outcomes.append(f"{task.name}: the default stays{best}")

    def _is_right(self, task: Task, sizes: BlockSizes) -> bool:
        self.report(0, f"{task.name} checking")
        reason: str | None = None

        def check() -> None:
            nonlocal reason
            reason = self.bench.check(task, sizes)

        if not self._survives("check", check):
            return False
        if reason is None:
            self.summary.right += 1
            return True
        failed = Found()
        failed.fail("result", reason)
        self.summary.absorb(failed)
        return False

    def _measure(self, task: Task, cell: Cell, candidates: Sequence[BlockSizes]) -> list[float]:
        self.report(0, f"{task.name} T={cell.total} measuring")
        return self.bench.measure(task, cell, candidates)

    def _again(self, task: Task, cell: Cell, candidates: Sequence[BlockSizes], index: int) -> list[float]:
        """The second measurement of a cell: of the default and the candidate alone; entries of others are unused."""
        default, own = self._measure(task, cell, [candidates[0], candidates[index]])
        times = [0.0] * len(candidates)
        times[index] = own
        times[0] = default
        return times

    def _write(
        self,
        task: Task,
        candidates: Sequence[BlockSizes],
        kept: Choice,
        second: Times,
        sources: dict[BlockSizes, Source | None],
    ) -> None:
        records = []
        for cell, index in kept.items():
            default, own = second[cell][0], second[cell][index]
            sizes = recorded_fields(task.spec, candidates[index])
            records.append(
                TunedRecord(
                    *(task.spec.name, task.group_size, cell.total, cell.threads, sizes),
                    *(round(1e6 * default, 2), round(1e6 * own, 2), self.trials),
                )
            )
            self.summary.accepted += bool(index)
        chosen = {candidates[index] for index in kept.values() if index}
        self.log.add(records, [source for sizes in chosen if (source := sources.get(sizes)) is not None])
        self.summary.records += len(records)
        gains = [gain(second, cell, index) for cell, index in kept.items()]
        self.summary.gains += gains
        self.summary.outcomes.append(f"{task.name}: {geometric_mean(gains):.3f} times the default's speed")


def _finalists(searches: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """The fastest of every search, then the second ones: each sizes once."""
    unique: dict[BlockSizes, Candidate] = {}
    for rank in range(_PER_WORKLOAD):
        for searched in searches:
            for candidate in searched[rank : rank + 1]:
                unique.setdefault(candidate.sizes, candidate)
    return list(unique.values())[:_FINALISTS]
