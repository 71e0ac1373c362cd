"""The searcher of a tuning run: databases of all workloads in one folder, and one runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..lowering import fitted_sizes
from ..schedules.block_sizes import BlockSizes
from ..targets import TargetFacts
from ..variants import Variant
from .search import SearchOptions, WorkloadSearch
from .session import Found
from .space import chunk_variants, outer_points
from .task import Task
from .workload import Workload


class ScheduleSearcher:
    """Searches with MetaSchedule. folder: of the databases, one in it for each workload of a task."""

    def __init__(self, variant: Variant, facts: TargetFacts, folder: Path, runner: Any, options: SearchOptions) -> None:
        self.variant, self.facts, self.folder = variant, facts, folder
        self.runner, self.options = runner, options

    def points(self, task: Task) -> list[BlockSizes]:
        return outer_points(task.spec, self.variant.sizes.default, self.facts)

    def chunk_variants(self, task: Task, sizes: BlockSizes) -> list[BlockSizes]:
        return chunk_variants(task.spec, sizes)

    def workload(self, task: Task, point: BlockSizes, total: int) -> Workload:
        sizes = fitted_sizes(task.spec, point)
        return Workload(task.spec, sizes, task.shape(total), self.variant.target, self.facts)

    def search(
        self, task: Task, point: BlockSizes, total: int, trials: int, deadline: float, progress: Callable[[int], None]
    ) -> Found:
        folder = self.folder / task.name / f"{point.digest()}_t{total}_p{task.threads[0]}"
        search = WorkloadSearch(self.workload(task, point, total), folder, self.runner, self.options)
        return search.run(trials, deadline, progress)
