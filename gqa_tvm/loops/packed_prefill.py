"""The steps of flash_prefill over a packed cache, in the place of `split_prefill`."""

from __future__ import annotations

from tvm import te
from tvm.script import tirx as T

from ..definitions import packed
from ..definitions import split_integer as si
from ..definitions import split_prefill as sp
from ..definitions.packed import DOT_LANES
from ..kernels import KernelSpec
from . import split_prefill
from .packed_rows import packed_keys, packed_values
from .splice import make_step
from .split_prefill import SplitPrefillState, SplitPrefillSteps, query_operands, steps_around, tile_rows

KEY_TILE = packed.VALUE_ROW


def _keys_step(spec: KernelSpec, kv_block: int):
    cache_rows, last_key = packed_keys(spec, kv_block)
    return make_step([cache_rows, last_key, packed.key_words(cache_rows, last_key, spec.cache_planes)])


def _codes_shape(spec: KernelSpec, kv_block: int):
    return packed.key_words_shape(kv_block, spec.cache_planes, spec.cache_columns)


def _qk_step(spec: KernelSpec, kv_block: int, rows: int):
    codes = te.placeholder(_codes_shape(spec, kv_block), "uint8", name="codes")
    operands = query_operands(spec, rows)
    return make_step([codes, *operands, packed.qk_gemm_packed_words(*operands, codes)])


def _sv_step(spec: KernelSpec, kv_block: int, rows: int):
    cache_rows, last_key = packed_values(spec, kv_block)
    p_words = te.placeholder(sp.probability_shape(kv_block, rows, DOT_LANES), "uint8", name="p_words")
    accumulator = te.placeholder((rows, spec.cache_planes, spec.cache_columns), name="acc_old")
    beta, weight = (te.placeholder((rows,), name=name) for name in ("row_beta", "row_weight"))
    code_at = packed.value_codes(cache_rows, last_key, spec.cache_planes)
    digits = si.prefill_digits(spec.precision)[1]
    result = sp.sv_gemm_words(p_words, code_at, digits, accumulator, beta, weight)
    return make_step([cache_rows, last_key, p_words, accumulator, beta, weight, result])


def split_prefill_steps(spec: KernelSpec, sizes, kv_block: int, rows: int) -> SplitPrefillSteps:
    tile = tile_rows(spec, rows, sizes.lanes)
    products = _keys_step(spec, kv_block), _qk_step(spec, kv_block, tile), _sv_step(spec, kv_block, rows)
    return steps_around(spec, sizes, kv_block, tile, *products)


def allocate_split_state(spec: KernelSpec, sizes, steps: SplitPrefillSteps, rows: int) -> SplitPrefillState:
    """As `split_prefill`, with codes [T_block / 16, E, C / 4, 64] uint8."""
    state = split_prefill.allocate_split_state(spec, sizes, steps, rows)
    return state._replace(codes=T.sblock_alloc_buffer(_codes_shape(spec, steps.kv_block), "uint8"))
