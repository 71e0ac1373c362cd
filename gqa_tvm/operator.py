"""The operator: validate -> present cache -> append (norm, rotary, quantise) -> attention -> output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .arrays import aligned_empty, aligned_zeros, as_array, as_bits
from .attributes import Attributes
from .errors import InvalidArgument
from .kernel_calls import (
    AttentionCall,
    run_append,
    run_flash,
    run_flash_decode,
    run_naive,
)
from .kernels import FORMATS, KernelSpec, row_tile_for
from .kv_cache import Present, plan_layout, prepare_present
from .runtime import KernelLibrary, launcher, library_for
from .schedules.block_sizes import DEFAULT_BLOCK_SIZES, BlockSizes
from .strategy import Choice, Strategy, choose_strategy, flash_disabled, strategy_from
from .targets import require_runnable, usable_cores
from .validation import Inputs, Problem, validate


class GroupQueryAttentionResult(NamedTuple):
    """output [B, S, N*H]; present_key, present_value [B, N_kv, max(T, C), columns]; output_qk [B, N, S, T] or None."""

    output: np.ndarray
    present_key: np.ndarray
    present_value: np.ndarray
    output_qk: np.ndarray | None


@dataclass(frozen=True)
class Plan:
    """What a call ran and why."""

    strategy: Strategy
    reason: str
    kernels: tuple[str, ...]
    block_sizes: BlockSizes
    num_threads: int
    target: str


class GroupQueryAttention:
    """com.microsoft.GroupQueryAttention on CPU.

    Attributes are ONNX Runtime's, with its names and defaults (num_heads, kv_num_heads, scale, softcap, do_rotary,
    rotary_interleaved, local_window_size, smooth_softmax, causal, qk_output, k_quant_type, v_quant_type,
    kv_cache_bit_width, ...). Own keywords: strategy ("auto", "naive", "flash", "flash_decoding"), num_threads (None =
    the cores this process may use), target (name of a variant, None = the best for this CPU), library (path of a
    `.so` that gqa_tvm.build made). Raises InvalidArgument. An instance holds no state but `last_plan`.
    """

    last_plan: Plan | None

    def __init__(
        self,
        *,
        strategy: str = "auto",
        num_threads: int | None = None,
        library: str | None = None,
        target: str | None = None,
        **attributes: Any,
    ) -> None:
        try:
            self.attributes = Attributes(**attributes)
        except TypeError as error:
            raise InvalidArgument(f"GroupQueryAttention: {error}") from None
        self._strategy = strategy_from(strategy)
        if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
            raise InvalidArgument(f"num_threads must be a positive integer or None, got {num_threads!r}")
        if library is not None and target is not None:
            raise InvalidArgument(f"give library={library!r} or target={target!r}, not both: a library has its target")
        if target is not None:
            try:
                require_runnable(target)
            except ValueError as error:
                raise InvalidArgument(str(error)) from None
        self._num_threads = num_threads or usable_cores()
        self._target, self._library_path = target, library
        self._naive_only = flash_disabled()
        self._library: KernelLibrary | None = None
        self.last_plan = None

    def __call__(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        past_key: Any = None,
        past_value: Any = None,
        seqlens_k: Any = None,
        total_sequence_length: Any = None,
        cos_cache: Any = None,
        sin_cache: Any = None,
        position_ids: Any = None,
        attention_bias: Any = None,
        head_sink: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        q_norm_weight: Any = None,
        k_norm_weight: Any = None,
        query_seqlens: Any = None,
        *,
        present_key: Any = None,
        present_value: Any = None,
    ) -> GroupQueryAttentionResult:
        """One step of attention; shapes and dtypes as ONNX Runtime's operator documents them.

        Inputs: NumPy arrays or anything with `__dlpack__`, any strides; never written, save a past that is also passed
        as present (the same array: in place). present_key, present_value left out: new arrays are made. Raises
        InvalidArgument, and then every array is as it was.
        """
        given = (
            *(query, key, value, past_key, past_value, seqlens_k, total_sequence_length),
            *(cos_cache, sin_cache, position_ids, attention_bias, head_sink, k_scale, v_scale),
            *(q_norm_weight, k_norm_weight, query_seqlens),
        )
        arrays: list[Any] = [as_array(array, name) for array, name in zip(given, Inputs._fields, strict=True)]
        inputs = Inputs(*arrays)
        problem = validate(self.attributes, inputs)
        return self._run(
            inputs,
            problem,
            as_array(present_key, "present_key"),
            as_array(present_value, "present_value"),
        )

    def _run(
        self,
        inputs: Inputs,
        problem: Problem,
        present_key: np.ndarray | None,
        present_value: np.ndarray | None,
    ) -> GroupQueryAttentionResult:
        if self._library is None:
            self._library = library_for(self._target, self._library_path)
        sizes = DEFAULT_BLOCK_SIZES[self._library.target]
        choice = choose_strategy(self._strategy, self.attributes, problem, sizes, self._naive_only)
        append, attend = self._specs(problem, choice)
        kernels = self._library.kernel(append), self._library.kernel(attend)
        layout = plan_layout(self.attributes, problem)
        keys = prepare_present("key", inputs.past_key, present_key, problem, layout)
        values = prepare_present("value", inputs.past_value, present_value, problem, layout)
        self._refuse_shared_presents(keys, values)

        launcher().use_threads(self._num_threads)
        call = AttentionCall(self.attributes, inputs, problem, layout.entries, keys.storage, values.storage)
        output_qk = self._allocate_output_qk(problem)
        shape = (problem.batch_size, problem.sequence_length, problem.num_heads, problem.head_size)
        result = aligned_empty(shape, problem.query_dtype)
        output = as_bits(result)
        keys.start()
        values.start()
        if problem.kv_sequence_length:
            run_append(kernels[0], call)
        if choice.strategy is Strategy.NAIVE:
            run_naive(kernels[1], call, output, output_qk)
        elif choice.few_rows:
            chunked = choice.strategy is Strategy.FLASH_DECODING
            run_flash_decode(kernels[1], call, output, attend, sizes, chunked)
        else:
            run_flash(kernels[1], call, output)
        keys.finish()
        values.finish()
        names = (append.name, attend.name) if problem.kv_sequence_length else (attend.name,)
        self.last_plan = Plan(choice.strategy, choice.reason, names, sizes, self._num_threads, self._library.target)
        flat = result.reshape(problem.batch_size, problem.sequence_length, -1)
        if output_qk is not None:
            output_qk = output_qk.astype(problem.query_dtype, copy=False)
        return GroupQueryAttentionResult(flat, keys.array, values.array, output_qk)

    def _specs(self, problem: Problem, choice: Choice) -> tuple[KernelSpec, KernelSpec]:
        formats = FORMATS[problem.query_dtype.name], FORMATS[problem.cache_dtype.name]
        head_size = problem.head_size
        append = KernelSpec("append", *formats, head_size)  # type: ignore[arg-type]
        if choice.strategy is Strategy.NAIVE:
            return append, replace(append, operation="naive")
        if choice.few_rows:
            return append, replace(append, operation="flash_decode", row_tile=row_tile_for(problem.group_size))
        return append, replace(append, operation="flash_prefill")

    def _allocate_output_qk(self, problem: Problem) -> np.ndarray | None:
        """Zeros in float32: probabilities are normalised in it before they are rounded to the query's dtype."""
        if not self.attributes.qk_output:
            return None
        shape = (
            problem.batch_size,
            problem.num_heads,
            problem.sequence_length,
            problem.total_sequence_length,
        )
        return aligned_zeros(shape, np.float32)

    @staticmethod
    def _refuse_shared_presents(keys: Present, values: Present) -> None:
        # Bounds alone would refuse keys and values interleaved in one buffer.
        if keys.array.size and np.shares_memory(keys.array, values.array):
            raise InvalidArgument("Outputs 'present_key' and 'present_value' share memory")
