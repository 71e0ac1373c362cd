"""Calls a second of Python threads that call at once, each with an operator and a cache of its own.

    python bench/callers.py --callers 1 2 4 --filter 'decode_(f32|i8)_t(6|512)_'

Every operator, and every onnxruntime session beside them, runs on one thread: the callers are what is parallel. Results
are checked first, contenders are timed in turns by the wall clock. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

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


def calls_per_second(runs: Sequence[Run], seconds: float) -> float:
    """Of all callers together, who begin at once and go on for so long."""
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
    before = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    elapsed = time.perf_counter() - before
    for thread in threads:
        thread.join()
    return sum(counts) / elapsed


def rates(workload: Workload, count: int, seconds: float) -> dict[str, Spread]:
    """Calls a second by contender, in rounds that each begin with another one, for `seconds` altogether."""
    runs = callers_of(workload, count)
    rounds = max(_MIN_ROUNDS, round(seconds / (0.25 * len(runs))))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            samples[name].append(calls_per_second(runs[name], seconds / (rounds * len(names))))
    return {name: Spread.of(found) for name, found in samples.items()}


def row_of(workload: Workload, count: int, spreads: dict[str, Spread]) -> str:
    """A line of the table; ratio = our calls / those of the better of onnxruntime's paths."""
    ours = spreads[OURS]
    others = [spread.median for name, spread in spreads.items() if name != OURS]
    width = (ours.high - ours.low) / 2 / ours.median
    theirs = f"{max(others):,.0f} | {ours.median / max(others):.2f}" if others else "- | -"
    return f"| `{workload.name}` | {count} | {ours.median:,.0f} | {100 * width:.0f} | {theirs} |"


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
    print("| row | callers | calls/s | ±% | onnxruntime calls/s | ratio |\n|---|--:|--:|--:|--:|--:|", flush=True)
    for workload, count in itertools.product(workloads, arguments.callers):
        print(row_of(workload, count, rates(workload, count, arguments.seconds_per_row)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
