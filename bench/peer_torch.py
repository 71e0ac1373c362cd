"""PyTorch's scaled_dot_product_attention as a contender."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from calls import Call
from contenders import Contender
from workloads import Workload


def let_openmp_sleep() -> None:
    """Threads of OpenMP spin on after a call, unless they are told before its library is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def import_torch(threads: int) -> Any:
    """The module, which computes on so many threads from now on. They sleep between calls."""
    let_openmp_sleep()
    import torch

    torch.set_num_threads(threads)
    return torch


def torch_contenders(workload: Workload, calls: list[Call], threads: int) -> list[Contender]:
    """One over the filled cache, which appends nothing, where the cache is of the query's floats."""
    is_plain = not workload.feature and workload.window < 0 and not workload.ragged
    if workload.operation == "chunk" or not is_plain or workload.cache != workload.query:
        return []
    torch = import_torch(threads)
    is_causal = workload.operation == "prefill"
    results: dict[str, Any] = {}

    def run(call: Call) -> Callable[[], None]:
        query = torch.from_numpy(call.inputs["query"]).unflatten(-1, (workload.heads, -1)).transpose(1, 2)
        keys, values = (torch.from_numpy(call.inputs[name]) for name in ("past_key", "past_value"))

        def timed() -> None:
            results["output"] = torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, is_causal=is_causal, enable_gqa=True
            )

        return timed

    def output() -> np.ndarray:
        return results["output"].transpose(1, 2).flatten(2).numpy()

    return [Contender("torch", [run(call) for call in calls], output, writes_cache=False, keep=[calls])]
