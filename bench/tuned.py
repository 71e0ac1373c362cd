"""Tuned block sizes beside the defaults: benchmark shapes in one process, calls in turns.

    python bench/tuned.py --selection documentation --threads 1 2

Prints a Markdown table of the shapes that run with tuned sizes, and the geometric mean. Exits with 1 when results of
the two differ by more than the tolerance, or when no shape has tuned sizes.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from calls import Call, make_call
from contenders import Contender
from disturbance import CALM, wait_until_calm, watched
from gate import exact_tolerance
from report import machine_lines, machine_record, significant
from timing import Spread, clock_for, sample
from workloads import SELECTIONS, Workload

from gqa_tvm import GroupQueryAttention
from gqa_tvm.runtime import KernelLibrary
from gqa_tvm.variants import untuned_variant

TUNED, DEFAULT = "tuned", "default"


class DifferentResult(Exception):
    """The results of both tables differ by more than the tolerance."""


def operators(call: Call, threads: int) -> dict[str, GroupQueryAttention]:
    """The operator with the tuned sizes of this machine, and with the defaults."""
    tuned, default = (GroupQueryAttention(**call.attributes, num_threads=threads) for _ in range(2))
    library = KernelLibrary()
    library.variant = untuned_variant(library.target)
    default.use_library(library)
    return {TUNED: tuned, DEFAULT: default}


def contenders(workload: Workload, threads: int) -> list[Contender] | None:
    """Both operators on the same calls; None where tuning has left the defaults. Raises DifferentResult."""
    calls = [make_call(workload, seed) for seed in range(workload.copies)]
    both = operators(calls[0], threads)
    results = {name: operator(**calls[0].inputs).output.astype(np.float64) for name, operator in both.items()}
    plan = both[TUNED].last_plan
    if plan is None or plan.block_sizes == both[DEFAULT].last_plan.block_sizes:  # type: ignore[union-attr]
        return None
    error = np.abs(results[TUNED] - results[DEFAULT]) / np.maximum(1.0, np.abs(results[DEFAULT]))
    if not (error <= 2 * exact_tolerance(workload.query, results[DEFAULT])).all():
        raise DifferentResult(f"{workload.name}: tuned and default differ by {np.nanmax(error):.3g}")
    return [
        Contender(name, [_run(operator, call) for call in calls], lambda: results[TUNED])
        for name, operator in both.items()
    ]


def _run(operator: GroupQueryAttention, call: Call) -> Callable[[], Any]:
    inputs = {**call.inputs, "present_key": call.inputs["past_key"], "present_value": call.inputs["past_value"]}
    return lambda: operator(**inputs)


def measure(both: list[Contender], threads: int, seconds: float, patience: float) -> dict[str, list[float]]:
    """The calmest samples of several attempts within `patience` seconds."""
    deadline = time.perf_counter() + patience
    attempts: list[tuple[dict[str, list[float]], float]] = []
    while not attempts or (attempts[-1][1] > CALM and time.perf_counter() < deadline):
        wait_until_calm(deadline)
        attempts.append(watched(lambda: sample(both, seconds, clock_for(threads))))
    return min(attempts, key=lambda attempt: attempt[1])[0]


def row(workload: Workload, threads: int, samples: dict[str, list[float]]) -> tuple[str, float]:
    """A line of the table, and how many times the default's speed the tuned sizes have."""
    times = {name: Spread.of(values) for name, values in samples.items()}
    gain = Spread.of([a / b for a, b in zip(samples[DEFAULT], samples[TUNED], strict=True)])
    cells = [f"`{workload.name}`", str(threads), *(significant(1e3 * times[name].median) for name in (DEFAULT, TUNED))]
    text = f"{gain.median:.3f}"
    cells += [text if gain.median >= 1 else f"**{text}**", f"{gain.low:.3f} .. {gain.high:.3f}"]
    return "| " + " | ".join(cells) + " |", gain.median


def table(lines: Sequence[str]) -> str:
    heads = ["shape", "threads", "default ms", "tuned ms", "gain", "quartiles"]
    return "\n".join(["| " + " | ".join(heads) + " |", "|---|--:|--:|--:|--:|--:|", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tuned block sizes beside the defaults.")
    parser.add_argument("--selection", choices=SELECTIONS, default="documentation")
    parser.add_argument("--filter", default="", help="regular expression that names of rows must contain")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds-per-row", type=float, default=2.0)
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait, per row, for a calm machine")
    options = parser.parse_args(argv)
    workloads = [w for w in SELECTIONS[options.selection] if re.search(options.filter, w.name) and not w.is_gemm]
    lines, gains, same, wrong = [], [], 0, []
    for threads in options.threads:
        for workload in workloads:
            try:
                both = contenders(workload, threads)
            except DifferentResult as error:
                wrong.append(str(error))
                continue
            if both is None:
                same += 1
                continue
            samples = measure(both, threads, options.seconds_per_row, options.patience)
            line, gain = row(workload, threads, samples)
            lines.append(line)
            gains.append(gain)
    print(f"{machine_lines([machine_record()])}\n\n{table(lines)}\n")
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        print(f"Geometric mean of {len(gains)} shapes: {mean:.3f}; slowest {min(gains):.3f}.")
    print(f"{same} other shapes run with the default sizes.")
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong or not gains else 0


if __name__ == "__main__":
    raise SystemExit(main())
