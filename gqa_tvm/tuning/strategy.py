"""Search strategies over the sampled fields of a schedule, as MetaSchedule's tuning context takes them.

TVM's own strategies replay every trace on one copy of the module. Schedule primitives of TVM 0.27 change blocks of that
copy in place where nothing else refers to them, and the second replay fails. These replay on a module whose blocks are
all referred to, and choose among the points of the space themselves: a dozen to some thousand.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from ..schedules.block_sizes import BlockSizes
from .space import worth_measuring

SAMPLING = "SampleCategorical"
# Points whose schedules are made for the cost model to choose a batch from.
_POPULATION = 24
_PARENTS = 4


class SharedModule:
    """A module that any number of schedules may start from."""

    def __init__(self, module: tvm.IRModule) -> None:
        self.module = module
        # A block that two hold is copied, not changed in place.
        self._blocks: list[Any] = []
        tvm_ffi.structural_walk(module["main"].body, self._hold)

    def _hold(self, node: Any) -> None:
        if isinstance(node, s_tir.SBlock):
            self._blocks.append(node)

    def replay(self, trace: Any) -> s_tir.Schedule:
        """A schedule made by a trace."""
        schedule = s_tir.Schedule(self.module)
        trace.apply_to_schedule(schedule, remove_postproc=False)
        return schedule


def decide(trace: Any, choices: Iterable[int]) -> Any:
    """The trace with these decisions of its samplings, in order."""
    for instruction, choice in zip([i for i in trace.insts if i.kind.name == SAMPLING], choices, strict=True):
        trace = trace.with_decision(instruction, choice, remove_postproc=False)
    return trace


def decisions(trace: Any) -> tuple[int, ...]:
    """The inverse of `decide`."""
    return tuple(int(trace.decisions[i]) for i in trace.insts if i.kind.name == SAMPLING)


@derived_object
class SampledSearch(ms.search_strategy.PySearchStrategy):
    """Batches of points that were not measured before.

    workload: gives sizes of decisions and what is worth measuring. seen: decisions that are not proposed again;
    grows. evolves: after a first random batch, points near the fastest ones, ranked by the cost model, and a random
    one in each batch; else random points.
    """

    def __init__(self, workload: Any, seen: set[tuple[int, ...]], evolves: bool, seed: int) -> None:
        super().__init__()
        self.workload, self.seen, self.evolves = workload, seen, evolves
        self.random = random.Random(seed)
        self.times: dict[tuple[int, ...], float] = {}
        self.context: Any = None

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.context = context

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: list[s_tir.Schedule],
        database: Any = None,
        cost_model: Any = None,
    ) -> None:
        self.left, self.batch, self.cost_model = max_trials, num_trials_per_iter, cost_model
        self.trace = design_spaces[0].trace
        self.shared = SharedModule(self.workload.module())
        axes = [range(len(values)) for values in self.workload.candidates().values()]
        points = [point for point in itertools.product(*axes) if self._is_worth(self.workload.sizes_at(point))]
        self.random.shuffle(points)
        own = self.workload.default_point()
        # The kernel's own sizes first: what everything else is compared with.
        self.points = sorted(points, key=lambda point: point != own)

    def _is_worth(self, sizes: BlockSizes | None) -> bool:
        return sizes is not None and worth_measuring(self.workload.spec, sizes, self.workload.facts)

    def post_tuning(self) -> None:
        """Nothing is left to do."""

    def generate_measure_candidates(self) -> list[ms.MeasureCandidate] | None:
        fresh = [point for point in self.points if point not in self.seen]
        count = min(self.batch, self.left, len(fresh))
        if count == 0:
            return None
        chosen = self._evolve(fresh, count) if self.evolves and self.times else fresh[:count]
        self.left -= count
        self.seen.update(chosen)
        return [self._candidate(point) for point in chosen]

    def _candidate(self, point: tuple[int, ...]) -> ms.MeasureCandidate:
        schedule = self.shared.replay(decide(self.trace, point))
        return ms.MeasureCandidate(schedule, ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=False))

    def _evolve(self, fresh: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
        """The most promising of the points near the fastest ones, and one at random."""
        parents = sorted(self.times, key=lambda point: self.times[point])[:_PARENTS]
        near = [point for point in fresh if any(_distance(point, parent) == 1 for parent in parents)]
        others = [point for point in fresh if point not in set(near)]
        population = (near + others)[:_POPULATION]
        scores = self.cost_model.predict(self.context, [self._candidate(point) for point in population])
        ranked = [point for _, point in sorted(zip(-scores, population, strict=True), key=lambda pair: pair[0])]
        wild = others[-1:] if count > 1 else []
        return [*[point for point in ranked if point not in wild][: count - len(wild)], *wild]

    def notify_runner_results(self, measure_candidates: list[ms.MeasureCandidate], results: list[Any]) -> None:
        for candidate, result in zip(measure_candidates, results, strict=True):
            if result.run_secs:
                times = sorted(float(value) for value in result.run_secs)
                self.times[decisions(candidate.sch.trace)] = times[len(times) // 2]

    def clone(self) -> Any:
        return SampledSearch(self.workload, self.seen, self.evolves, self.random.randrange(1 << 30))


def _distance(point: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(a != b for a, b in zip(point, other, strict=True))
