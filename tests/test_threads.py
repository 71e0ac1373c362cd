"""The shared thread pool: concurrent callers, use after fork, idle cost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from operator_calls import make_call

from gqa_tvm import GroupQueryAttention


def _setup():
    attributes, inputs = make_call("i8", total=3000)
    op = GroupQueryAttention(**attributes, num_threads=3)
    return op, inputs, op(**inputs).output


def test_python_threads_may_call_at_once():  # B112
    op, inputs, wanted = _setup()
    with ThreadPoolExecutor(8) as pool:
        for output in pool.map(lambda _: op(**inputs).output, range(64)):
            np.testing.assert_array_equal(output, wanted)


def test_works_in_a_forked_child():
    op, inputs, wanted = _setup()
    child = os.fork()
    if child == 0:
        same = all(np.array_equal(op(**inputs).output, wanted) for _ in range(20))
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError("the child hangs in its first parallel call")
    np.testing.assert_array_equal(op(**inputs).output, wanted)


def test_idle_workers_cost_nothing():
    _setup()
    time.sleep(0.05)
    before = sum(os.times()[:2])
    time.sleep(0.3)
    assert sum(os.times()[:2]) - before < 0.1


# In a process of its own, where no other thread than the pool's has anything to do.
_SMALL_AND_LARGE = """
import sys, threading, time
from pathlib import Path
import numpy as np
from gqa_tvm import GroupQueryAttention
from operator_calls import make_call

def cpu_ns_of_workers():
    own = str(threading.get_native_id())
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != own]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)

def cpu_ns_when_asleep():
    before = None
    while before != (now := cpu_ns_of_workers()):
        before = now
        time.sleep(0.02)
    return now

for total, is_small in ((40, True), (6000, False)):
    attributes, inputs = make_call(sys.argv[1], total=total)
    op = GroupQueryAttention(**attributes, num_threads=3)
    wanted = op(**inputs).output
    before, until = cpu_ns_when_asleep(), time.monotonic() + (0.02 if is_small else 10)
    while cpu_ns_of_workers() == before and time.monotonic() < until:
        np.testing.assert_array_equal(op(**inputs).output, wanted)
    assert (cpu_ns_of_workers() == before) == is_small, total
"""


@pytest.mark.parametrize("cache", ["f32", "i4"])
def test_a_small_call_leaves_the_workers_asleep(cache):
    """One thread is faster there; a call over many keys takes the workers, and has the same result."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", _SMALL_AND_LARGE, cache]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
