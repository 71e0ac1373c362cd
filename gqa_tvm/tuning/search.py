"""MetaSchedule over one static workload: candidates in batches, until trials, time or the space are used up."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tvm
from tvm.s_tir import meta_schedule as ms

from ..kernels import KernelSpec
from ..lowering import apply_schedule, multiplies_digits
from ..schedules.block_sizes import BlockSizes
from ..targets import Target, TargetFacts, llvm_target
from .compile import builder_function, export_candidate
from .cost_model import make_cost_model
from .space import SampledSizes, inner_candidates
from .strategy import SampledSearch, decisions
from .task import Shape
from .workload import static_module

_BATCH = 8
_BUILD_SECONDS = 120.0
# What MetaSchedule writes for a run that failed.
_FAILED = 1e10


@dataclass(frozen=True)
class SearchOptions:
    """strategy: "evolutionary" or "replay-trace"; cost_model: "xgb" or "random"."""

    strategy: str = "evolutionary"
    cost_model: str = "xgb"
    seed: int = 1


@dataclass
class SearchResult:
    """found: sizes with the median seconds of their run, best first; trials: measured now; failures: by kind."""

    found: list[tuple[BlockSizes, float]] = field(default_factory=list)
    trials: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first_reason: str = ""

    def fail(self, kind: str, reason: str) -> None:
        self.failures[kind] += 1
        self.first_reason = self.first_reason or f"{kind}: {_last_line(reason)}"


def _last_line(reason: str) -> str:
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"


@dataclass(frozen=True)
class Workload:
    """A point of the outer grid for one call."""

    spec: KernelSpec
    sizes: BlockSizes
    shape: Shape
    target: Target
    facts: TargetFacts

    def module(self) -> tvm.IRModule:
        return static_module(self.spec, self.sizes, self.shape)

    def tvm_target(self) -> tvm.target.Target:
        return tvm.target.Target({**llvm_target(self.target), "num-cores": max(self.facts.cores, 1)})

    def schedule(self, schedule: tvm.s_tir.Schedule) -> None:
        """The kernel's schedule with its inner fields sampled."""
        schedule.work_on("main")
        sampled = {
            name: schedule.sample_categorical(list(values), [1.0 / len(values)] * len(values))
            for name, values in inner_candidates(self.spec, self.sizes).items()
        }
        apply_schedule(schedule, self.spec, self.target, SampledSizes(self.sizes, sampled))  # type: ignore[arg-type]

    def candidates(self) -> dict[str, tuple[int, ...]]:
        """The values of every sampled field, in the order of the samplings."""
        return inner_candidates(self.spec, self.sizes)

    def sizes_at(self, point: tuple[int, ...]) -> BlockSizes | None:
        """The sizes that decisions stand for; None for those that contradict each other."""
        chosen = {name: values[at] for (name, values), at in zip(self.candidates().items(), point, strict=True)}
        try:
            return replace(self.sizes, **chosen)
        except ValueError:
            return None

    def default_point(self) -> tuple[int, ...]:
        """The decisions that give the workload's own sizes, or the nearest below."""
        return tuple(
            max((at for at, value in enumerate(values) if value <= getattr(self.sizes, name)), default=0)
            for name, values in self.candidates().items()
        )


def search(
    workload: Workload,
    trials: int,
    runner: Any,
    database: Any,
    options: SearchOptions,
    deadline: float = math.inf,
    progress: Callable[[int], None] = lambda measured: None,
) -> SearchResult:
    """Measure up to `trials` candidates besides those that `database` holds already.

    deadline: of time.monotonic(); a batch that has begun is finished. progress: called with candidates measured.
    """
    result, entry = SearchResult(), database.commit_workload(workload.module())
    known = _recorded(workload, database, entry)
    result.found = [(sizes, seconds) for point, seconds in known.items() if (sizes := workload.sizes_at(point))]
    wanted = trials - len(known)
    if wanted > 0:
        _search(workload, wanted, set(known), runner, (database, entry), options, deadline, progress, result)
    result.found = sorted((pair for pair in result.found if pair[1] < math.inf), key=lambda pair: pair[1])
    return result


