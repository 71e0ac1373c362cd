"""Peak memory of a prompt beyond its inputs and outputs, for each path of this project and of onnxruntime.

    python bench/memory.py --tokens 4096 --threads 1 2 --json docs/performance/memory.jsonl

Every number comes from a process of its own: the growth of its peak resident size over one call, less the output, which
the call allocates. Kernels and sessions are loaded by a small call before. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calls import Call, make_call
from contenders import ORT_FLASH, ORT_NAIVE, onnxruntime_binding, onnxruntime_session
from report import Record, machine_record, memory_table
from workloads import CACHE_BITS, prefill

from gqa_tvm import GroupQueryAttention
from gqa_tvm.launcher import launcher

OURS_FLASH, OURS_NAIVE = "gqa_tvm flash", "gqa_tvm naive"
CONTENDERS = (OURS_FLASH, OURS_NAIVE, ORT_FLASH, ORT_NAIVE)
_WARM_UP_TOKENS = 64
_RESET_PEAK = "5"


def peak_of_call(contender: str, cache: str, tokens: int, threads: int) -> Record:
    """{"peak": bytes beyond inputs and output, "scratch": what the launcher holds afterwards, or None}."""
    run = _runner(contender, cache, threads)
    # Scratch of a thread goes back when it ends.
    warm_up = threading.Thread(target=run, args=(make_call(prefill(cache, _WARM_UP_TOKENS)),))
    warm_up.start()
    warm_up.join()
    call = make_call(prefill(cache, tokens))
    _return_free_memory()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _status_bytes("VmRSS")
    output_bytes = run(call)
    peak = _status_bytes("VmHWM") - before - output_bytes
    return {"peak": peak, "scratch": _scratch_bytes() if contender in (OURS_FLASH, OURS_NAIVE) else None}


def _return_free_memory() -> None:
    """Free memory that the process still holds would be taken again without being counted. glibc only."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _runner(contender: str, cache: str, threads: int) -> Any:
    """A function that runs a call and returns the bytes of its output."""
    attributes = make_call(prefill(cache, _WARM_UP_TOKENS)).attributes
    if contender in (OURS_FLASH, OURS_NAIVE):
        op = GroupQueryAttention(**attributes, num_threads=threads, strategy=contender.split()[-1])
        return lambda call: _run_ours(op, call)
    disable_flash = contender == ORT_NAIVE
    session = onnxruntime_session(make_call(prefill(cache, _WARM_UP_TOKENS)), threads, disable_flash)
    return lambda call: _run_onnxruntime(session, call)


def _run_ours(op: GroupQueryAttention, call: Call) -> int:
    inputs = call.inputs
    return op(**inputs, present_key=inputs["past_key"], present_value=inputs["past_value"]).output.nbytes


def _run_onnxruntime(session: Any, call: Call) -> int:
    binding, _values = onnxruntime_binding(session, call)
    session.run_with_iobinding(binding)
    return int(binding.get_outputs()[0].numpy().nbytes)


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024


def _scratch_bytes() -> int:
    """Scratch memory that all threads hold."""
    return int(launcher().workspace_bytes())


def _in_new_process(*arguments: str) -> Record:
    command = [sys.executable, __file__, "--one", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(cache: str, tokens: int, threads: int) -> Record:
    """A record of kind "memory" with every contender."""
    found = {name: _in_new_process(name, cache, str(tokens), str(threads)) for name in CONTENDERS}
    return {
        "kind": "memory",
        "name": prefill(cache, tokens).name,
        "threads": threads,
        "peak_bytes": {name: one["peak"] for name, one in found.items()},
        "scratch_bytes": {name: one["scratch"] for name, one in found.items() if one["scratch"] is not None},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--caches", nargs="+", choices=CACHE_BITS, default=["f32", "i8"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="file of JSON lines to write")
    parser.add_argument("--one", nargs=4, metavar=("CONTENDER", "CACHE", "TOKENS", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        contender, cache, tokens, threads = arguments.one
        print(json.dumps(peak_of_call(contender, cache, int(tokens), int(threads))))
        return 0
    records = [measure(cache, arguments.tokens, threads) for threads in arguments.threads for cache in arguments.caches]
    print(memory_table(records))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text("".join(json.dumps(record) + "\n" for record in [machine_record(), *records]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
