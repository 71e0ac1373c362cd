"""Known faults of memory that grows or is copied: each test is the smallest case that showed one."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
import tvm_ffi
from known_fault_calls import STRATEGIES
from operator_calls import make_call

from gqa_tvm import GroupQueryAttention
from gqa_tvm.launcher import launcher

MIB = 1 << 20


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "in_place"), [("numpy", False), ("dlpack", True)])
def test_calls_leave_nothing_behind(kind, in_place):  # B114
    attributes, inputs = make_call("i8", total=6, head_size=8)
    tensors = {name: tvm_ffi.from_dlpack(array) for name, array in inputs.items()} if kind == "dlpack" else inputs
    presents = {}
    if in_place:
        presents = {"present_key": tensors["past_key"], "present_value": tensors["past_value"]}
    op = GroupQueryAttention(**attributes, num_threads=1)
    for _ in range(2000):
        op(**tensors, **presents)
    before = resident_bytes()
    for _ in range(20_000):
        op(**tensors, **presents)
    assert resident_bytes() - before < 5 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tokens", [1, 4])
def test_keys_and_bias_are_not_repeated(tokens, strategy):  # B117
    total, heads = 32_768, 32
    attributes, inputs = make_call(
        "f32", tokens=tokens, total=total, heads=heads, kv_heads=2, head_size=64, capacity=total
    )
    inputs["attention_bias"] = np.zeros((1, 1, tokens, total), np.float32)
    presents = {"present_key": inputs["past_key"], "present_value": inputs["past_value"]}
    op = GroupQueryAttention(**attributes, strategy=strategy, num_threads=1)
    before = launcher().workspace_bytes()
    op(**inputs, **presents)
    tracemalloc.start()
    try:
        op(**inputs, **presents)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    cache, bias = inputs["past_key"].nbytes, inputs["attention_bias"].nbytes
    # Not even one copy of the cache, nor of the bias for each head.
    assert peak < min(cache, bias * heads) / 2
    assert launcher().workspace_bytes() - before < cache
