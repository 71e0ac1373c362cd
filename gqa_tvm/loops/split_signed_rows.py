"""As `split_rows`, for dot products of signed bytes: digits in the order of columns, no code of zero to subtract."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import te, tirx
from tvm.script import tirx as T

from ..definitions import split_integer as si
from ..definitions import split_signed as signed
from ..definitions.half import magnitude_bits
from ..kernels import KernelSpec
from .cache_block import CacheBlock
from .row_state import same_position as accumulator_position
from .splice import make_step
from .split_rows import QkSteps, emit_qk_parts, stored_rows

# Keys of a QK step.
QK_KEYS = 16

__all__ = [
    "accumulator_position",
    "allocate_split_rows",
    "emit_qk_split",
    "qk_split_steps",
    "split_rows",
    "sv_split_steps",
]


class SignedRows(NamedTuple):
    """Rows as `split_signed.qk_gemm_digits` takes them."""

    digits: Any  # [rows, D, C / 16, E, 16] int8
    down: Any  # [rows] float32, NaN for a row that is not finite

    def of_step(self, short: bool):
        """What a step takes: there is none without the last digit."""
        del short
        return self


def allocate_split_rows(spec: KernelSpec, rows: int) -> SignedRows:
    vectors = spec.cache_columns // signed.DOT_BYTES
    digits, _ = si.decode_digits(spec.precision)
    shape = (rows, digits, vectors, spec.cache_planes, signed.DOT_BYTES)
    return SignedRows(T.sblock_alloc_buffer(shape, "int8"), T.sblock_alloc_buffer((rows,)))


def split_rows(spec: KernelSpec, query, count, target: SignedRows) -> None:
    """Fill `target` from the first `count` rows of query [rows, E, C] float32."""
    planes, columns = spec.cache_planes, spec.cache_columns
    digits, _ = si.decode_digits(spec.precision)
    largest = T.sblock_alloc_buffer((1,), "int32")
    with T.serial(0, count) as r:
        T.buffer_store(largest, T.int32(0), [0])
        with T.grid(planes, columns) as (e, c):
            T.buffer_store(largest, tirx.max(largest[0], magnitude_bits(query[r, e, c])), [0])
        finite = T.bind(si.is_finite(largest[0]))
        up, down = (T.bind(scale) for scale in si.row_scales(largest[0], digits))
        T.buffer_store(target.down, down * T.float32(1.0 / signed.CODE_FACTOR[spec.cache]), [r])
        with T.grid(planes, columns // signed.DOT_BYTES, signed.DOT_BYTES) as (e, v, x):
            element = query[r, e, v * signed.DOT_BYTES + x]
            fixed = T.bind(si.fixed_point(tirx.Select(finite, element, T.float32(0)), up))
            for d, digit in enumerate(si.signed_digits(fixed, digits)):
                T.buffer_store(target.digits, digit, [r, d, v, e, x])


def qk_split_steps(spec: KernelSpec, row_tile: int, kv_block: int) -> QkSteps:
    """scores = query keys^T of QK_KEYS keys; arguments: cache rows, last row, the fields of `SignedRows`, scores."""
    del kv_block
    cache_rows, last_row = stored_rows(spec, QK_KEYS)
    vectors, planes = spec.cache_columns // signed.DOT_BYTES, spec.cache_planes
    count, _ = si.decode_digits(spec.precision)
    digits = te.placeholder((row_tile, count, vectors, planes, signed.DOT_BYTES), "int8", name="digits")
    down = te.placeholder((row_tile,), name="down")
    code_at = signed.key_codes(cache_rows, last_row, planes)
    scores = signed.qk_gemm_digits(digits, down, code_at, (QK_KEYS, vectors, planes))
    return QkSteps(make_step([cache_rows, last_row, digits, down, scores]))


def sv_split_steps(spec: KernelSpec, row_tile: int, kv_block: int):
    """acc = alpha acc + weight p values; arguments: cache rows, last row, p, old acc, alpha, weight, acc.

    Also for a block of which all rows exist: there half of the instructions would be about which row to load.
    """
    return _sv_step(spec, row_tile, kv_block), _sv_step(spec, row_tile, kv_block, "_whole")


def _sv_step(spec: KernelSpec, row_tile: int, kv_block: int, suffix: str = ""):
    cache_rows, last_row = stored_rows(spec, kv_block)
    planes = spec.cache_planes
    p = te.placeholder((row_tile, kv_block), name="p")
    accumulator = te.placeholder((row_tile, planes, spec.cache_columns), name="acc_old")
    beta, weight = (te.placeholder((row_tile,), name=name) for name in ("row_beta", "row_weight"))
    digits = signed.probability_digits(p, si.decode_digits(spec.precision)[1])
    code_at = signed.value_codes(cache_rows, tirx.const(kv_block - 1, "int32") if suffix else last_row, planes)
    result = signed.sv_gemm_digits(digits, code_at, accumulator, beta, weight, spec.cache)
    return make_step([cache_rows, last_row, p, accumulator, beta, weight, result], suffix)


def emit_qk_split(spec: KernelSpec, shape, step, keys: CacheBlock, operands: SignedRows, tile_of, scores, seen) -> None:
    """scores [R, kv_block] of the first `seen` keys by steps of QK_KEYS; tile_of: view of an operand's tile."""
    emit_qk_parts(spec, shape, step, keys, operands, tile_of, scores, seen, QK_KEYS)
