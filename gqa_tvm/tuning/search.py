"""MetaSchedule over one static workload: candidates in batches, until trials, time or the space are used up."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tvm.s_tir import meta_schedule as ms

from .compile import builder_function, export_candidate
from .cost_model import make_cost_model
from .logs import RECORDS_FILE, WORKLOADS_FILE, read_records
from .session import Candidate, Found
from .strategy import SampledSearch, decisions
from .workload import Workload

_BATCH = 8
_BUILD_SECONDS = 120.0
_NEW_RECORDS = "new_records.json"


@dataclass(frozen=True)
class SearchOptions:
    """strategy: "evolutionary" or "replay-trace"; cost_model: "xgb" or "random"."""

    strategy: str = "evolutionary"
    cost_model: str = "xgb"
    seed: int = 1


# A new one starts a process to look for its functions.
@lru_cache(maxsize=4)
def _builder(workload: Workload) -> Any:
    return ms.builder.LocalBuilder(
        max_workers=1,
        timeout_sec=_BUILD_SECONDS,
        f_build=builder_function(workload.spec, workload.target, workload.sizes),
        f_export=partial(export_candidate, wanted=workload.target.architecture),
    )


class WorkloadSearch:
    """One workload with its database folder. runner: a MetaSchedule runner."""

    def __init__(self, workload: Workload, folder: Path, runner: Any, options: SearchOptions) -> None:
        self.workload, self.folder, self.runner, self.options = workload, folder, runner, options
        self.found = Found()
        self._target = workload.tvm_target()

    def run(
        self, trials: int, deadline: float = math.inf, progress: Callable[[int], None] = lambda measured: None
    ) -> Found:
        """Measure candidates until there are `trials`, with those that the database holds already.

        deadline: of time.monotonic(); a batch that has begun is finished. progress: called with candidates measured.
        """
        seen: set[tuple[int, ...]] = set()
        context = self._context(seen)
        spaces = context.generate_design_space()
        self._open_database()
        seen.update(self._take_recorded())
        if trials > len(seen):
            model = make_cost_model(self.options.cost_model, context, spaces[0])
            context.pre_tuning(trials - len(seen), _BATCH, spaces, self._database, model)
            self._search(context, model, deadline, progress)
            context.post_tuning()
            self._keep_new_records()
        self.found.candidates.sort(key=lambda candidate: candidate.seconds)
        return self.found

    def _search(self, context: ms.TuneContext, model: Any, deadline: float, progress: Callable[[int], None]) -> None:
        builder = _builder(self.workload)
        while time.monotonic() < deadline:
            candidates = context.generate_measure_candidates()
            if not candidates:
                return
            outcomes = self._measure(builder, candidates)
            for candidate, outcome in zip(candidates, outcomes, strict=True):
                self._record(candidate, outcome)
            context.notify_runner_results(candidates, outcomes)
            model.update(context, candidates, outcomes)
            progress(len(candidates))
            if not any(outcome.run_secs for outcome in outcomes):
                # Not one of a whole batch: the rest would fail for the same reason.
                return

    def _context(self, seen: set[tuple[int, ...]]) -> ms.TuneContext:
        workload, options = self.workload, self.options
        return ms.TuneContext(
            workload.module(),
            target=self._target,
            space_generator=ms.space_generator.ScheduleFn(
                workload.schedule, sch_rules=[], postprocs=[], mutator_probs={}
            ),
            search_strategy=SampledSearch(workload, seen, options.strategy == "evolutionary", options.seed),
            task_name=workload.spec.name,
            rand_state=options.seed,
            num_threads=1,
        )

    def _open_database(self) -> None:
        """A database for what is measured now, in a file of its own.

        MetaSchedule replays all records of a workload on one module when it opens them, which fails for a second one
        (see `strategy`), so those of earlier runs are read as text.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep_new_records()
        self._database = ms.database.JSONDatabase(str(self.folder / WORKLOADS_FILE), str(self.folder / _NEW_RECORDS))
        self._entry = self._database.commit_workload(self.workload.module())

    def _keep_new_records(self) -> None:
        """Add what this run, or one that was cut short, has measured to the records of the folder."""
        new = self.folder / _NEW_RECORDS
        if new.exists():
            with (self.folder / RECORDS_FILE).open("a") as file:
                file.write(new.read_text())
            new.unlink()

    def _take_recorded(self) -> set[tuple[int, ...]]:
        """Decisions of the candidates that an earlier run has measured; they count as found."""
        file = self.folder / RECORDS_FILE
        recorded = set()
        for record in read_records(file) if file.exists() else ():
            recorded.add(record.decisions)
            self._add(record.decisions, record.seconds)
        return recorded

    def _add(self, point: tuple[int, ...], seconds: float) -> None:
        sizes = self.workload.sizes_at(point)
        if sizes is not None:
            self.found.candidates.append(Candidate(sizes, seconds, (self.folder, point)))

    def _measure(self, builder: Any, candidates: list[Any]) -> list[Any]:
        """A RunnerResult for every candidate, built or not."""
        built = builder.build([ms.builder.BuilderInput(c.sch.mod, self._target) for c in candidates])
        inputs = [
            ms.runner.RunnerInput(str(made.artifact_path), "cpu", candidate.args_info)
            for candidate, made in zip(candidates, built, strict=True)
            if made.error_msg is None
        ]
        ran = iter(self.runner.run(inputs))
        outcomes = [
            self._failed("build", str(made.error_msg))
            if made.error_msg is not None
            else self._timed(next(ran).result())
            for made in built
        ]
        for made in built:
            if made.artifact_path is not None:
                shutil.rmtree(Path(str(made.artifact_path)).parent, ignore_errors=True)
        return outcomes

    def _timed(self, outcome: Any) -> Any:
        if outcome.error_msg is not None:
            return self._failed("run", str(outcome.error_msg))
        # What disturbs a run only makes it longer.
        seconds = min((float(value) for value in outcome.run_secs), default=0.0)
        if not 0.0 < seconds < math.inf:
            return self._failed("time", f"a run took {seconds} s by the clock")
        return ms.runner.RunnerResult([seconds], None)

    def _failed(self, kind: str, reason: str) -> Any:
        self.found.fail(kind, reason)
        return ms.runner.RunnerResult(None, reason)

    def _record(self, candidate: Any, outcome: Any) -> None:
        """Remember a time. Failures are not: their cause may be gone when the run is resumed."""
        self.found.trials += 1
        if outcome.run_secs:
            trace = candidate.sch.trace
            self._database.commit_tuning_record(
                ms.database.TuningRecord(trace, self._entry, list(outcome.run_secs), self._target, candidate.args_info)
            )
            self._add(decisions(trace), float(outcome.run_secs[0]))
