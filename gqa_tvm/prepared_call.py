"""What the signature of a call decides, worked out once: which kernels run, with which scalars, on which arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .attributes import Attributes
from .kernel_calls import ArgumentForms
from .kernels import FORMATS, KernelSpec, decode_row_tile, prefill_row_block
from .runtime import KernelLibrary
from .schedules.block_sizes import BlockSizes
from .strategy import Choice, Strategy, StrategyRules
from .validation import Inputs, Problem

Kernel = Callable[..., Any]
Signature = tuple[Any, ...]


def signature_of(arrays: Sequence[np.ndarray | None]) -> Signature:
    """Which arrays a call has, with type, shape, strides, dtype and flags of each."""
    return tuple([None if a is None else (a.__class__, a.shape, a.strides, a.dtype, a.flags.num) for a in arrays])


@dataclass(frozen=True)
class Plan:
    """What a call ran and why."""

    strategy: Strategy
    reason: str
    kernels: tuple[str, ...]
    block_sizes: BlockSizes
    num_threads: int
    target: str


class Attention(NamedTuple):
    """The attention kernel of a call."""

    choice: Choice
    spec: KernelSpec
    kernel: Kernel
    plan: Plan


class PreparedCall:
    """Everything that calls of one signature share. `problem` is the latest one that was validated in full."""

    def __init__(
        self,
        attributes: Attributes,
        inputs: Inputs,
        problem: Problem,
        library: KernelLibrary,
        rules: StrategyRules,
        num_threads: int,
    ) -> None:
        self.problem = problem
        self.sizes = rules.sizes
        self._library, self._rules, self._num_threads = library, rules, num_threads
        self._attributes = attributes
        formats = FORMATS[problem.query_dtype.name], FORMATS[problem.cache_dtype.name]
        self._append = KernelSpec("append", *formats, problem.head_size)  # type: ignore[arg-type]
        self.append = library.kernel(self._append)
        self.forms = ArgumentForms.of(attributes, inputs, problem, self._append.query)
        self._attention: dict[bool, Attention] = {}

    def attention(self, problem: Problem) -> Attention:
        """The attention kernel for a problem: the length T may change it within a signature."""
        is_long = problem.total_sequence_length > self._rules.sizes.kv_chunk
        found = self._attention.get(is_long)
        if found is None:
            found = self._attention[is_long] = self._choose(problem)
        return found

    def _choose(self, problem: Problem) -> Attention:
        choice = self._rules.choose(self._attributes, problem)
        sizes, rows = self.sizes, problem.sequence_length * problem.group_size
        row_block = prefill_row_block(rows, sizes.q_block, sizes.small_q_blocks)
        spec = replace(self._append, operation="flash_prefill", row_tile=row_block)
        if choice.strategy is Strategy.NAIVE:
            spec = replace(spec, operation="naive", row_tile=0)
        elif choice.few_rows:
            tile = decode_row_tile(problem.sequence_length, problem.group_size)
            spec = replace(spec, operation="flash_decode", row_tile=tile)
        names = (self._append.name, spec.name) if problem.kv_sequence_length else (spec.name,)
        plan = Plan(choice.strategy, choice.reason, names, self._rules.sizes, self._num_threads, self._library.target)
        return Attention(choice, spec, self._library.kernel(spec), plan)
