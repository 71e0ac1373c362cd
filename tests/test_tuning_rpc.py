"""Tuning for another machine: TVM's RPC tracker and server, here on loopback."""

from __future__ import annotations

import time

import pytest

from gqa_tvm.errors import BuildError
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.targets import best_target, target_facts
from gqa_tvm.tuning.remote_bench import RemoteBench
from gqa_tvm.tuning.runner import RpcRunner, require_device, rpc_config
from gqa_tvm.tuning.search import SearchOptions
from gqa_tvm.tuning.searcher import ScheduleSearcher
from gqa_tvm.tuning.task import Task
from gqa_tvm.variants import untuned_variant

KEY = "loopback"


@pytest.fixture
def tracker(monkeypatch):
    """Address of a tracker that one server is registered with."""
    pytest.importorskip("tornado", reason="TVM's tracker needs it")
    from tvm.rpc.server import Server
    from tvm.rpc.tracker import Tracker

    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    monkeypatch.setenv("TVM_BIND_THREADS", "0")
    tracker = Tracker(host="127.0.0.1", port=9190, port_end=9290, silent=True)
    address = ("127.0.0.1", tracker.port)
    server = Server(host="127.0.0.1", port=9300, port_end=9400, tracker_addr=address, key=KEY, silent=True)
    address_text = f"127.0.0.1:{tracker.port}"
    deadline = time.monotonic() + 30
    while rpc_config(address_text, KEY).count_num_servers() == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    yield address_text
    server.terminate()
    tracker.terminate()


@pytest.mark.slow
def test_search_check_and_measure(tracker, tmp_path):
    require_device(tracker, KEY)
    variant = untuned_variant(best_target())
    runner = RpcRunner(tracker, KEY)
    options = SearchOptions("replay-trace", "random")
    searcher = ScheduleSearcher(variant, target_facts(variant.target), tmp_path, runner, options)
    task = Task(KernelSpec.parse("flash_decode_f32_i8_h16_r1"), 1, (512,), (1,))
    default = searcher.points(task)[0]
    found = searcher.search(task, default, 512, 3, float("inf"), lambda count: None)
    assert not found.failures, found.first_reason
    assert len({candidate.sizes for candidate in found.candidates}) == 3
    assert all(0 < candidate.seconds < 1 for candidate in found.candidates)
    bench = RemoteBench(searcher, tracker, KEY)
    assert bench.check(task, found.candidates[0].sizes) is None
    assert all(time > 0 for time in bench.measure(task, task.cells[0], [default, found.candidates[0].sizes]))


def test_wrong_numbers_over_rpc_are_found(monkeypatch, tmp_path):
    """The reference decides, whatever the device returns."""
    variant = untuned_variant(best_target())
    searcher = ScheduleSearcher(variant, target_facts(variant.target), tmp_path, None, SearchOptions())
    bench = RemoteBench(searcher, "127.0.0.1:1", KEY)
    task = Task(KernelSpec.parse("flash_decode_f32_f32_h8_r1"), 1, (512,), (1,))
    monkeypatch.setattr(bench, "_with_session", lambda work: 0.0)
    assert "wrong result" in str(bench.check(task, searcher.points(task)[0]))


def test_a_device_that_is_not_there():
    with pytest.raises(BuildError, match="no device"):
        require_device("127.0.0.1:1", KEY)
