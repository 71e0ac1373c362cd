"""Samples of several calls in turns, so that what disturbs one disturbs all."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from contenders import Contender

Clock = Callable[[], float]

MIN_ROUNDS = 3
MAX_ROUNDS = 400
# Short calls are timed several at once, after one that is not: whoever ran before has emptied the CPU's caches of code.
_SAMPLE_SECONDS = 1e-3
_MAX_CALLS_PER_SAMPLE = 50
_SHORT_SECONDS = 2e-2


class Spread(NamedTuple):
    """Quartiles of the samples, seconds or a ratio, and their number."""

    median: float
    low: float
    high: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        if len(samples) < 2:
            return Spread(samples[0], samples[0], samples[0], 1)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(median, low, high, len(samples))


def clock_for(threads: int) -> Clock:
    """CPU time of the process for one thread, which does not count what other processes take; else the wall clock."""
    return time.process_time if threads == 1 else time.perf_counter


def sample(contenders: Sequence[Contender], seconds: float, clock: Clock = time.perf_counter) -> dict[str, list[float]]:
    """Seconds of `clock` a call by contender; entry i of each list belongs to round i.

    Rounds go on for `seconds`, at least MIN_ROUNDS. The contender that begins a round changes from one to the next, and
    each goes through the copies of the inputs at another place, so that nobody finds what another has just read.
    """
    turns: dict[str, _Turn] = {}
    for place, contender in enumerate(contenders):
        first = place * len(contender.runs) // len(contenders)
        stream = itertools.cycle([*contender.runs[first:], *contender.runs[:first]])
        turns[contender.name] = _Turn.of(stream, clock, contender.rest)
    samples: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    deadline = time.perf_counter() + seconds
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() >= deadline:
            break
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            samples[name].append(turns[name].take())
    return samples


class _Turn(NamedTuple):
    """What a contender does in a round: calls that are not timed, calls that are, a rest until its threads sleep."""

    stream: Iterator[Callable[[], Any]]
    clock: Clock
    untimed: int
    timed: int
    rest: float

    @staticmethod
    def of(stream: Iterator[Callable[[], Any]], clock: Clock, rest: float) -> _Turn:
        seconds = _Turn(stream, clock, 0, 1, rest).take()
        timed = max(1, min(_MAX_CALLS_PER_SAMPLE, int(_SAMPLE_SECONDS / max(seconds, 1e-9))))
        return _Turn(stream, clock, int(seconds < _SHORT_SECONDS), timed, rest)

    def take(self) -> float:
        """Seconds a call."""
        for _ in range(self.untimed):
            next(self.stream)()
        calls = [next(self.stream) for _ in range(self.timed)]
        start = self.clock()
        for call in calls:
            call()
        seconds = self.clock() - start
        if self.rest:
            time.sleep(self.rest)
        return seconds / self.timed
