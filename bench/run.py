"""Time the operator beside onnxruntime (and its peers): right results first, then calls in turns.

    python bench/run.py --selection quick
    python bench/run.py --selection scaling --threads 1 2 --patience 20 --json results.jsonl
    python bench/run.py --filter '^decode_f32_t4096' --peers torch openvino vllm ggml  # pip install them first

Prints a Markdown table per number of threads. Exits with 1 when a result of this project was wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from calls import make_call, make_gemm
from contenders import Contender, gemm_contenders, operator_contenders
from disturbance import CALM, wait_until_calm, watched
from gate import WrongResult, check_gemm, check_operator
from limits import Limits, measure_limits
from peers import PEERS, missing_packages, peer_contenders
from report import Record, limits_record, machine_lines, machine_record, row_record, row_table
from timing import clock_for, sample
from workloads import SELECTIONS, Workload


def measure(workload: Workload, limits: Limits, options: argparse.Namespace) -> Record:
    """The record of a workload. Raises WrongResult, and then nothing was timed.

    It waits for other processes to leave the machine and is sampled again when they came back meanwhile, all within
    options.patience seconds; the calmest samples count.
    """
    contenders = _right_contenders(workload, limits.threads, options.peers)
    deadline = time.perf_counter() + options.patience
    attempts: list[tuple[dict[str, list[float]], float]] = []
    while not attempts or (attempts[-1][1] > CALM and time.perf_counter() < deadline):
        wait_until_calm(deadline)
        attempts.append(watched(lambda: sample(contenders, options.seconds_per_row, clock_for(limits.threads))))
    samples, others = min(attempts, key=lambda attempt: attempt[1])
    return row_record(workload, limits, samples, others)


def _right_contenders(workload: Workload, threads: int, peers: Sequence[str]) -> list[Contender]:
    if workload.is_gemm:
        gemms = [make_gemm(workload, seed) for seed in range(workload.copies)]
        contenders = gemm_contenders(workload, gemms, threads)
        check_gemm(workload, gemms[0], contenders)
        return contenders
    calls = [make_call(workload, seed) for seed in range(workload.copies)]
    contenders = operator_contenders(workload, calls, threads) + peer_contenders(workload, calls, threads, peers)
    return check_operator(workload, calls[0], contenders)


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"{text:80}", end="\r", file=sys.stderr, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--selection", choices=SELECTIONS, default="quick")
    parser.add_argument("--filter", default="", help="regular expression that names of rows must contain")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds-per-row", type=float, default=2.0, help="besides the check; at least 3 rounds")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait, per row, for a calm machine")
    parser.add_argument("--peers", choices=PEERS, nargs="+", default=[], help="others, in the rows they can run")
    parser.add_argument("--json", type=Path, help="file of JSON lines to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    workloads = [w for w in SELECTIONS[arguments.selection] if re.search(arguments.filter, w.name)]
    if not workloads:
        print(f"no row of {arguments.selection} contains {arguments.filter!r}", file=sys.stderr)
        return 2
    if missing := missing_packages(arguments.peers):
        print(f"not installed: {', '.join(missing)}; see docs/performance.md", file=sys.stderr)
        return 2
    if arguments.json is None:
        return _run(workloads, arguments, None)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    with arguments.json.open("w") as file:
        return _run(workloads, arguments, file)


def _run(workloads: Sequence[Workload], arguments: argparse.Namespace, file: TextIO | None) -> int:
    def write(record: Record) -> None:
        if file is not None:
            print(json.dumps(record), file=file, flush=True)

    machine = machine_record()
    write(machine)
    print(machine_lines([machine]), flush=True)
    wrong = []
    for threads in arguments.threads:
        wait_until_calm(time.perf_counter() + arguments.patience)
        limits = measure_limits(threads)
        write(limits_record(limits))
        print(f"\n{machine_lines([limits_record(limits)])}\n", flush=True)
        rows = []
        for number, workload in enumerate(workloads, 1):
            _show_progress(f"[{number}/{len(workloads)}] {workload.name}")
            try:
                rows.append(measure(workload, limits, arguments))
            except WrongResult as error:
                wrong.append(f"{workload.name}: {error}")
                print(f"\n{wrong[-1]}; not timed", file=sys.stderr, flush=True)
            else:
                write(rows[-1])
        _show_progress("")
        if rows:
            print(row_table(rows), flush=True)
    if wrong:
        print("\nWrong results, not timed:\n" + "\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
