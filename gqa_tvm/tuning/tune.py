"""`gqa_tvm.tune`: what to tune, with what, and where it goes."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import BuildError, InvalidArgument
from ..kernel_cache import build_stamp, cache_directory
from ..kernels import TOKEN_TILES, KernelSpec, decode_row_tile
from ..schedules.block_sizes import BlockSizes
from ..targets import best_target, find_target, require_runnable, target_facts, usable_cores
from ..tuned_sizes import TunedRecord, total_bucket
from ..variants import forget_tuned_records, machine_variant, untuned_variant, user_logs
from .decide import geometric_mean
from .header import log_header
from .logs import Header, SizesLog, merge_database, write_atomically
from .session import Bench, Session, Source, Summary
from .task import Task, usual_tasks

HEAD_SIZES = (64, 128)
GROUP_SIZES = (1, 2, 4, 8)
TOTALS = (512, 4096, 32768)
TRIALS = 64
STRATEGIES = ("evolutionary", "replay-trace")
COST_MODELS = ("xgb", "random")


def tune(
    target: str | None = None,
    *,
    kernels: Iterable[str] = (),
    head_sizes: Sequence[int] = HEAD_SIZES,
    group_sizes: Sequence[int] = GROUP_SIZES,
    totals: Sequence[int] = TOTALS,
    threads: Sequence[int] | None = None,
    trials: int = TRIALS,
    time_budget: float | None = None,
    strategy: str = "evolutionary",
    cost_model: str = "xgb",
    resume: bool = True,
    output: str | os.PathLike[str] | None = None,
    rpc: str | None = None,
    device_key: str | None = None,
    report: Callable[[int, str], None] = lambda trials, text: None,
) -> Summary:
    """Search block sizes for kernels of `target` (default: the best for this CPU) and keep those that are faster.

    kernels: names such as flash_decode_f32_i8_h128_r2, or flash_decode, flash_prefill for all usual ones of either;
    none = both. totals: keys T, rounded up to powers of two. threads: of the measured calls, default 1 and all usable
    cores. trials: candidates a kernel and group size. time_budget: seconds, None = no limit. resume: keep and do not
    repeat what earlier runs measured. output: folder of logs, default as `default_output`. rpc, device_key: host:port
    of a TVM RPC tracker and the key of the device that measures instead of this machine. report: called with
    (candidates measured, what is going on).

    Returns what was found. Raises InvalidArgument, and BuildError if no candidate could be measured; logs are as they
    were then.
    """
    _require_compiler(cost_model)
    target = target or best_target()
    if rpc is None:
        require_runnable(target)
    _require_choices(strategy, cost_model, rpc, device_key)
    threads = tuple(threads or ((1,) if rpc else sorted({1, usable_cores()})))
    if rpc is not None and len(threads) != 1:
        raise InvalidArgument(f"over RPC, threads is the one number that the server was started with, got {threads}")
    buckets = tuple(sorted({total_bucket(total) for total in totals}))
    tasks = chosen_tasks(target, kernels, head_sizes, group_sizes, buckets, threads)
    folder = cache_directory() / "tuning" / build_stamp() / (f"{target}-{device_key}" if rpc else target)
    header = log_header(rpc)
    log = DirectoryLog(Path(output) if output is not None else default_output(), target, header)
    searcher, bench = _compiler_side(target, folder, threads, (strategy, cost_model), rpc, device_key)
    finished = _Finished(folder, (trials, strategy, cost_model))
    if not resume:
        finished.forget(tasks)
    todo = [task for task in tasks if not finished.has(task)]
    deadline = time.monotonic() + (math.inf if time_budget is None else time_budget)
    with _noted_interrupts() as interrupted:
        session = Session(searcher, bench, log, trials, deadline, report, interrupted)
        summary = session.run(todo, finished.add)
    summary.skipped = len(tasks) - len(todo)
    forget_tuned_records()
    if summary.found_nothing and not summary.interrupted:
        raise BuildError(f"tuning {target}: no candidate could be used; the first failed with {summary.first_reason}")
    return summary


@contextmanager
def _noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed; it raises KeyboardInterrupt as usual, too."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, frame: Any) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _require_compiler(cost_model: str) -> None:
    try:
        import tvm.s_tir.meta_schedule  # noqa: F401

        if cost_model == "xgb":
            import xgboost  # noqa: F401
    except ImportError as error:
        raise BuildError(f"tuning needs apache-tvm and xgboost: pip install 'gqa_tvm[build]' ({error})") from error


def _require_choices(strategy: str, cost_model: str, rpc: str | None, device_key: str | None) -> None:
    for name, value, known in (("strategy", strategy, STRATEGIES), ("cost_model", cost_model, COST_MODELS)):
        if value not in known:
            raise InvalidArgument(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if (rpc is None) != (device_key is None):
        raise InvalidArgument("rpc (host:port of a tracker) and device_key belong together")
    if rpc is not None and not rpc.rpartition(":")[2].isdigit():
        raise InvalidArgument(f"rpc must be host:port, got {rpc!r}")


def _compiler_side(
    target: str,
    folder: Path,
    threads: tuple[int, ...],
    choices: tuple[str, str],
    rpc: str | None,
    device_key: str | None,
) -> tuple[Any, Bench]:
    """Searcher and bench; imports the compiler."""
    from .operator_bench import OperatorBench
    from .runner import RpcRunner, local_runner, require_device
    from .search import SearchOptions
    from .searcher import ScheduleSearcher

    variant, facts = untuned_variant(target), target_facts(find_target(target))
    if rpc is not None:
        require_device(rpc, device_key or "")
    runner = local_runner(threads[0]) if rpc is None else RpcRunner(rpc, device_key or "")
    searcher = ScheduleSearcher(variant, facts, folder, runner, SearchOptions(*choices))
    if rpc is None:
        return searcher, OperatorBench(target)
    from .remote_bench import RemoteBench

    return searcher, RemoteBench(searcher, rpc, device_key or "")


def chosen_tasks(
    target: str,
    kernels: Iterable[str],
    head_sizes: Sequence[int],
    group_sizes: Sequence[int],
    totals: tuple[int, ...],
    threads: tuple[int, ...],
) -> list[Task]:
    """The tasks of a run. Raises InvalidArgument for a kernel that is not tuned, and if none is left."""
    default = default_sizes(target)
    usual = list(usual_tasks(default.small_q_blocks, tuple(head_sizes), tuple(group_sizes), totals, threads))
    names = list(kernels) or ["flash_decode", "flash_prefill"]
    tasks: dict[str, Task] = {}
    for name in names:
        found = [task for task in usual if name in (task.spec.operation, task.spec.name)]
        for task in found or _tasks_of(name, group_sizes, totals, threads):
            tasks[task.name] = task
    chosen = [task for task in tasks.values() if task.measures_itself(default)]
    if not chosen:
        raise InvalidArgument("nothing to tune: the operator runs other kernels for these group sizes and totals")
    return chosen


def default_sizes(target: str) -> BlockSizes:
    """Untuned sizes of a target on this machine."""
    return machine_variant(target).sizes.default


def _tasks_of(name: str, group_sizes: Sequence[int], totals: tuple[int, ...], threads: tuple[int, ...]) -> list[Task]:
    try:
        spec = KernelSpec.parse(name)
    except ValueError as error:
        raise InvalidArgument(f"kernel: {error}") from None
    if spec.operation not in ("flash_decode", "flash_prefill") or spec.tuned:
        raise InvalidArgument(f"kernel: only flash_decode and flash_prefill are tuned, got {name!r}")
    groups = group_sizes
    if spec.operation == "flash_decode":
        groups = [group for group in group_sizes if decode_row_tile(1, group) == spec.row_tile] or [spec.row_tile]
        if groups == [spec.row_tile] and spec.row_tile not in (*TOKEN_TILES, *range(1, 9)):
            raise InvalidArgument(f"kernel: no group size runs {name!r}")
    return [Task(spec, group, totals, threads) for group in groups]


def default_output() -> Path:
    """tuning_logs of a source checkout, else the user's folder; the lookup reads both."""
    checkout = Path(__file__).parents[2] / "tuning_logs"
    return checkout if (checkout.parent / "pyproject.toml").exists() and checkout.is_dir() else user_logs()


