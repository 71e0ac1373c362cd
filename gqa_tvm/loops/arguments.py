"""Parameters that the attention kernels share, declared once."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from ..definitions.exponential import BITS_PER_NAT, in_bits
from ..definitions.half import STORAGE_DTYPES
from ..definitions.kv_quantize import CACHE_DTYPES
from ..kernel_arguments import PACKED_KEYS
from ..kernels import KernelSpec

_ELEMENT_BYTES = {"int8": 1, "uint8": 1, "float16": 2, "uint16": 2, "float32": 4, "int32": 4, "int64": 8}


class AttentionBuffers(NamedTuple):
    """Tensor parameters of an attention kernel. Strides marked * are run-time numbers; the last axis is contiguous.

    "query dtype" is the storage dtype of the kernel's query format (bfloat16 is passed as uint16).
    """

    query: Any  # [B*, S*, hidden] query dtype, heads from column 0 on
    key_cache: Any  # [B*, N_kv*, C*, columns] cache dtype
    value_cache: Any  # [B*, N_kv*, C*, columns] cache dtype
    entries: Any  # [B, 4] int32, columns ENTRY_*
    positions: Any  # [B, S] int64, rotary positions; [1, 1] when rotary is 0
    cos: Any  # [max positions, rotary_dim / 2] query dtype
    sin: Any
    bias: Any  # [B or 1, N or 1, S*, T] query dtype; [1, 1, 1, 1] without bias
    head_sink: Any  # [N] query dtype; [1] without sinks
    norm_weight: Any  # [H] query dtype, of the query's RMS norm
    k_scale: Any  # [N_kv * H] or [1] float32
    v_scale: Any
    output: Any  # [B, S, N, H] query dtype


def dimension(name: str):
    variable = T.int64()
    IRBuilder.name(name, variable)
    return variable


def buffer_parameter(name: str, handle, shape, dtype="float32", strides=None):
    # Callers' arrays have no alignment beyond their element size; TVM would assume 64 bytes.
    size = _ELEMENT_BYTES[dtype]
    if strides is None:
        buffer = T.match_buffer(handle, shape, dtype, align=size)
    else:
        names = tuple(dimension(f"{name}_{stride}") if isinstance(stride, str) else stride for stride in strides)
        buffer = T.match_buffer(handle, shape, dtype, strides=names, align=size)
    IRBuilder.name(name, buffer)
    return buffer


def declare_cache(spec: KernelSpec, name: str, handle, batch, kv_heads, capacity):
    """A key or value cache [B, N_kv, C, columns] with free outer strides; packed: [B, N_kv, C / n, n columns]."""
    if spec.layout:
        keys = PACKED_KEYS[name]
        packed = (batch, kv_heads, dimension(f"{name}_rows"), keys * spec.cache_columns)
        return buffer_parameter(name, handle, packed, CACHE_DTYPES[spec.cache], ("batch", "head", "row", 1))
    shape = (batch, kv_heads, capacity, spec.cache_columns)
    return buffer_parameter(name, handle, shape, CACHE_DTYPES[spec.cache], ("batch", "head", "row", 1))


def declare_rows(spec: KernelSpec, name: str, handle, batch, tokens):
    """Query, key, value or packed QKV [B, S, hidden] with free outer strides."""
    shape = (batch, tokens, dimension(f"{name}_hidden"))
    return buffer_parameter(name, handle, shape, STORAGE_DTYPES[spec.query], ("batch", "token", T.int64(1)))


def declare_entries(handle, batch):
    return buffer_parameter("entries", handle, (batch, 4), "int32")


def declare_norm_weight(spec: KernelSpec, handle):
    return buffer_parameter("norm_weight", handle, (spec.head_size,), STORAGE_DTYPES[spec.query])


def declare_rotary(spec: KernelSpec, positions, cos, sin):
    """Positions [B, S] and the two rotary tables; their shapes are free so that 1 x 1 stand-ins pass."""
    batch, tokens = dimension("position_batch"), dimension("position_tokens")
    rows, columns = dimension("rotary_rows"), dimension("rotary_columns")
    return (
        buffer_parameter("positions", positions, (batch, tokens), "int64"),
        *(
            buffer_parameter(name, table, (rows, columns), STORAGE_DTYPES[spec.query], ("row", T.int64(1)))
            for name, table in (("cos", cos), ("sin", sin))
        ),
    )


def declare_scale(name: str, handle):
    """A scale of N_kv * H elements, or of one that serves them all."""
    return buffer_parameter(name, handle, (dimension(f"{name}_elements"),))


def declare_attention(spec: KernelSpec, handles) -> AttentionBuffers:
    """Match the tensor handles of an attention kernel, in the order of `AttentionBuffers`."""
    batch, tokens, heads = dimension("B"), dimension("S"), dimension("N")
    kv_heads, capacity = dimension("N_kv"), dimension("C")
    dtype = STORAGE_DTYPES[spec.query]
    h = AttentionBuffers(*handles)
    positions, cos, sin = declare_rotary(spec, h.positions, h.cos, h.sin)
    bias_shape = tuple(dimension(f"bias_{axis}") for axis in ("batch", "heads", "tokens", "keys"))
    buffers = AttentionBuffers(
        query=declare_rows(spec, "query", h.query, batch, tokens),
        key_cache=declare_cache(spec, "key_cache", h.key_cache, batch, kv_heads, capacity),
        value_cache=declare_cache(spec, "value_cache", h.value_cache, batch, kv_heads, capacity),
        entries=declare_entries(h.entries, batch),
        positions=positions,
        cos=cos,
        sin=sin,
        bias=buffer_parameter("bias", h.bias, bias_shape, dtype, ("stride_b", "stride_n", "stride_s", T.int64(1))),
        head_sink=buffer_parameter("head_sink", h.head_sink, (dimension("sinks"),), dtype),
        norm_weight=declare_norm_weight(spec, h.norm_weight),
        k_scale=declare_scale("k_scale", h.k_scale),
        v_scale=declare_scale("v_scale", h.v_scale),
        output=buffer_parameter("output", h.output, (batch, tokens, heads, spec.head_size), dtype),
    )
    return T.meta_var(buffers)


class AttentionScalars(NamedTuple):
    """Scalar parameters of an attention kernel: uniform run-time choices, so that no feature is a compiled variant."""

    softmax_scale: Any  # float32
    softcap: Any  # float32, 0 = off
    window: Any  # int32, keys a row sees including itself, -1 = all
    causal: Any  # int32, 0 or 1
    norm_epsilon: Any  # float32, of the query's RMS norm, 0 = off
    rotary: Any  # int32: ROTARY_OFF, ROTARY_HALF_SPLIT, ROTARY_INTERLEAVED
    has_bias: Any  # int32, 0 or 1
    sink: Any  # int32: SINK_NONE, SINK_SMOOTH, SINK_HEAD
    bits: bool = False  # whether scores are in bits (`exponential`) rather than in nats

    def in_bits(self):
        """The same for a kernel that keeps its scores in bits."""
        scale = tirx.Cast("float32", tirx.Cast("float64", self.softmax_scale) * tirx.const(BITS_PER_NAT, "float64"))
        return self._replace(softmax_scale=T.bind(scale), softcap=T.bind(in_bits(self.softcap)), bits=True)

    def unit(self, score):
        """A score in nats in the kernel's unit."""
        return in_bits(score) if self.bits else score
