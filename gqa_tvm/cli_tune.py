"""The command `gqa-tvm tune`."""

from __future__ import annotations

import argparse
import re
import sys

_TIME_UNITS = {"s": 1, "m": 60, "h": 3600}


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gqa_tvm.tune`, and --report."""
    add = parser.add_argument
    add("--target", help="variant to tune (the best for this CPU)")
    add("--kernel", nargs="+", default=[], metavar="NAME", help="kernel names, flash_decode or flash_prefill (both)")
    add("--head-size", type=_positive, nargs="+", default=[64, 128], metavar="H", help="(%(default)s)")
    add("--group-size", type=_positive, nargs="+", default=[1, 2, 4, 8], metavar="G", help="(%(default)s)")
    add("--total", type=_positive, nargs="+", default=[512, 4096, 32768], metavar="T", help="keys (%(default)s)")
    add("--threads", type=_positive, nargs="+", metavar="N", help="of measured calls (1 and all usable cores)")
    add("--trials", type=_positive, default=64, help="candidates a kernel and group size (%(default)s)")
    add("--time-budget", type=_seconds, metavar="10m", help="stop starting searches after so long: 90s, 10m, 2h")
    add("--strategy", choices=("evolutionary", "replay-trace"), default="evolutionary", help="(%(default)s)")
    add("--cost-model", choices=("xgb", "random"), default="xgb", help="(%(default)s)")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", default=True, help="go on with an earlier run (default)")
    again.add_argument("--fresh", action="store_false", dest="resume", help="forget what earlier runs measured")
    add("--output", metavar="DIR", help="folder of logs (tuning_logs of a checkout, else the user's cache)")
    add("--rpc", metavar="HOST:PORT", help="TVM RPC tracker whose device measures instead of this machine")
    add("--device-key", metavar="KEY", help="of the device at the tracker")


def run_tune(options: argparse.Namespace) -> int:
    """Tunes with a progress bar; 130 after Ctrl-C, with what was found until then kept."""
    from gqa_tvm import tune
    from gqa_tvm.progress import ProgressBar
    from gqa_tvm.targets import best_target
    from gqa_tvm.tuning.tune import chosen_tasks, describe

    target = options.target or best_target()
    shapes = options.head_size, options.group_size, tuple(options.total), (1,)
    tasks = chosen_tasks(target, options.kernel, *shapes)
    measured = 0
    with ProgressBar("tuning", max(1, len(tasks) * options.trials)) as bar:

        def report(trials: int, text: str) -> None:
            nonlocal measured
            measured += trials
            bar.advance(trials, f"{measured} trials, {text}")

        summary = tune(
            target,
            kernels=options.kernel,
            head_sizes=options.head_size,
            group_sizes=options.group_size,
            totals=options.total,
            threads=options.threads,
            trials=options.trials,
            time_budget=options.time_budget,
            strategy=options.strategy,
            cost_model=options.cost_model,
            resume=options.resume,
            output=options.output,
            rpc=options.rpc,
            device_key=options.device_key,
            report=report,
        )
    print(describe(summary))
    if not summary.interrupted:
        return 0
    # TVM's process pools complain about the end of a process that was interrupted in them.
    sys.unraisablehook = lambda unraisable: None
    return 130


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must look like 90s, 10m or 2h, got {text!r}")
    return float(match[1]) * _TIME_UNITS[match[2] or "s"]