class DirectoryLog:
    """Logs in a folder; the file of a target is read when it is made, so that a broken one ends the run early."""

    def __init__(self, folder: Path, target: str, header: Header) -> None:
        self.sizes, self.header = SizesLog(folder, find_target(target), default_sizes(target)), header

    def add(self, records: Sequence[TunedRecord], sources: Sequence[Source]) -> None:
        merge_database(self.sizes.folder, sources)
        self.sizes.merge(records, self.header)


class _Finished:
    """Names of the tasks that a run with the same options has finished, beside the databases."""

    def __init__(self, folder: Path, options: tuple[Any, ...]) -> None:
        self.path, self.options = folder / "finished.json", options

    def _read(self) -> list[str]:
        return json.loads(self.path.read_text()) if self.path.exists() else []

    def _key(self, task: Task) -> str:
        return json.dumps([task.name, task.totals, task.threads, *self.options])

    def forget(self, tasks: Sequence[Task]) -> None:
        """Remove all that was measured for these tasks, whatever the options."""
        for task in tasks:
            shutil.rmtree(self.path.parent / task.name, ignore_errors=True)
        names = {task.name for task in tasks}
        kept = [key for key in self._read() if json.loads(key)[0] not in names]
        write_atomically(self.path, json.dumps(kept).encode())

    def has(self, task: Task) -> bool:
        return self._key(task) in self._read()

    def add(self, task: Task) -> None:
        write_atomically(self.path, json.dumps([*self._read(), self._key(task)]).encode())


def describe(summary: Summary) -> str:
    """A run in a few lines."""
    failures = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.failures.items())) or "none"
    lines = [
        *summary.outcomes,
        f"{summary.tasks} kernels tuned, {summary.skipped} finished by an earlier run; "
        f"{summary.measured} candidates measured; failures: {failures}",
        f"accepted in {summary.accepted} of {summary.records} recorded shapes, elsewhere the defaults stay",
    ]
    if summary.first_reason:
        lines.append(f"first failure: {summary.first_reason}")
    if summary.accepted:
        lines.append(
            f"geometric mean of the recorded shapes: {geometric_mean(summary.gains):.3f} times the default's speed"
        )
    if summary.interrupted:
        lines.append("interrupted: what was accepted is kept; the same command goes on from here")
    return "\n".join(lines)
