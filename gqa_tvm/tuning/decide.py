"""Which sizes are taken: right numbers, and faster than the default in two measurements, for every cell together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..schedules.block_sizes import BlockSizes
from ..tuned_sizes import ORDER_FIELDS
from .task import Cell

# Seconds of every candidate, the default's first, by cell.
Times = Mapping[Cell, Sequence[float]]
# The candidate of each cell, 0 = the default.
Choice = dict[Cell, int]

# What a gain must be to count, and what a cell may lose where another gains.
MARGIN = 0.02
SLACK = 0.01


def order_of(sizes: BlockSizes) -> tuple[object, ...]:
    """What decides in which order numbers are added: one choice for all cells of a task."""
    return tuple(getattr(sizes, field) for field in ORDER_FIELDS)


def gain(times: Times, cell: Cell, candidate: int) -> float:
    """The default's seconds over the candidate's; 0 for a time that is none."""
    default, own = times[cell][0], times[cell][candidate]
    return default / own if default > 0 and 0 < own < math.inf else 0.0


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values and min(values) > 0 else 0.0


def proposals(candidates: Sequence[BlockSizes], first: Times) -> list[Choice]:
    """For each order of additions the fastest candidate of every cell; the best order first."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, sizes in enumerate(candidates):
        groups.setdefault(order_of(sizes), []).append(index)
    choices = [
        {cell: max(members, key=lambda index: gain(first, cell, index)) for cell in first}
        for members in groups.values()
    ]
    choices = [choice for choice in choices if any(choice.values())]
    return sorted(choices, key=lambda choice: -mean_gain(first, choice))


def worth_repeating(candidates: Sequence[BlockSizes], first: Times, count: int) -> list[Choice]:
    """The best proposals that are faster than the default; that of the default's own order always among them."""
    faster = [choice for choice in proposals(candidates, first) if mean_gain(first, choice) > 1]
    return [choice for at, choice in enumerate(faster) if at < count or _adds_as_default(candidates, choice)]


def _adds_as_default(candidates: Sequence[BlockSizes], choice: Choice) -> bool:
    return all(order_of(candidates[index]) == order_of(candidates[0]) for index in choice.values())


def mean_gain(times: Times, choice: Choice) -> float:
    """Over the cells."""
    return geometric_mean([gain(times, cell, index) for cell, index in choice.items()])


def accepted(candidates: Sequence[BlockSizes], choice: Choice, first: Times, second: Times) -> Choice | None:
    """What of a proposal holds in both measurements; None if nothing does.

    Candidates that add in the default's order are taken cell by cell. Any other order is taken for all cells or none:
    if it is faster on the whole, and no cell is slower.
    """
    gains = {cell: min(gain(first, cell, index), gain(second, cell, index)) for cell, index in choice.items()}
    if _adds_as_default(candidates, choice):
        kept = {cell: index if gains[cell] >= 1 + MARGIN else 0 for cell, index in choice.items()}
        return kept if any(kept.values()) else None
    faster = geometric_mean(list(gains.values())) >= 1 + MARGIN
    return choice if faster and min(gains.values()) >= 1 - SLACK else None
