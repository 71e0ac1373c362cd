"""Time the operator against onnxruntime on one thread, interleaved, after checking that both agree.

Prints the ratio onnxruntime / gqa_tvm of the medians for prefill S=512 and decode T=4096 (16/8 heads, H=128).
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

from gqa_tvm import GroupQueryAttention

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from operator_calls import make_call
from oracle import session_for_timing

HEADS, KV_HEADS, HEAD_SIZE = 16, 8, 128
CASES = (("prefill", 512, 512), ("decode", 1, 4096))
CACHES = ("f32", "i8", "i8-channel", "i4", "i4-channel")
SECONDS_PER_CASE = 4.0
MAX_PAIRS = 200


def _time(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(cache: str, tokens: int, total: int) -> tuple[float, float]:
    """(gqa_tvm, onnxruntime) median seconds of an in-place call. Raises AssertionError if they disagree."""
    attributes, inputs = make_call(
        cache, tokens=tokens, total=total, capacity=total, heads=HEADS, kv_heads=KV_HEADS, head_size=HEAD_SIZE
    )
    op = GroupQueryAttention(**attributes, num_threads=1)
    ort_call, ort_output = session_for_timing(attributes, {n: v.copy() for n, v in inputs.items()})

    def ours():
        return op(**inputs, present_key=inputs["past_key"], present_value=inputs["past_value"])

    ort_call()
    np.testing.assert_allclose(ours().output, ort_output(), rtol=1e-4, atol=1e-5)
    samples: tuple[list[float], list[float]] = ([], [])
    deadline = time.perf_counter() + SECONDS_PER_CASE
    while len(samples[0]) < MAX_PAIRS and (time.perf_counter() < deadline or len(samples[0]) < 5):
        samples[0].append(_time(ours))
        samples[1].append(_time(ort_call))
    return statistics.median(samples[0]), statistics.median(samples[1])


def main() -> int:
    """Print one row per case and cache."""
    print(f"one thread, {HEADS}/{KV_HEADS} heads, H={HEAD_SIZE}; medians of interleaved in-place calls")
    print(f"{'case':22} {'cache':12} {'gqa_tvm ms':>10} {'ort ms':>10} {'ort / ours':>10}")
    for name, tokens, total in CASES:
        for cache in CACHES:
            ours, ort = measure(cache, tokens, total)
            case = f"{name} S={tokens} T={total}"
            print(f"{case:22} {cache:12} {ours * 1e3:10.3f} {ort * 1e3:10.3f} {ort / ours:10.2f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
