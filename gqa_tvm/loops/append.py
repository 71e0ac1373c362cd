"""append: RMS norm and rotary on the new keys, quantisation and the write into the cache, in one pass."""

from __future__ import annotations

from tvm.script import tirx as T

from ..definitions.half import widen
from ..definitions.kv_quantize import inverse_scale
from ..kernel_arguments import ENTRY_NEW, ENTRY_PAST, ROTARY_OFF
from ..kernels import KernelSpec
from .arguments import (
    declare_cache,
    declare_entries,
    declare_norm_weight,
    declare_rotary,
    declare_rows,
    declare_scale,
    dimension,
)
from .encode_row import encode_row
from .rows import RowTransform, for_each_scale, head_column, load_row


def _store_row(spec: KernelSpec, cache, where, value, scale, kv_head, inverse) -> None:
    """cache[where] = the row of value(h), h < H; inverse: [H] float32 scratch."""
    if not spec.is_float_cache:
        store_inverse = lambda h, value: T.buffer_store(inverse, inverse_scale(value), [h])  # noqa: E731
        for_each_scale(scale, kv_head, spec.head_size, store_inverse)
    encode_row(spec, value, inverse, cache, where)


def append(spec: KernelSpec):
    """The append kernel's PrimFunc.

    key, value: [B, S, hidden] new tokens of the query dtype, KV heads from first_key_head and first_value_head on
    (packed QKV is passed as both); key_cache, value_cache: [B, N_kv, C, columns]; entries: [B, 4] int32, columns
    ENTRY_*: token s < new goes to cache row past + s, later tokens are padding.
    """

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
        for b, s in T.grid(p["key"].shape[0], p["key"].shape[1]):
            with T.sblock("task"):
                vb, vs = T.axis.remap("SS", [b, s])
                T.reads()
                T.writes()
                row = T.sblock_alloc_buffer((spec.head_size,))
                inverse = T.sblock_alloc_buffer((spec.head_size,))
                cache_row: T.let = T.Cast("int64", p["entries"][vb, ENTRY_PAST]) + vs
                if vs < T.Cast("int64", p["entries"][vb, ENTRY_NEW]):
                    for n in T.serial(T.Cast("int32", p["key_cache"].shape[1])):
                        where = T.meta_var((vb, n, cache_row))
                        key = T.meta_var(lambda h: p["key"][vb, vs, head_column(spec, first_key_head + n, h)])
                        value = T.meta_var(lambda h: p["value"][vb, vs, head_column(spec, first_value_head + n, h)])
                        if norm_epsilon > T.float32(0) or rotary != ROTARY_OFF:
                            load_row(spec, key, row, transform, lambda: p["positions"][vb, vs])
                            _store_row(spec, p["key_cache"], where, lambda h: row[h], p["k_scale"], n, inverse)
                        else:
                            # Copies of a copy would wait for the first to reach the cache of the CPU.
                            unchanged = T.meta_var(lambda h: widen(key(h), spec.query))
                            _store_row(spec, p["key_cache"], where, unchanged, p["k_scale"], n, inverse)
                        unchanged = T.meta_var(lambda h: widen(value(h), spec.query))
                        _store_row(spec, p["value_cache"], where, unchanged, p["v_scale"], n, inverse)

    return kernel


def declare_append(spec: KernelSpec, tensors, row_inputs, scales):
    """The tensor parameters of append by name, matched to their handles."""
    batch, tokens, kv_heads, capacity = (dimension(n) for n in ("B", "S", "N_kv", "C"))
    key, value, key_cache, value_cache, entries = tensors
    *rotary, norm_weight = row_inputs
    positions, cos, sin = declare_rotary(spec, *rotary)
    return T.meta_var(
        {
            "key": declare_rows(spec, "key", key, batch, tokens),
            "value": declare_rows(spec, "value", value, batch, tokens),
            "key_cache": declare_cache(spec, "key_cache", key_cache, batch, kv_heads, capacity),
            "value_cache": declare_cache(spec, "value_cache", value_cache, batch, kv_heads, capacity),
            "entries": declare_entries(entries, batch),
            "positions": positions,
            "cos": cos,
            "sin": sin,
            "norm_weight": declare_norm_weight(spec, norm_weight),
            "k_scale": declare_scale("k_scale", scales[0]),
            "v_scale": declare_scale("v_scale", scales[1]),
        }
    )
