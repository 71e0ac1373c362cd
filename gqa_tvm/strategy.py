"""Which attention kernel a call runs, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from .attributes import Attributes
from .errors import InvalidArgument
from .validation import Problem


class Strategy(str, Enum):
    """Forms of the attention computation; they agree within the accuracy contract."""

    AUTO = "auto"
    NAIVE = "naive"
    FLASH = "flash"
    FLASH_DECODING = "flash_decoding"


@dataclass(frozen=True)
class Choice:
    """strategy (never AUTO) with its reason; few_rows: flash runs the kernel with head columns as lanes."""

    strategy: Strategy
    reason: str
    few_rows: bool = False


def strategy_from(name: str) -> Strategy:
    """The strategy of this name. Raises InvalidArgument that lists the valid ones."""
    try:
        return Strategy(name)
    except ValueError:
        names = ", ".join(strategy.value for strategy in Strategy)
        raise InvalidArgument(f"strategy must be one of {names}, got {name!r}") from None


def flash_disabled() -> bool:
    """ORT_GQA_DISABLE_FLASH_ATTENTION, with ONNX Runtime's spelling of yes and no."""
    value = os.environ.get("ORT_GQA_DISABLE_FLASH_ATTENTION", "")
    if value in ("1", "true", "True"):
        return True
    if value in ("", "0", "false", "False"):
        return False
    raise InvalidArgument(f"ORT_GQA_DISABLE_FLASH_ATTENTION must be 0 or 1, got {value!r}")


@dataclass(frozen=True)
class StrategyRules:
    """What decides besides the call itself. wanted: the user's strategy; naive_only: flash is disabled by the
    environment; few_rows: rows of several tokens that flash_decode takes at most."""

    wanted: Strategy
    naive_only: bool
    few_rows: int

    def has_few_rows(self, problem: Problem) -> bool:
        """Whether flash runs the kernel with head columns as lanes."""
        return problem.sequence_length == 1 or problem.sequence_length * problem.group_size <= self.few_rows

    def choose(self, attributes: Attributes, problem: Problem, kv_chunk: int) -> Choice:
        """The kernel for a call; depends on its shapes alone, never on threads, so that results do not either.

        kv_chunk: keys of a task of flash decoding. Raises InvalidArgument if a forced strategy cannot run.
        """
        rows = problem.sequence_length * problem.group_size
        few_rows = self.has_few_rows(problem)
        if self.wanted is not Strategy.AUTO:
            return _forced(self.wanted, attributes, few_rows)
        if attributes.qk_output:
            return Choice(Strategy.NAIVE, "output_qk is only computed by naive")
        if self.naive_only:
            return Choice(Strategy.NAIVE, "ORT_GQA_DISABLE_FLASH_ATTENTION is set")
        if few_rows and problem.total_sequence_length > kv_chunk:
            reason = f"{rows} rows per KV head over more than {kv_chunk} keys"
            return Choice(Strategy.FLASH_DECODING, reason, few_rows=True)
        return Choice(Strategy.FLASH, f"{rows} rows per KV head", few_rows)


def _forced(wanted: Strategy, attributes: Attributes, few_rows: bool) -> Choice:
    if wanted is not Strategy.NAIVE and attributes.qk_output:
        raise InvalidArgument(
            f"strategy {wanted.value!r} cannot give output_qk (qk_output={attributes.qk_output}); use 'naive' or 'auto'"
        )
    if wanted is Strategy.FLASH_DECODING:
        # Any number of rows runs, in groups; it is merely slower than flash for many.
        return Choice(wanted, "asked for", few_rows=True)
    return Choice(wanted, "asked for", few_rows=few_rows and wanted is Strategy.FLASH)
