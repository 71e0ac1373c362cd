"""Candidates on another machine behind TVM's RPC tracker: the kernel alone, under TVM's own thread pool there."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import tvm
from tvm import s_tir

from ..lowering import apply_schedule
from ..reference import group_query_attention
from ..schedules.block_sizes import BlockSizes
from .calls import make_call
from .compile import build_candidate, export_candidate
from .runner import evaluator_config, rpc_config
from .searcher import ScheduleSearcher
from .task import Cell, Task
from .workload import Workload, sane_array

_ROUNDS = 3
_CHECK_TOTAL = 1037
_TOLERANCES = {"f32": 1e-5, "f16": 1e-3, "bf16": 8e-3}


class RemoteBench:
    """Checks and measures over RPC. The operator does not run there: times are of the kernel, without the call."""

    def __init__(self, searcher: ScheduleSearcher, address: str, device_key: str) -> None:
        self.searcher, self.config = searcher, rpc_config(address, device_key)

    def check(self, task: Task, sizes: BlockSizes) -> str | None:
        """Why a candidate's numbers are wrong; None if they are right."""
        total = _CHECK_TOTAL + (sizes.kv_chunk if task.spec.operation == "flash_decode" else 0)
        workload = self.searcher.workload(task, sizes, total)
        attributes, inputs = make_call(task.spec, workload.shape)
        wanted = group_query_attention(**inputs, **attributes)
        given: dict[str, np.ndarray] = {
            "query": inputs["query"],
            "key_cache": wanted.present_key,
            "value_cache": wanted.present_value,
            **{name: inputs[name] for name in ("k_scale", "v_scale") if name in inputs},
        }

        def run(session: _Session) -> np.ndarray:
            module, arguments = session.load(workload, given)
            module["main"](*arguments.values())
            return arguments["output"].numpy().astype(np.float64).reshape(wanted.output.shape)

        got = self._with_session(run)
        error = np.abs(got - wanted.output) / np.maximum(1.0, np.abs(wanted.output))
        if not (error <= _TOLERANCES[task.spec.query]).all():
            return f"wrong result: error {np.nanmax(error):.3g}, NaN: {bool(np.isnan(error).any())}"
        return None

    def measure(self, task: Task, cell: Cell, candidates: Sequence[BlockSizes]) -> list[float]:
        """Seconds of a run of each candidate, in turns; the first one's is a median, the others' are relative to it."""

        def run(session: _Session) -> list[list[float]]:
            loaded = [session.load(self.searcher.workload(task, sizes, cell.total)) for sizes in candidates]
            return [[session.seconds(*pair) for pair in loaded] for _ in range(_ROUNDS)]

        rounds = self._with_session(run)
        default = statistics.median(times[0] for times in rounds)
        ratios = [statistics.median(times[i] / times[0] for times in rounds) for i in range(len(candidates))]
        return [default * ratio for ratio in ratios]

    def _with_session(self, work: Callable[[_Session], Any]) -> Any:
        session = _Session(self.config)
        try:
            return work(session)
        finally:
            session.remove_files()
            del session
            # The device is free for others only when nothing refers to the session any more.
            gc.collect()


class _Session:
    """A session with the device."""

    def __init__(self, config: Any) -> None:
        self._remote = config.connect_server()
        self._device = self._remote.device("cpu", 0)
        self._files: list[str] = []

    def remove_files(self) -> None:
        """What was uploaded."""
        for file in self._files:
            self._remote.remove(file)

    def load(self, workload: Workload, given: dict[str, np.ndarray] | None = None) -> tuple[Any, dict[str, Any]]:
        """(module, tensors by parameter): `given` and, for the others, sane numbers."""
        path = Path(_shared_object(workload))
        name = f"{path.parent.name}.so"
        self._remote.upload(str(path), name)
        rmtree(path.parent, ignore_errors=True)
        self._files.append(name)
        module = self._remote.load_module(name)
        arguments = {}
        for parameter in workload.module()["main"].params:
            shape = tuple(int(size) for size in parameter.shape)
            values = (given or {}).get(parameter.name)
            values = sane_array(shape, str(parameter.dtype)) if values is None else values.reshape(shape)
            arguments[parameter.name] = tvm.runtime.tensor(values, self._device)
        return module, arguments

    def seconds(self, module: Any, arguments: dict[str, Any]) -> float:
        """The shortest of several repeats: what disturbs a run only makes it longer."""
        config = evaluator_config()
        evaluator = module.time_evaluator(
            "main", self._device, config.number, config.repeat, min_repeat_ms=config.min_repeat_ms
        )
        return max(min(evaluator(*arguments.values()).results), 1e-9)


def _shared_object(workload: Workload) -> str:
    """A candidate with its sizes as they are, nothing sampled."""
    schedule = s_tir.Schedule(workload.module())
    schedule.work_on("main")
    apply_schedule(schedule, workload.spec, workload.target, workload.sizes)
    candidate = build_candidate(workload.spec, workload.target, workload.sizes, schedule.mod, None, None)
    return export_candidate(candidate, workload.target.architecture)
