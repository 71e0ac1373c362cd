"""Known faults of threads: each test is the smallest case that showed one."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from known_fault_calls import FORMATS, STRATEGIES
from operator_calls import make_call

from gqa_tvm import GroupQueryAttention
from gqa_tvm.build import build_kernel
from gqa_tvm.kernel_cache import kernel_path
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.runtime import KernelLibrary, launcher
from gqa_tvm.targets import best_target
from gqa_tvm.variants import machine_variant


def test_callers_stay_free_to_move():  # B107
    attributes, inputs = make_call("i8", total=4096, head_size=8)
    wanted = GroupQueryAttention(**attributes, num_threads=1)(**inputs).output
    allowed = os.sched_getaffinity(0)

    def call(threads):
        op = GroupQueryAttention(**attributes, num_threads=threads)
        same = all(np.array_equal(op(**inputs).output, wanted) for _ in range(20))
        # 0 is the calling thread.
        return same and os.sched_getaffinity(0) == allowed

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, [1] * 8 + [2] * 8))


@pytest.mark.slow
def test_kernels_built_at_once(tmp_path, monkeypatch):  # B109
    launcher()
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path))
    # The first size is wanted by two threads.
    specs = [KernelSpec("append", "f32", cache, size) for size in (1, 2, 3) for cache in ("f32", "i8")]
    wanted = [*specs, specs[0], specs[1]]
    start, errors = threading.Barrier(4), []

    def build(own):
        start.wait()
        try:
            for spec in own:
                build_kernel(spec, machine_variant(best_target()))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build, args=(wanted[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    library = KernelLibrary(best_target())
    for spec in specs:
        assert kernel_path(spec, machine_variant(best_target())).is_relative_to(tmp_path)
        assert callable(library.kernel(spec))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", FORMATS)
def test_results_do_not_depend_on_threads_or_batch_mates(cache, strategy):  # B111
    attributes, inputs = make_call(cache, total=5000, head_size=8, batch=8)
    inputs["seqlens_k"] = np.array([4999, 0, 17, 63, 64, 1023, 1024, 4000], np.int32)
    whole = GroupQueryAttention(**attributes, strategy=strategy, num_threads=1)(**inputs).output
    for threads in (2, 7, 16):
        got = GroupQueryAttention(**attributes, strategy=strategy, num_threads=threads)(**inputs).output
        np.testing.assert_array_equal(got, whole)
    batched = ("query", "key", "value", "past_key", "past_value", "seqlens_k")
    for b in range(8):
        alone = inputs | {name: inputs[name][b : b + 1] for name in batched}
        # Alone it needs no room for longer entries: one to five chunks.
        alone["total_sequence_length"] = inputs["seqlens_k"][b : b + 1] + 1
        got = GroupQueryAttention(**attributes, strategy=strategy)(**alone).output
        np.testing.assert_array_equal(got, whole[b : b + 1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_concurrent_calls(strategy):  # B112
    attributes, inputs = make_call("i8", total=2100, head_size=8)
    op = GroupQueryAttention(**attributes, strategy=strategy, num_threads=3)
    wanted = op(**inputs).output
    results, start = [], threading.Barrier(8)

    def call():
        start.wait()
        results.extend(op(**inputs).output for _ in range(20))

    threads = [threading.Thread(target=call, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(results) == 160 and all(np.array_equal(result, wanted) for result in results)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("batch", "kv_heads", "total"), [(1, 1, 64), (1, 2, 40), (3, 4, 3000)])
def test_scratch_of_threads_is_their_own(batch, kv_heads, total, strategy):  # B113
    attributes, inputs = make_call("i8", total=total, head_size=8, batch=batch, heads=kv_heads, kv_heads=kv_heads)
    operators = [GroupQueryAttention(**attributes, strategy=strategy, num_threads=count) for count in (1, 2, 3, 16)]
    wanted = operators[0](**inputs).output
    for repeat in range(120):
        assert np.array_equal(operators[repeat % 4](**inputs).output, wanted)
