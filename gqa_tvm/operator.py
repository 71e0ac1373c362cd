"""The operator: validate -> present cache -> append (norm, rotary, quantise) -> attention -> output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .arrays import aligned_empty, aligned_zeros, as_array
from .attributes import Attributes
from .errors import InvalidArgument
from .kernel_calls import AttentionCall
from .kv_cache import plan_layout, prepare_presents
from .kv_layout import check_packed_operator, kernel_view, layout_from, packed_arrays, packed_problem
from .precision import precision_from
from .prepared_call import Attention, Plan, PreparedCall, Signature, signature_of
from .remembered_calls import RememberedCalls
from .runtime import KernelLibrary, launcher, library_for
from .strategy import Strategy, StrategyRules, flash_disabled, strategy_from
from .targets import require_runnable, usable_cores
from .validation import Inputs, Problem, validate

# Signatures an operator remembers; a growing cache makes a new one with every step.
_REMEMBERED = 64
_ARRAY_NAMES = (*Inputs._fields, "present_key", "present_value")
Presents = tuple[np.ndarray | None, np.ndarray | None]


class GroupQueryAttentionResult(NamedTuple):
    """output [B, S, N*H]; present_key, present_value [B, N_kv, max(T, C), columns]; output_qk [B, N, S, T] or None."""

    output: np.ndarray
    present_key: np.ndarray
    present_value: np.ndarray
    output_qk: np.ndarray | None


class GroupQueryAttention:
    """com.microsoft.GroupQueryAttention on CPU.

    Attributes are ONNX Runtime's, with its names and defaults (num_heads, kv_num_heads, scale, softcap, do_rotary,
    rotary_interleaved, local_window_size, smooth_softmax, causal, qk_output, k_quant_type, v_quant_type,
    kv_cache_bit_width, ...). Own keywords: strategy ("auto", "naive", "flash", "flash_decoding"), num_threads (the most
    that a call takes, None = the cores this process may use), target (name of a variant, None = the best for this CPU),
    library (path of a `.so` that gqa_tvm.build made), precision ("exact": as float32; for quantised caches "balanced":
    probabilities in 16 bits, "fast": query rows too), approximate_qk (INT8 caches with query rows in 8 bits; None =
    where the environment has ORT_MLAS_QKGEMM_S8_APPROX_VNNI=1), kv_layout ("packed": past and present as `kv_layout`
    has them).
    precision and approximate_qk are heeded where the CPU has integer dot products.
    Raises InvalidArgument. An instance holds `last_plan` and what it remembers of call signatures: no array, nothing
    that a result depends on.
    """

    last_plan: Plan | None

    def __init__(
        self,
        *,
        strategy: str = "auto",
        num_threads: int | None = None,
        library: str | None = None,
        target: str | None = None,
        precision: str = "exact",
        approximate_qk: bool | None = None,
        kv_layout: str = "bnsh",
        **attributes: Any,
    ) -> None:
        try:
            self.attributes = Attributes(**attributes)
        except TypeError as error:
            raise InvalidArgument(f"GroupQueryAttention: {error}") from None
        self._strategy = strategy_from(strategy)
        self._precision = precision_from(precision, approximate_qk)
        self._layout = layout_from(kv_layout)
        if self._layout:
            check_packed_operator(self.attributes, self._strategy)
        if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
            raise InvalidArgument(f"num_threads must be a positive integer or None, got {num_threads!r}")
        if library is not None and target is not None:
            raise InvalidArgument(f"give library={library!r} or target={target!r}, not both: a library has its target")
        if target is not None:
            require_runnable(target)
        self._num_threads = num_threads or usable_cores()
        self._target, self._library_path = target, library
        self._naive_only = flash_disabled()
        self._library: KernelLibrary | None = None
        self._prepared: dict[Signature, PreparedCall] = {}
        self._remembered = RememberedCalls()
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
            query, key, value, past_key, past_value, seqlens_k, total_sequence_length, cos_cache, sin_cache,
            position_ids, attention_bias, head_sink, k_scale, v_scale, q_norm_weight, k_norm_weight, query_seqlens,
            present_key, present_value,
        )  # fmt: skip
        return self._run_remembered(given) or self._run_validated(given)

    def _run_remembered(self, given: Sequence[Any]) -> GroupQueryAttentionResult | None:
        """The short way of a call that is valid as an earlier one was; None if this cannot be said of it."""
        done = self._remembered.run(*given)
        if done is None:
            return None
        result, self.last_plan = done
        return tuple.__new__(GroupQueryAttentionResult, result)

    def _run_validated(self, given: Sequence[Any]) -> GroupQueryAttentionResult:
        arrays = [as_array(array, name) for array, name in zip(given, _ARRAY_NAMES, strict=True)]
        inputs, presents = Inputs._make(arrays[:-2]), (arrays[-2], arrays[-1])
        if self._layout:
            packed = packed_arrays(inputs, presents)
            result = self._run_converted(packed.inputs, packed.presents)
            keys, values = packed.results(result.present_key, result.present_value)
            return result._replace(present_key=keys, present_value=values)
        if all(array is before for array, before in zip(arrays, given, strict=True)):
            return self._run(inputs, presents)
        return self._run_converted(inputs, presents)

    def _run_converted(self, inputs: Inputs, presents: Presents) -> GroupQueryAttentionResult:
        """As `__call__`, of arrays made of the caller's."""
        return self._run_remembered((*inputs, *presents)) or self._run(inputs, presents)

    def use_library(self, library: KernelLibrary) -> KernelLibrary:
        """Take the kernels from `library`, and return it; before the first call."""
        self._library = library
        self._remembered.start(self._num_threads)
        return library

    def _prepare(self, inputs: Inputs, presents: Presents) -> tuple[PreparedCall, Problem]:
        """Validate the call; what only its signature decides is worked out once."""
        problem = validate(self.attributes, inputs)
        library = self._library or self.use_library(library_for(self._target, self._library_path))
        if self._layout:
            problem = packed_problem(problem, library.sizes.default, library.target)
        signature = signature_of((*inputs, *presents))
        prepared = self._prepared.get(signature)
        if prepared is None:
            rules = StrategyRules(self._strategy, self._naive_only, library.sizes.default.few_rows)
            prepared = PreparedCall(
                *(self.attributes, inputs, problem, library, rules),
                *(self._num_threads, self._precision, self._layout),
            )
            if len(self._prepared) >= _REMEMBERED:
                self._prepared.clear()
            self._prepared[signature] = prepared
        return prepared, problem

    def _run(self, inputs: Inputs, presents: Presents) -> GroupQueryAttentionResult:
        """The long way."""
        prepared, problem = self._prepare(inputs, presents)
        attention = prepared.attention(problem)
        layout = plan_layout(self.attributes, problem)
        keys, values = prepare_presents(inputs, presents, problem, layout)
        output_qk = self._allocate_output_qk(problem)
        shape = (problem.batch_size, problem.sequence_length, problem.num_heads, problem.head_size)
        output = aligned_empty(shape, problem.query_dtype)
        caches = keys.storage, values.storage
        if self._layout:
            caches = kernel_view(caches[0], "key_cache"), kernel_view(caches[1], "value_cache")
        call = AttentionCall(inputs, prepared.forms, problem, layout.entries, caches, output)
        launcher().use_threads(self._num_threads)
        keys.start()
        values.start()
        if problem.kv_sequence_length:
            call.append(prepared.append)
        self._attend(call, attention, output_qk)
        keys.finish()
        values.finish()
        self.last_plan = attention.plan
        if output_qk is None:
            self._remembered.remember((*inputs, *presents), (keys, values), call, prepared, attention)
        else:
            # Scores beyond float16 are infinite there, as they are for ONNX Runtime.
            with np.errstate(over="ignore"):
                output_qk = output_qk.astype(problem.query_dtype, copy=False)
        flat = output.reshape(problem.batch_size, problem.sequence_length, -1)
        return GroupQueryAttentionResult(flat, keys.array, values.array, output_qk)

    @staticmethod
    def _attend(call: AttentionCall, attention: Attention, output_qk: np.ndarray | None) -> None:
        choice, sizes = attention.choice, attention.sizes
        if choice.strategy is Strategy.NAIVE:
            call.naive(attention.kernel, output_qk)
        elif choice.few_rows:
            call.flash_decode(attention.kernel, attention.spec, sizes, choice.strategy is Strategy.FLASH_DECODING)
        else:
            call.flash(attention.kernel)

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
