"""Parameters that the attention kernels share, declared once."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from ..definitions.kv_quantize import CACHE_DTYPES
from ..kernels import KernelSpec


class AttentionBuffers(NamedTuple):
    """Tensor parameters of an attention kernel. Strides marked * are run-time numbers; the last axis is contiguous."""

    query: Any  # [B*, S*, N*, H] float32
    key_cache: Any  # [B*, N_kv*, C*, columns] cache dtype
    value_cache: Any  # [B*, N_kv*, C*, columns] cache dtype
    past_lengths: Any  # [B] int32, absolute position of query row 0
    total_lengths: Any  # [B] int32, keys an entry may see
    positions: Any  # [B, S] int64, rotary positions; [1, 1] when rotary is 0
    cos: Any  # [max positions, rotary_dim / 2] float32
    sin: Any
    bias: Any  # [B*, N*, S*, T] float32, broadcast axes have stride 0; [1, 1, 1, 1] without bias
    head_sink: Any  # [N] float32; [1] without sinks
    k_scale: Any  # [N_kv*, H*] float32, stride 0 where one scale serves all
    v_scale: Any
    output: Any  # [B, S, N, H] float32


def dimension(name: str):
    variable = T.int64()
    IRBuilder.name(name, variable)
    return variable


def buffer_parameter(name: str, handle, shape, dtype="float32", strides=None):
    # Callers' arrays have no alignment beyond their element size; TVM would assume 64 bytes.
    size = {"float32": 4, "int32": 4, "int64": 8}.get(dtype, 1)
    if strides is None:
        buffer = T.match_buffer(handle, shape, dtype, align=size)
    else:
        names = tuple(dimension(f"{name}_{stride}") if isinstance(stride, str) else stride for stride in strides)
        buffer = T.match_buffer(handle, shape, dtype, strides=names, align=size)
    IRBuilder.name(name, buffer)
    return buffer


def declare_cache(spec: KernelSpec, name: str, handle, batch, kv_heads, capacity):
    """A key or value cache [B, N_kv, C, columns] with free outer strides."""
    shape = (batch, kv_heads, capacity, spec.cache_columns)
    return buffer_parameter(name, handle, shape, CACHE_DTYPES[spec.cache], ("batch", "head", "row", 1))


def declare_rows(spec: KernelSpec, name: str, handle, batch, tokens, heads):
    """Query, key or value [B, S, heads, H] with free outer strides (a slice of packed QKV is one)."""
    shape = (batch, tokens, heads, spec.head_size)
    return buffer_parameter(name, handle, shape, "float32", ("batch", "token", "head", 1))


def declare_rotary(positions, cos, sin):
    """Positions [B, S] and the two rotary tables; their shapes are free so that 1 x 1 stand-ins pass."""
    batch, tokens = dimension("position_batch"), dimension("position_tokens")
    rows, columns = dimension("rotary_rows"), dimension("rotary_columns")
    return (
        buffer_parameter("positions", positions, (batch, tokens), "int64"),
        buffer_parameter("cos", cos, (rows, columns)),
        buffer_parameter("sin", sin, (rows, columns)),
    )


def declare_scale(spec: KernelSpec, name: str, handle, kv_heads):
    """A scale as [N_kv, H]; a single one is the same view with strides 0."""
    # TVM checks a free innermost stride only against an extent of its own width.
    shape = (kv_heads, T.int64(spec.head_size))
    return buffer_parameter(name, handle, shape, "float32", ("head", "column"))


def declare_attention(spec: KernelSpec, handles) -> AttentionBuffers:
    """Match the thirteen tensor handles of an attention kernel, in the order of `AttentionBuffers`."""
    batch, tokens, heads = dimension("B"), dimension("S"), dimension("N")
    kv_heads, capacity = dimension("N_kv"), dimension("C")
    h = AttentionBuffers(*handles)
    positions, cos, sin = declare_rotary(h.positions, h.cos, h.sin)
    bias_shape = tuple(dimension(f"bias_{axis}") for axis in ("batch", "heads", "tokens", "keys"))
    buffers = AttentionBuffers(
        query=declare_rows(spec, "query", h.query, batch, tokens, heads),
        key_cache=declare_cache(spec, "key_cache", h.key_cache, batch, kv_heads, capacity),
        value_cache=declare_cache(spec, "value_cache", h.value_cache, batch, kv_heads, capacity),
        past_lengths=buffer_parameter("past_lengths", h.past_lengths, (batch,), "int32"),
        total_lengths=buffer_parameter("total_lengths", h.total_lengths, (batch,), "int32"),
        positions=positions,
        cos=cos,
        sin=sin,
        bias=buffer_parameter("bias", h.bias, bias_shape, "float32", ("stride_b", "stride_n", "stride_s", T.int64(1))),
        head_sink=buffer_parameter("head_sink", h.head_sink, (dimension("sinks"),)),
        k_scale=declare_scale(spec, "k_scale", h.k_scale, kv_heads),
        v_scale=declare_scale(spec, "v_scale", h.v_scale, kv_heads),
        output=buffer_parameter("output", h.output, (batch, tokens, heads, spec.head_size)),
    )
    return T.meta_var(buffers)


class AttentionScalars(NamedTuple):
    """Scalar parameters of an attention kernel: uniform run-time choices, so that no feature is a compiled variant."""

    softmax_scale: Any  # float32
    softcap: Any  # float32, 0 = off
    window: Any  # int32, keys a row sees including itself, -1 = all
    causal: Any  # int32, 0 or 1
    rotary: Any  # int32: ROTARY_OFF, ROTARY_HALF_SPLIT, ROTARY_INTERLEAVED
    has_bias: Any  # int32, 0 or 1
    sink: Any  # int32: SINK_NONE, SINK_SMOOTH, SINK_HEAD
