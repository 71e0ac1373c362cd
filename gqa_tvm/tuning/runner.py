"""Runners of candidates: this machine, or another one behind TVM's RPC tracker."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import Any, NamedTuple

import tvm
from tvm.s_tir import meta_schedule as ms

from ..errors import BuildError
from .workload import sane_array

_RUN_SECONDS = 60
_CONNECT_SECONDS = 5.0
# A repeat shorter than this measures the clock: tiny kernels are run many times in one.
_REPEAT_MILLISECONDS = 20
_REPEATS = 5


def evaluator_config() -> Any:
    return ms.runner.EvaluatorConfig(
        number=1, repeat=_REPEATS, min_repeat_ms=_REPEAT_MILLISECONDS, enable_cpu_cache_flush=False
    )


def _use_threads(threads: int) -> None:
    """Before TVM's thread pool starts in a runner process; pinned workers would share a core with others."""
    os.environ["TVM_NUM_THREADS"] = str(threads)
    os.environ["TVM_BIND_THREADS"] = "0"


def allocate(device: Any, arguments: Any, repeats: int) -> list[list[Any]]:
    """Tensors for a workload's parameters."""
    made = [tvm.runtime.tensor(sane_array(tuple(map(int, shape)), dtype), device) for _, dtype, shape in arguments]
    return [made for _ in range(repeats)]


def _allocate_remote(_session: Any, device: Any, arguments: Any, repeats: int) -> list[list[Any]]:
    return allocate(device, arguments, repeats)


def local_runner(threads: int) -> Any:
    """Runs candidates in a process of their own with TVM's thread pool of so many threads."""
    return ms.runner.LocalRunner(
        timeout_sec=_RUN_SECONDS,
        evaluator_config=evaluator_config(),
        f_alloc_argument=allocate,
        initializer=partial(_use_threads, threads),
    )


def rpc_config(address: str, device_key: str) -> Any:
    """address: host:port of the tracker."""
    host, _, port = address.rpartition(":")
    return ms.runner.RPCConfig(host, int(port), device_key, 1, _RUN_SECONDS)


def require_device(address: str, device_key: str) -> None:
    """BuildError unless the tracker answers and knows a device of this key. TVM itself would try for a minute."""
    config = rpc_config(address, device_key)
    try:
        socket.create_connection((config.tracker_host, config.tracker_port), timeout=_CONNECT_SECONDS).close()
        config.count_num_servers(allow_missing=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise BuildError(f"no device {device_key!r} at the RPC tracker {address}: {reason}") from error


class _Done(NamedTuple):
    """A future whose result is there."""

    outcome: Any

    def result(self) -> Any:
        return self.outcome


class RpcRunner:
    """MetaSchedule's RPC runner, a new one for every batch: its process would keep the device for a minute more.

    Kernels run on as many threads as the device's server was started with.
    """

    def __init__(self, address: str, device_key: str) -> None:
        self._config = rpc_config(address, device_key)

    def run(self, inputs: list[Any]) -> list[Any]:
        """The results of a batch, as futures that are done."""
        runner = ms.runner.RPCRunner(
            rpc_config=self._config, evaluator_config=evaluator_config(), f_alloc_argument=_allocate_remote
        )
        try:
            return [_Done(future.result()) for future in runner.run(inputs)]
        finally:
            runner.pool.shutdown()