def _search(
    workload: Workload,
    wanted: int,
    seen: set[tuple[int, ...]],
    runner: Any,
    records: tuple[Any, Any],
    options: SearchOptions,
    deadline: float,
    progress: Callable[[int], None],
    result: SearchResult,
) -> None:
    context = _context(workload, seen, options)
    spaces = context.generate_design_space()
    model = make_cost_model(options.cost_model, context, spaces[0])
    context.pre_tuning(wanted, _BATCH, spaces, records[0], model)
    builder = _builder(workload)
    while time.monotonic() < deadline:
        candidates = context.generate_measure_candidates()
        if not candidates:
            break
        outcomes = _measure(workload, builder, runner, candidates, result)
        for candidate, outcome in zip(candidates, outcomes, strict=True):
            _record(workload, candidate, outcome, records, result)
        context.notify_runner_results(candidates, outcomes)
        model.update(context, candidates, outcomes)
        progress(len(candidates))
    context.post_tuning()


def _record(workload: Workload, candidate: Any, outcome: Any, records: tuple[Any, Any], result: SearchResult) -> None:
    """Remember a measurement, a failed one too: it is not tried again."""
    database, entry = records
    seconds = _seconds(outcome, result)
    times = [_FAILED] if seconds is None else [float(value) for value in outcome.run_secs]
    trace = candidate.sch.trace
    database.commit_tuning_record(
        ms.database.TuningRecord(trace, entry, times, workload.tvm_target(), candidate.args_info)
    )
    result.trials += 1
    sizes = workload.sizes_at(decisions(trace))
    if seconds is not None and sizes is not None:
        result.found.append((sizes, seconds))


def _context(workload: Workload, seen: set[tuple[int, ...]], options: SearchOptions) -> ms.TuneContext:
    return ms.TuneContext(
        workload.module(),
        target=workload.tvm_target(),
        space_generator=ms.space_generator.ScheduleFn(
            workload.schedule, sch_rules=[], postprocs=[], mutator_probs={}
        ),
        search_strategy=SampledSearch(workload, seen, options.strategy == "evolutionary", options.seed),
        task_name=workload.spec.name,
        rand_state=options.seed,
        num_threads=1,
    )


def _builder(workload: Workload) -> Any:
    reuse_storage = not multiplies_digits(workload.spec, workload.sizes)
    return ms.builder.LocalBuilder(
        max_workers=1,
        timeout_sec=_BUILD_SECONDS,
        f_build=builder_function(workload.target, reuse_storage),
        f_export=export_candidate,
    )


def _measure(workload: Workload, builder: Any, runner: Any, candidates: list[Any], result: SearchResult) -> list[Any]:
    """A RunnerResult for every candidate, built or not."""
    target = workload.tvm_target()
    built = builder.build([ms.builder.BuilderInput(c.sch.mod, target) for c in candidates])
    outcomes: list[Any] = []
    for candidate, made in zip(candidates, built, strict=True):
        if made.error_msg is not None:
            result.fail("build", str(made.error_msg))
            outcomes.append(ms.runner.RunnerResult(None, str(made.error_msg)))
            continue
        path = str(made.artifact_path)
        future = runner.run([ms.runner.RunnerInput(path, "cpu", candidate.args_info)])[0]
        outcome = future.result()
        if outcome.error_msg is not None:
            result.fail("run", str(outcome.error_msg))
        outcomes.append(outcome)
        shutil.rmtree(Path(path).parent, ignore_errors=True)
    return outcomes


def _seconds(outcome: Any, result: SearchResult) -> float | None:
    """The median; None if it did not run. A clock that says zero or less has measured nothing."""
    if outcome.error_msg is not None or not outcome.run_secs:
        return None
    seconds = statistics.median(float(value) for value in outcome.run_secs)
    if not 0.0 < seconds < math.inf:
        result.fail("time", f"a run of {seconds} s")
        return None
    return seconds


def _recorded(workload: Workload, database: Any, entry: Any) -> dict[tuple[int, ...], float]:
    """Seconds by decisions of the candidates that the database holds; infinity for those that failed."""
    found: dict[tuple[int, ...], float] = {}
    for record in database.get_all_tuning_records():
        if record.workload.same_as(entry):
            seconds = statistics.median(float(value) for value in record.run_secs)
            found[decisions(record.trace)] = seconds if seconds < _FAILED else math.inf
    return found
