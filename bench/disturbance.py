"""How much of the machine other processes took while something was timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
# Cores that others may keep busy.
CALM = 0.05
_LOOK = 0.4
_STAT = Path("/proc/stat")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7


def watched(work: Callable[[], Result]) -> tuple[Result, float]:
    """(what `work` returns, cores that others kept busy meanwhile, hypervisor included); 0 where Linux does not tell.

    Exact to about 10 ms of CPU time.
    """
    before = _busy_seconds(), _own_seconds(), time.perf_counter()
    result = work()
    after = _busy_seconds(), _own_seconds(), time.perf_counter()
    busy, own, wall = (now - then for now, then in zip(after, before, strict=True))
    return result, max(0.0, busy - own) / wall


def wait_until_calm(deadline: float) -> None:
    """Sleep while others use the machine, until the deadline (of time.perf_counter) at most."""
    while time.perf_counter() < deadline and watched(lambda: time.sleep(_LOOK))[1] > CALM:
        pass


def _busy_seconds() -> float:
    """CPU time of all processes since boot, and what the hypervisor took."""
    try:
        fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1 : _STEAL + 2]]
    except (OSError, ValueError):
        return _own_seconds()
    return (sum(fields) - fields[_IDLE] - fields[_IOWAIT]) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system
