"""append into a packed cache: a task is a group of keys that lie together."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ..definitions.half import widen
from ..definitions.kv_quantize import CACHE_DTYPES, inverse_scale
from ..definitions.packed import KEY_QUAD, KEY_ROW, VALUE_ROW
from ..kernel_arguments import ENTRY_NEW, ENTRY_PAST
from ..kernels import KernelSpec
from .append import declare_append
from .encode_row import encode_row
from .rows import RowTransform, for_each_scale, head_column, load_row

_VECTOR = 16
# Heads of a token that are encoded together, as they lie in memory: 16 tokens of one head are as many streams.
_HEADS = 8


class _HeadRow:
    """Row `head` of a [heads, H] buffer, in the place of a buffer [H]."""

    def __init__(self, buffer, head) -> None:
        self._buffer, self._head = buffer, head

    def __getitem__(self, h):
        return self._buffer[self._head, h]


def _fold_inverses(spec: KernelSpec, scale, first_head, heads, inverse) -> None:
    """inverse [heads, H]: what the elements of so many KV heads are multiplied by."""
    with T.serial(0, heads) as i:
        store_inverse = lambda h, value: T.buffer_store(inverse, inverse_scale(value), [i, h])  # noqa: E731
        for_each_scale(scale, first_head + i, spec.head_size, store_inverse)


def _store_keys(spec: KernelSpec, codes, head, cache, where, begin, end) -> None:
    """codes[head] [16, C] as keys begin .. end of a row, where: (entry, KV head, row); no other byte is touched.

    Line after line: the lines of all keys are more than the first-level cache holds.
    """
    with T.serial(0, spec.cache_columns // KEY_QUAD) as c:
        with T.serial(0, end - begin) as i:
            k = T.bind(begin + i)
            word = codes[head, k, T.ramp(c * KEY_QUAD, 1, KEY_QUAD)]
            first = c * (KEY_ROW * KEY_QUAD) + k * KEY_QUAD
            T.buffer_store(cache, word, [*where, T.ramp(first, 1, KEY_QUAD)])


def _store_values(spec: KernelSpec, codes, head, cache, where, begin, end) -> None:
    """As `_store_keys`, where: (entry, KV head, row of the first of the 16 values)."""
    b, n, first_row = where
    for quad in range(KEY_ROW // VALUE_ROW):
        first = quad * VALUE_ROW
        row = T.bind(first_row + quad)
        lanes = [T.int32(k * _VECTOR + c) for c in range(_VECTOR) for k in range(VALUE_ROW)]
        with T.If(tirx.all(begin <= first, first + VALUE_ROW <= end)):
            with T.Then():
                with T.serial(0, spec.cache_columns // _VECTOR) as v:
                    keys = [codes[head, first + k, T.ramp(v * _VECTOR, 1, _VECTOR)] for k in range(VALUE_ROW)]
                    bytes_ = T.ramp(v * (_VECTOR * VALUE_ROW), 1, _VECTOR * VALUE_ROW)
                    T.buffer_store(cache, tirx.Shuffle(keys, lanes), [b, n, row, bytes_])
            with T.Else():
                for k in range(VALUE_ROW):
                    with T.If(tirx.all(begin <= first + k, first + k < end)):
                        with T.Then():
                            with T.serial(0, spec.cache_columns) as c:
                                T.buffer_store(cache, codes[head, first + k, c], [b, n, row, c * VALUE_ROW + k])


def packed_append(spec: KernelSpec):
    """The append kernel's PrimFunc for a packed cache; parameters and what it does as `append`."""

    @T.prim_func(s_tir=True)
    def kernel(
        key_: T.handle,
        value_: T.handle,
        key_cache_: T.handle,
        value_cache_: T.handle,
        entries_: T.handle,
        positions_: T.handle,
        cos_: T.handle,
        sin_: T.handle,
        norm_weight_: T.handle,
        k_scale_: T.handle,
        v_scale_: T.handle,
        norm_epsilon: T.float32,
        rotary: T.int32,
        first_key_head: T.int32,
        first_value_head: T.int32,
    ):
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        p = declare_append(
            spec,
            (key_, value_, key_cache_, value_cache_, entries_),
            (positions_, cos_, sin_, norm_weight_),
            (k_scale_, v_scale_),
        )
        transform = T.meta_var(RowTransform(p["norm_weight"], norm_epsilon, p["cos"], p["sin"], rotary))
        # Tokens may begin and end anywhere in a group.
        groups: T.let = (p["key"].shape[1] + (2 * KEY_ROW - 2)) // KEY_ROW
        for b, g in T.grid(p["key"].shape[0], groups):
            with T.sblock("task"):
                vb, vg = T.axis.remap("SS", [b, g])
                T.reads()
                T.writes()
                row = T.sblock_alloc_buffer((spec.head_size,))
                inverse = T.sblock_alloc_buffer((_HEADS, spec.head_size))
                codes = T.sblock_alloc_buffer((_HEADS, KEY_ROW, spec.cache_columns), CACHE_DTYPES[spec.cache])
                past: T.let = T.Cast("int64", p["entries"][vb, ENTRY_PAST])
                new: T.let = T.Cast("int64", p["entries"][vb, ENTRY_NEW])
                cache_row: T.let = past // KEY_ROW + vg
                first_value_row: T.let = cache_row * (KEY_ROW // VALUE_ROW)
                # Token of the group's first key; it may be before token 0.
                first: T.let = cache_row * KEY_ROW - past
                begin: T.let = T.max(T.int64(0) - first, T.int64(0))
                end: T.let = T.min(T.int64(KEY_ROW), new - first)
                kv_heads: T.let = T.Cast("int32", p["key_cache"].shape[1])
                if begin < end:
                    for chunk in T.serial((kv_heads + (_HEADS - 1)) // _HEADS):
                        n: T.let = chunk * _HEADS
                        heads: T.let = T.min(kv_heads - n, _HEADS)
                        _fold_inverses(spec, p["k_scale"], n, heads, inverse)
                        for i, j in T.grid(end - begin, heads):
                            k: T.let = begin + i
                            load_row(
                                spec,
                                lambda h: p["key"][vb, first + k, head_column(spec, first_key_head + n + j, h)],
                                row,
                                transform,
                                lambda: p["positions"][vb, first + k],
                            )
                            encode_row(spec, lambda h: row[h], _HeadRow(inverse, j), codes, (j, k))
                        for j in T.serial(heads):
                            _store_keys(spec, codes, j, p["key_cache"], (vb, n + j, cache_row), begin, end)
                        _fold_inverses(spec, p["v_scale"], n, heads, inverse)
                        for i, j in T.grid(end - begin, heads):
                            k: T.let = begin + i
                            for h in T.serial(spec.head_size):
                                column = T.meta_var(head_column(spec, first_value_head + n + j, h))
                                row[h] = widen(p["value"][vb, first + k, column], spec.query)
                            encode_row(spec, lambda h: row[h], _HeadRow(inverse, j), codes, (j, k))
                        for j in T.serial(heads):
                            _store_values(spec, codes, j, p["value_cache"], (vb, n + j, first_value_row), begin, end)

    return kernel
