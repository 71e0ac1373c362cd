"""Calls a second of Python threads that call at once, each with an operator and a cache of its own.

    python bench/callers.py --callers 1 2 4 --filter 'decode_(f32|i8)_t(6|512)_'

Every operator, and every onnxruntime session beside them, runs on one thread: the callers are what is parallel. Results
are checked first, contenders are timed in turns by the wall clock. Prints a Markdown table; "CPU us" is the
process's CPU time a call, which other processes hardly change.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from calls import make_call
from contenders import OURS, OURS_NAIVE, operator_contenders
from gate import check_operator
from timing import Spread
from workloads import Workload, decode

WORKLOADS = (
    *(decode(cache, 6, 2, 2, 64) for cache in ("f32", "i8")),
    *(decode(cache, 512, 4, 4, 128) for cache in ("f32", "i8")),
    *(decode(cache, 512) for cache in ("f32", "i8")),
    *(decode(cache, 4096) for cache in ("f32", "i8")),
)
_MIN_ROUNDS = 3
Run = Callable[[], Any]


def callers_of(workload: Workload, count: int) -> dict[str, list[Run]]:
    """By contender, a call for each of `count` callers. Raises WrongResult."""
    runs: dict[str, list[Run]] = {}
    for seed in range(count):
        call = make_call(workload, seed)
        for contender in check_operator(workload, call, operator_contenders(workload, [call], threads=1)):
            if contender.name != OURS_NAIVE:
                runs.setdefault(contender.name, []).append(contender.runs[0])
    return {name: found for name, found in runs.items() if len(found) == count}


class Rate(NamedTuple):
    """Calls a second of all callers together, and CPU seconds of the process a call."""

    calls: float
    cpu: float


def rate_of(runs: Sequence[Run], seconds: float) -> Rate:
    """Callers begin at once and go on for so long."""
    counts, start, stop = [0] * len(runs), threading.Barrier(len(runs) + 1), threading.Event()

    def call(index: int) -> None:
        run, stopped = runs[index], stop.is_set
        run()
        start.wait()
        while not stopped():
            run()
            counts[index] += 1

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    start.wait()
    before, cpu_before = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    stop.set()
    elapsed, cpu = time.perf_counter() - before, time.process_time() - cpu_before
    for thread in threads:
        thread.join()
    total = max(1, sum(counts))
    return Rate(total / elapsed, cpu / total)


def rates(workload: Workload, count: int, seconds: float) -> dict[str, list[Rate]]:
    """By contender, in rounds that each begin with another one, for `seconds` altogether."""
    runs = callers_of(workload, count)
    rounds = max(_MIN_ROUNDS, round(seconds / (0.25 * len(runs))))
    samples: dict[str, list[Rate]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            samples[name].append(rate_of(runs[name], seconds / (rounds * len(names))))
    return samples


def row_of(workload: Workload, count: int, samples: dict[str, list[Rate]]) -> str:
    """A line of the table; ratio = our calls / those of the better of onnxruntime's paths."""
    calls = {name: Spread.of([rate.calls for rate in found]) for name, found in samples.items()}
    cpu = {name: 1e6 * statistics.median(rate.cpu for rate in found) for name, found in samples.items()}
    ours = calls.pop(OURS)
    width = 50 * (ours.high - ours.low) / ours.median
    row = f"| `{workload.name}` | {count} | {ours.median:,.0f} | {width:.0f} | {_digits(cpu[OURS])} |"
    if not calls:
        return f"{row} - | - | - |"
    best = max(calls, key=lambda name: calls[name].median)
    return f"{row} {calls[best].median:,.0f} | {_digits(cpu[best])} | {ours.median / calls[best].median:.2f} |"


def _digits(microseconds: float) -> str:
    return f"{microseconds:.3g}" if microseconds < 1000 else f"{microseconds:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Calls a second of Python threads that call at once.")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--filter", default="", help="regular expression that names of rows must contain")
    parser.add_argument("--seconds-per-row", type=float, default=4.0)
    arguments = parser.parse_args(argv)
    workloads = [workload for workload in WORKLOADS if re.search(arguments.filter, workload.name)]
    if not workloads:
        print(f"no row contains {arguments.filter!r}", file=sys.stderr)
        return 2
    print("| row | callers | calls/s | ±% | CPU us | onnxruntime calls/s | CPU us | ratio |", flush=True)
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for workload, count in itertools.product(workloads, arguments.callers):
        print(row_of(workload, count, rates(workload, count, arguments.seconds_per_row)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
