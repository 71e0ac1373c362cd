"""What the signature of a call decides, worked out once: which kernels run, with which scalars, on which arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .attributes import Attributes
from .kernel_calls import ArgumentForms
from .kernels import FORMATS, KernelSpec, Layout, Precision, decode_row_tile, prefill_row_block
from .runtime import KernelLibrary
from .schedules.block_sizes import BlockSizes, multiplies_digits
from .strategy import Choice, Strategy, StrategyRules
from .tuned_sizes import TunedKernel, total_bucket
from .validation import Inputs, Problem

Kernel = Callable[..., Any]
Signature = tuple[Any, ...]


def signature_of(arrays: Sequence[np.ndarray | None]) -> Signature:
    """Which arrays a call has, with type, shape, strides, dtype and flags of each."""
    return tuple([None if a is None else (a.__class__, a.shape, a.strides, a.dtype, a.flags.num) for a in arrays])


@dataclass(frozen=True)
class Plan:
    """What a call ran and why.

    block_sizes: of the attention kernel; sizes_origin: "default" or the tuning record they come from. target: the
    variant; target_reason: why this one. precision: of what ran, "approximate" where
    approximate_qk had its way.
    """

    strategy: Strategy
    reason: str
    kernels: tuple[str, ...]
    block_sizes: BlockSizes
    sizes_origin: str
    num_threads: int
    target: str
    target_reason: str
    precision: str


class Attention(NamedTuple):
    """The attention kernel of a call. totals: the T it serves, above kv_chunk or not and of this power of two."""

    totals: tuple[bool, int]
    choice: Choice
    spec: KernelSpec
    sizes: BlockSizes
    kernel: Kernel
    plan: Plan


class PreparedCall:
    """Everything that calls of one signature share. offered: `Attention.totals` that were offered to be remembered."""

    def __init__(
        self,
        attributes: Attributes,
        inputs: Inputs,
        problem: Problem,
        library: KernelLibrary,
        rules: StrategyRules,
        num_threads: int,
        precision: Precision = "",
        layout: Layout = "",
    ) -> None:
        self._library, self._rules, self._num_threads = library, rules, num_threads
        self._attributes = attributes
        self._precision = precision
        formats = FORMATS[problem.query_dtype.name], FORMATS[problem.cache_dtype.name]
        self._append = KernelSpec("append", *formats, problem.head_size, layout=layout)  # type: ignore[arg-type]
        self.append = library.kernel(self._append)
        self.forms = ArgumentForms.of(attributes, inputs, problem, self._append.query)
        # The same for every T of a signature: see tuned_sizes.ORDER_FIELDS.
        self.kv_chunk = self._tuned(self._decode_spec(problem), problem).sizes.kv_chunk
        self.offered: set[tuple[bool, int]] = set()
        self._attention: dict[tuple[bool, int], Attention] = {}

    def attention(self, problem: Problem) -> Attention:
        """The attention kernel for a problem: the length T may change it within a signature."""
        total = problem.total_sequence_length
        totals = total > self.kv_chunk, total_bucket(total)
        found = self._attention.get(totals)
        if found is None:
            found = self._attention[totals] = self._choose(totals, problem)
        return found

    def addresses(self, attention: Attention) -> tuple[int, int]:
        """Of the C functions of append and an attention kernel of this call."""
        return self._library.address(self._append), self._library.address(attention.spec)

    def _decode_spec(self, problem: Problem) -> KernelSpec:
        tile = decode_row_tile(problem.sequence_length, problem.group_size)
        wanted = replace(self._append, operation="flash_decode", row_tile=tile)
        rows = problem.sequence_length * problem.group_size
        return self._with_precision(self._library.offered(wanted, rows))

    def _prefill_spec(self, problem: Problem) -> KernelSpec:
        default, rows = self._library.sizes.default, problem.sequence_length * problem.group_size
        row_block = prefill_row_block(rows, default.q_block, default.small_q_blocks)
        wanted = replace(self._append, operation="flash_prefill", row_tile=row_block)
        return self._with_precision(self._library.offered(wanted, rows))

    def _with_precision(self, spec: KernelSpec) -> KernelSpec:
        """The kernel of the precision asked for, where there is one: else it is as exact as float32."""
        if not self._precision or (self._precision == "approximate" and spec.cache != "i8"):
            return spec
        wanted = replace(spec, precision=self._precision)
        return wanted if multiplies_digits(wanted, self._library.sizes.default) else spec

    def _tuned(self, spec: KernelSpec, problem: Problem) -> TunedKernel:
        total = problem.total_sequence_length
        return self._library.sizes.choose(spec, problem.group_size, total, self._num_threads)

    def _choose(self, totals: tuple[bool, int], problem: Problem) -> Attention:
        choice = self._rules.choose(self._attributes, problem, self.kv_chunk)
        if choice.strategy is Strategy.NAIVE:
            wanted = replace(self._append, operation="naive")
        else:
            wanted = self._decode_spec(problem) if choice.few_rows else self._prefill_spec(problem)
        tuned = self._tuned(wanted, problem)
        spec, sizes, origin = tuned.spec, tuned.sizes, tuned.origin
        names = (self._append.name, spec.name) if problem.kv_sequence_length else (spec.name,)
        library, threads = self._library, self._num_threads
        target = library.target, library.target_reason
        plan = Plan(choice.strategy, choice.reason, names, sizes, origin, threads, *target, spec.precision or "exact")
        return Attention(totals, choice, spec, sizes, library.kernel(spec), plan)
