"""As `split_prefill`, for dot products of signed bytes."""

from __future__ import annotations

from tvm import te
from tvm.script import tirx as T

from ..definitions import split_integer as si
from ..definitions import split_signed_prefill as signed
from ..definitions.split_signed import DOT_BYTES, VALUE_ROWS, code_function
from ..kernels import KernelSpec
from .splice import make_step
from .split_prefill import SplitPrefillState, SplitPrefillSteps, softmax_steps, tile_rows
from .split_rows import stored_rows

KEY_TILE = VALUE_ROWS


def _digits_shape(spec: KernelSpec, rows: int):
    digits, _ = si.prefill_digits(spec.precision)
    return rows // signed.ROWS, spec.cache_columns // DOT_BYTES, spec.cache_planes, 4, digits, DOT_BYTES


def _query_step(spec: KernelSpec, rows: int):
    query_t = te.placeholder((spec.cache_planes, spec.cache_columns, rows), name="query_t")
    return make_step([query_t, *signed.query_digits(query_t, si.prefill_digits(spec.precision)[0])])


def _codes_shape(spec: KernelSpec, kv_block: int):
    return signed.key_codes_shape(kv_block, spec.cache_columns, spec.cache_planes)


def _keys_step(spec: KernelSpec, kv_block: int):
    cache_rows, last_row = stored_rows(spec, kv_block)
    return make_step([cache_rows, last_row, signed.key_codes(cache_rows, last_row, spec.cache_planes)])


def _qk_step(spec: KernelSpec, kv_block: int, rows: int):
    codes = te.placeholder(_codes_shape(spec, kv_block), "int8", name="codes")
    digits = te.placeholder(_digits_shape(spec, rows), "int8", name="digits")
    down = te.placeholder((rows,), name="down")
    code_at = code_function(codes, spec.cache_planes)
    return make_step([codes, digits, down, signed.qk_gemm_rows(digits, down, code_at, kv_block, spec.cache)])


def _sv_step(spec: KernelSpec, kv_block: int, rows: int):
    cache_rows, last_row = stored_rows(spec, kv_block)
    shape = signed.probability_shape(kv_block, rows, si.prefill_digits(spec.precision)[1])
    digits = te.placeholder(shape, "int8", name="p_digits")
    accumulator = te.placeholder((rows, spec.cache_planes, spec.cache_columns), name="acc_old")
    beta, weight = (te.placeholder((rows,), name=name) for name in ("row_beta", "row_weight"))
    code_at = signed.value_codes(cache_rows, last_row, spec.cache_planes)
    result = signed.sv_gemm_rows(digits, code_at, accumulator, beta, weight, spec.cache)
    return make_step([cache_rows, last_row, digits, accumulator, beta, weight, result])


def split_prefill_steps(spec: KernelSpec, sizes, kv_block: int, rows: int) -> SplitPrefillSteps:
    digits = si.prefill_digits(spec.precision)[1]
    tile = tile_rows(spec, rows, sizes.lanes)
    return SplitPrefillSteps(
        _query_step(spec, tile),
        _keys_step(spec, kv_block),
        _qk_step(spec, kv_block, tile),
        softmax_steps(kv_block, tile, lambda p: signed.probability_digits(p, digits)),
        _sv_step(spec, kv_block, rows),
        kv_block,
        tile,
        digits_axes=(1, 0),
    )


def allocate_split_state(spec: KernelSpec, _sizes, steps: SplitPrefillSteps, rows: int) -> SplitPrefillState:
    """As `split_prefill`, of the rows digits [M / 4, C / 16, E, 4, D, 16] int8 and down, codes int8."""
    allocate = T.sblock_alloc_buffer
    digits = si.prefill_digits(spec.precision)[1]
    return SplitPrefillState(
        (allocate(_digits_shape(spec, rows), "int8"), allocate((rows,))),
        allocate(_codes_shape(spec, steps.kv_block), "int8"),
        allocate((rows,)),
        allocate(signed.probability_shape(steps.kv_block, rows, digits), "int8"),
    )
