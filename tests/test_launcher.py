"""The launcher by itself: its services called from Python, small kernels linked with it, a stress run."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
from launcher_services import GCC, LAUNCHER, Task, link

pytest.importorskip("tvm")


def _rows(module, size=1000, halvings=50):
    x, y = np.linspace(-1, 1, size, dtype=np.float32), np.zeros(size, np.float32)
    module["rows"](x, y, halvings)
    return y


def test_results_do_not_depend_on_threads(library, services):
    module = tvm_ffi.load_module(str(library))
    services.set_num_threads(1)
    wanted = _rows(module)
    np.testing.assert_allclose(wanted, 4 * np.linspace(-1, 1, 1000), atol=1e-5)
    for threads in (2, 3, 5, 16):
        services.set_num_threads(threads)
        for _ in range(20):
            np.testing.assert_array_equal(_rows(module), wanted)


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("num_task", [0, 1, 2, 7, 100])
def test_every_task_runs_once(services, threads, num_task):
    services.set_num_threads(threads)
    seen = []
    task = Task(lambda index, env, _: seen.append((index, env.contents.num_task)) or 0)
    assert services.launch(task, None, num_task) == 0
    wanted = num_task or (1 if threads == 1 else 32 * threads)
    assert sorted(seen) == [(index, wanted) for index in range(wanted)]


def test_thread_count_belongs_to_the_calling_thread(services):
    cpus = len(os.sched_getaffinity(0))
    assert services.set_num_threads(0) == cpus
    assert services.set_num_threads(3) == 3
    assert services.set_num_threads(-1) == -1
    assert services.get_num_threads() == 3
    assert services.set_num_threads(1000) == 256
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(services.get_num_threads).result() == cpus


@pytest.mark.parametrize("threads", [1, 4])
def test_first_error_is_returned_and_the_rest_skipped(services, threads):
    services.set_num_threads(threads)
    ran = []
    task = Task(lambda index, env, _: ran.append(index) or time.sleep(0.001) or 7)
    assert services.launch(task, None, 1000) == 7
    assert len(ran) <= threads
    assert services.launch(Task(lambda *_: 0), None, 0) == 0


def test_launch_inside_a_task_is_serial(services):
    inner = []
    count = Task(lambda index, env, _: inner.append((threading.get_ident(), env.contents.num_task)) or 0)

    def outer(index, env, _):
        own = len(inner)
        assert services.launch(count, None, 0) == 0
        return 0 if (threading.get_ident(), 1) in inner[own:] else 1

    assert services.launch(Task(outer), None, 10) == 0
    assert len(inner) == 10


def test_python_threads_launch_at_once(library, services):
    module = tvm_ffi.load_module(str(library))
    wanted = _rows(module)

    def call(index):
        services.set_num_threads(1 + index % 4)
        return all(np.array_equal(_rows(module), wanted) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(32)))


def test_sleeping_workers_are_woken(services):
    for pause in np.linspace(0, 3e-4, 40):
        helpers = set()
        task = Task(lambda *_, seen=helpers: seen.add(threading.get_ident()) or time.sleep(0.005) or 0)
        time.sleep(pause)
        assert services.launch(task, None, 8) == 0
        assert len(helpers) == 2


def test_idle_workers_use_no_cpu(services):
    services.set_num_threads(16)
    services.launch(Task(lambda *_: 0), None, 0)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def _run_python(code: str, *arguments: object) -> None:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    path = os.pathsep.join([str(Path(__file__).parent), str(LAUNCHER.parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_runs_without_tvm(library):
    code = """
import sys, ctypes, numpy as np, tvm_ffi
x, y = np.ones(1000, np.float32), np.zeros(1000, np.float32)
module = tvm_ffi.load_module(sys.argv[1])
ctypes.CDLL(sys.argv[1]).gqa_tvm_set_num_threads(2)
module["rows"](x, y, 50)
assert np.allclose(y, 4) and "tvm" not in sys.modules
"""
    _run_python(code, library)


def test_tvm_does_not_replace_the_launcher(library, services):
    with pytest.raises(ValueError, match="undefined symbol"):
        ctypes.c_void_p.in_dll(ctypes.CDLL(str(library)), "__TVMBackendParallelLaunch")
    before = services.workspace_bytes()
    with ThreadPoolExecutor(1) as pool:  # a thread that has no scratch memory yet
        pool.submit(_rows, tvm_ffi.load_module(str(library))).result()
        assert services.workspace_bytes() > before


def test_workers_survive_the_unloading_of_their_library(folder):
    code = """
import _ctypes, sys, time
from pathlib import Path
from launcher_services import Services, Task
path = Path(sys.argv[1])
services = Services(path)
services.set_num_threads(4)
services.launch(Task(lambda *_: 0), None, 0)
_ctypes.dlclose(services.library._handle)
time.sleep(0.01)
assert str(path) in Path("/proc/self/maps").read_text()
"""
    _run_python(code, link(folder, "unloaded.so", LAUNCHER))


def test_stress_under_thread_sanitizer(folder):
    source, program = Path(__file__).with_name("launcher_stress.c"), folder / "stress"
    command = [GCC, "-O1", "-g", "-fsanitize=thread", "-pthread", str(source), str(LAUNCHER)]
    if subprocess.run([*command, "-o", str(program), "-ldl"], capture_output=True).returncode != 0:
        pytest.skip("gcc has no ThreadSanitizer here")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[:5000]


def test_child_of_a_fork_can_launch(library, services):
    module = tvm_ffi.load_module(str(library))
    wanted = _rows(module)
    stop = threading.Event()

    def keep_launching():
        services.set_num_threads(3)
        while not stop.is_set():
            _rows(module)

    busy = threading.Thread(target=keep_launching)
    busy.start()
    children = []
    for _ in range(10):
        children.append(os.fork())
        if children[-1] == 0:
            same = all(np.array_equal(_rows(module), wanted) for _ in range(20))
            workers = len(os.listdir("/proc/self/task")) - 1
            os._exit(0 if same and workers == 1 else 1)
    stop.set()
    busy.join()
    deadline = time.monotonic() + 20
    while children and time.monotonic() < deadline:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            children.remove(done)
    for child in children:
        os.kill(child, 9)
    assert not children, "a child hangs"
    np.testing.assert_array_equal(_rows(module), wanted)
