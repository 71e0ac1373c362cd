"""The scratch allocator of the launcher."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tvm_ffi
from launcher_services import LAUNCHER, MIB, Services, link

pytest.importorskip("tvm")


def test_scratch_is_aligned_and_reused(services):
    services.free(services.allocate(MIB))
    before = services.workspace_bytes()
    for order in (1, -1):  # last in, first out, as TVM does, and the other way round
        blocks = [services.allocate(size) for size in (0, 1, 100, 5000, 0, 70_000)]
        assert len(set(blocks)) == len(blocks) and all(block % 64 == 0 for block in blocks)
        for block in blocks[::-order]:
            services.free(block)
        again = services.allocate(0)
        assert again == blocks[0]
        services.free(again)
    assert services.workspace_bytes() == before


def test_scratch_goes_back(services):
    before = services.workspace_bytes()
    block = services.allocate(100 * MIB)
    assert services.workspace_bytes() >= before + 100 * MIB
    services.free(block)
    assert services.workspace_bytes() == before
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: services.free(services.allocate(10 * MIB))).result()
        assert services.workspace_bytes() >= before + 10 * MIB
    # A joined thread's destructors may still be running.
    deadline = time.monotonic() + 10
    while services.workspace_bytes() != before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert services.workspace_bytes() == before
    assert services.allocate(1 << 62) is None
    assert services.allocate((1 << 64) - 1) is None


@pytest.mark.parametrize("poison", ["0", "1"])
def test_poisoned_scratch(folder, monkeypatch, poison):
    monkeypatch.setenv("GQA_TVM_POISON_SCRATCH", poison)
    services = Services(link(folder, f"poison{poison}.so", LAUNCHER))
    for _ in range(2):
        block = services.allocate(4096)
        values = np.ctypeslib.as_array((ctypes.c_float * 1024).from_address(block))
        assert np.isnan(values).all() == (poison == "1")
        values[:] = 0
        services.free(block)


@pytest.mark.parametrize("threads", [1, 4])
def test_running_out_of_memory_raises_and_leaks_nothing(library, services, threads):
    module = tvm_ffi.load_module(str(library))
    services.set_num_threads(threads)
    x = np.zeros(100_000, np.float32)
    module["greedy"](x, 4)
    for attempt in range(50):
        with pytest.raises(MemoryError, match="scratch buffer"):
            module["greedy"](x, 1 << 58)
        if attempt == 5:
            before = services.workspace_bytes()
    assert services.workspace_bytes() <= before + 4 * MIB
