"""The steps of flash_prefill over a packed cache, in the place of `split_prefill`."""

from __future__ import annotations

from tvm import te

from ..definitions import packed
from ..definitions import split_integer as si
from ..definitions import split_prefill as sp
from ..definitions.packed import DOT_LANES
from ..kernels import KernelSpec
from .packed_rows import packed_keys, packed_values
from .splice import make_step
from .split_prefill import SplitPrefillSteps, allocate_split_state, query_step, softmax_step

__all__ = ["allocate_split_state", "split_prefill_steps"]


def _qk_step(spec: KernelSpec, kv_block: int, rows: int, digits: int):
    cache_rows, last_key = packed_keys(spec, kv_block)
    shape = (digits, spec.cache_planes, spec.cache_columns // packed.KEY_QUAD, rows)
    words = te.placeholder(shape, "int32", name="words")
    offsets = te.placeholder((digits, rows), "int32", name="offsets")
    down = te.placeholder((rows,), name="down")
    codes = packed.key_words(cache_rows, last_key, spec.cache_planes)
    scores = packed.qk_gemm_packed_words(words, offsets, down, codes)
    return make_step([cache_rows, last_key, words, offsets, down, scores])


def _sv_step(spec: KernelSpec, kv_block: int, rows: int, digits: int):
    cache_rows, last_key = packed_values(spec, kv_block)
    p = te.placeholder((kv_block, rows), name="p")
    accumulator = te.placeholder((rows, spec.cache_planes, spec.cache_columns), name="acc_old")
    beta, weight = (te.placeholder((rows,), name=name) for name in ("row_beta", "row_weight"))
    code_at = packed.value_codes(cache_rows, last_key, spec.cache_planes)
    result = sp.sv_gemm_words(sp.probability_words(p, digits, DOT_LANES), code_at, digits, accumulator, beta, weight)
    return make_step([cache_rows, last_key, p, accumulator, beta, weight, result])


def split_prefill_steps(spec: KernelSpec, sizes, kv_block: int, rows: int) -> SplitPrefillSteps:
    query_digits, probability_digits = si.prefill_digits(spec.precision)
    return SplitPrefillSteps(
        query_step(spec, sizes, rows, query_digits),
        _qk_step(spec, kv_block, rows, query_digits),
        softmax_step(kv_block, rows),
        _sv_step(spec, kv_block, rows, probability_digits),
        kv_block,
    )
