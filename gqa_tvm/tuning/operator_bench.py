"""Candidates in the operator itself: are the results right, and how long does a whole call take?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..kernels import KernelSpec
from ..lowering import fitted_sizes
from ..operator import GroupQueryAttention
from ..reference import group_query_attention
from ..runtime import KernelLibrary
from ..schedules.block_sizes import BlockSizes
from ..tuned_sizes import SizesTable, TunedRecord
from ..variants import untuned_variant
from .calls import make_call
from .fields import recorded_fields
from .task import Cell, Task

# |got - reference| <= this * max(1, |reference|), by format of the query.
_TOLERANCES = {"f32": 1e-5, "f16": 1e-3, "bf16": 8e-3}
_LEAST_ROUNDS = 7
_SAMPLE_SECONDS = 1e-3
# A length of no special kind: neither a multiple of a block nor of the usual chunks.
_CHECK_TOTAL = 1037


class OperatorBench:
    """Measures on this machine. seconds: of a measurement of all candidates in a cell."""

    def __init__(self, target: str, seconds: float = 1.0) -> None:
        self.target, self.seconds = target, seconds
        self.variant = untuned_variant(target)

    def check(self, task: Task, sizes: BlockSizes) -> str | None:
        """Why a candidate must not be used; None if its result is right."""
        attributes, inputs = self._check_call(task, sizes)
        wanted = group_query_attention(**inputs, **attributes).output
        operator = self._operator(task, sizes, max(task.threads), attributes)
        got = operator(**inputs).output
        assert operator.last_plan is not None
        ran = operator.last_plan.kernels[-1]
        if replace(KernelSpec.parse(ran), tuned="") != task.spec:
            return f"the operator runs {ran} for this shape"
        error = np.abs(got.astype(np.float64) - wanted) / np.maximum(1.0, np.abs(wanted))
        if not (error <= _TOLERANCES[task.spec.query]).all():
            return f"wrong result: error {np.nanmax(error):.3g}, NaN: {bool(np.isnan(error).any())}"
        return None

    def output(self, task: Task, sizes: BlockSizes) -> np.ndarray:
        """What a candidate gives for the numbers that `check` uses."""
        attributes, inputs = self._check_call(task, sizes)
        return self._operator(task, sizes, max(task.threads), attributes)(**inputs).output

    @staticmethod
    def _check_call(task: Task, sizes: BlockSizes) -> tuple[dict[str, Any], dict[str, Any]]:
        total = _CHECK_TOTAL + (sizes.kv_chunk if task.spec.operation == "flash_decode" else 0)
        return make_call(task.spec, replace(task.shape(total), kv_heads=2))

    def measure(self, task: Task, cell: Cell, candidates: Sequence[BlockSizes]) -> list[float]:
        """Seconds of a whole call with each candidate, in turns so that what disturbs one disturbs all.

        The first one's is a median; the others' are that times the median of their ratios to it, round by round.
        """
        attributes, inputs = make_call(task.spec, task.shape(cell.total))
        inputs |= {"present_key": inputs["past_key"], "present_value": inputs["past_value"]}
        operators = [self._operator(task, sizes, cell.threads, attributes) for sizes in candidates]
        calls: list[Callable[[], Any]] = [lambda op=op: op(**inputs) for op in operators]  # type: ignore[misc]
        rounds = _rounds(calls, self.seconds, time.process_time if cell.threads == 1 else time.perf_counter)
        default = statistics.median(times[0] for times in rounds)
        ratios = [statistics.median(times[i] / times[0] for times in rounds) for i in range(len(candidates))]
        return [default * ratio for ratio in ratios]

    def _operator(self, task: Task, sizes: BlockSizes, threads: int, attributes: dict[str, Any]) -> GroupQueryAttention:
        default = self.variant.sizes.default
        is_default = sizes == fitted_sizes(task.spec, default)
        fields = {} if is_default else recorded_fields(task.spec, sizes)
        record = TunedRecord(*(task.spec.name, task.group_size, 1, threads, fields, 0.0, 0.0, 0))
        library = KernelLibrary(self.target)
        library.variant = self.variant._replace(sizes=SizesTable(default, [record]))
        operator = GroupQueryAttention(**attributes, num_threads=threads)
        operator.use_library(library)
        return operator


def _rounds(calls: Sequence[Callable[[], Any]], seconds: float, clock: Callable[[], float]) -> list[list[float]]:
    """Seconds a call of each, round by round; who begins changes from one round to the next."""
    for call in calls:
        call()
    start = time.perf_counter()
    calls[0]()
    repeats = max(1, int(_SAMPLE_SECONDS / max(time.perf_counter() - start, 1e-7)))
    deadline = time.perf_counter() + seconds
    rounds: list[list[float]] = []
    while len(rounds) < _LEAST_ROUNDS or time.perf_counter() < deadline:
        times = [0.0] * len(calls)
        first = len(rounds) % len(calls)
        for index in (*range(first, len(calls)), *range(first)):
            calls[index]()
            start = clock()
            for _ in range(repeats):
                calls[index]()
            # A clock of coarse steps may say that no time has passed.
            times[index] = max(clock() - start, 1e-9) / repeats
        rounds.append(times)
    return rounds
