"""As `split_prefill`, for dot products of signed bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import te
from tvm.script import tirx as T

from ..definitions import split_integer as si
from ..definitions import split_signed_prefill as signed
from ..definitions.split_signed import DOT_BYTES
from ..kernels import KernelSpec
from .splice import make_step
from .split_prefill import SplitPrefillSteps, softmax_step
from .split_rows import stored_rows


class SignedPrefillState(NamedTuple):
    """What a task holds besides `RowsLastState`: its rows' digits, and the weight of a block's probabilities [M]."""

    digits: Any  # [M / 4, C / 16, E, 4, D, 16] int8
    down: Any  # [M] float32
    weight: Any  # [M] float32


def _digits_shape(spec: KernelSpec, rows: int):
    digits, _ = si.prefill_digits(spec.precision)
    return rows // signed.ROWS, spec.cache_columns // DOT_BYTES, spec.cache_planes, 4, digits, DOT_BYTES


def _query_step(spec: KernelSpec, rows: int):
    query_t = te.placeholder((spec.cache_planes, spec.cache_columns, rows), name="query_t")
    return make_step([query_t, *signed.query_digits(query_t, si.prefill_digits(spec.precision)[0])])


def _qk_step(spec: KernelSpec, kv_block: int, rows: int):
    cache_rows, last_row = stored_rows(spec, kv_block)
    digits = te.placeholder(_digits_shape(spec, rows), "int8", name="digits")
    down = te.placeholder((rows,), name="down")
    code_at = signed.key_codes(cache_rows, last_row, spec.cache_planes)
    scores = signed.qk_gemm_rows(digits, down, code_at, kv_block, spec.cache)
    return make_step([cache_rows, last_row, digits, down, scores])


def _sv_step(spec: KernelSpec, kv_block: int, rows: int):
    cache_rows, last_row = stored_rows(spec, kv_block)
    p = te.placeholder((kv_block, rows), name="p")
    accumulator = te.placeholder((rows, spec.cache_planes, spec.cache_columns), name="acc_old")
    beta, weight = (te.placeholder((rows,), name=name) for name in ("row_beta", "row_weight"))
    code_at = signed.value_codes(cache_rows, last_row, spec.cache_planes)
    digits = signed.probability_digits(p, si.prefill_digits(spec.precision)[1])
    result = signed.sv_gemm_rows(digits, code_at, accumulator, beta, weight, spec.cache)
    return make_step([cache_rows, last_row, p, accumulator, beta, weight, result])


def split_prefill_steps(spec: KernelSpec, _sizes, kv_block: int, rows: int) -> SplitPrefillSteps:
    return SplitPrefillSteps(
        _query_step(spec, rows),
        _qk_step(spec, kv_block, rows),
        softmax_step(kv_block, rows),
        _sv_step(spec, kv_block, rows),
        kv_block,
    )


def allocate_split_state(spec: KernelSpec, rows: int) -> SignedPrefillState:
    down, weight = (T.sblock_alloc_buffer((rows,)) for _ in range(2))
    return SignedPrefillState(T.sblock_alloc_buffer(_digits_shape(spec, rows), "int8"), down, weight)
