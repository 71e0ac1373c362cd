"""The arrays of a workload: the same random numbers for everyone who is timed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from workloads import CACHE_BITS, Workload

from gqa_tvm.arrays import huge_page_zeros
from gqa_tvm.reference import dequantize, quantize
from gqa_tvm.reference.quantization import head_scales

_FLOATS = {"f32": np.float32, "f16": np.float16}


class Call(NamedTuple):
    """attributes and inputs of the operator, by ONNX Runtime's names; past is a buffer to be written in place."""

    attributes: dict[str, Any]
    inputs: dict[str, np.ndarray]


class Gemm(NamedTuple):
    """rows float32 [M, K] or [M, T]; codes [N, K] or [T, K] as the cache stores them; scale [1] or [K]."""

    rows: np.ndarray
    codes: np.ndarray
    scale: np.ndarray
    bits: int


def make_call(workload: Workload, seed: int = 0) -> Call:
    """A call of the operator with a shared buffer of `total` rows for past and present, the same for everyone."""
    rng = np.random.default_rng(seed)
    tokens = (workload.batch, workload.tokens)
    dtype = _FLOATS[workload.query]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype, copy=False)

    inputs = {
        "query": normal(*tokens, workload.heads * workload.head_size),
        "key": normal(*tokens, workload.kv_heads * workload.head_size),
        "value": normal(*tokens, workload.kv_heads * workload.head_size),
        "past_key": as_kv_cache(_stored_rows(workload, rng, (workload.batch, workload.kv_heads, workload.total))),
        "past_value": as_kv_cache(_stored_rows(workload, rng, (workload.batch, workload.kv_heads, workload.total))),
        "seqlens_k": np.array(workload.totals, np.int32) - np.int32(1),
        "total_sequence_length": np.array([workload.total], np.int32),
    }
    attributes: dict[str, Any] = {"num_heads": workload.heads, "kv_num_heads": workload.kv_heads}
    if CACHE_BITS[workload.cache] <= 8:
        quant_type = "PER_CHANNEL" if workload.cache.endswith("c") else "PER_TENSOR"
        attributes |= {"k_quant_type": quant_type, "v_quant_type": quant_type}
        attributes["kv_cache_bit_width"] = CACHE_BITS[workload.cache]
        for name in ("k_scale", "v_scale"):
            inputs[name] = _scale(workload, rng, workload.kv_heads * workload.head_size)
    if workload.window > 0:
        attributes["local_window_size"] = workload.window
    _add_feature(workload, attributes, inputs)
    return Call(attributes, inputs)


def as_kv_cache(rows: np.ndarray) -> np.ndarray:
    """A copy where gqa_tvm.KVCache has its rows, in huge pages: those of NumPy's large arrays straddle cache lines."""
    cache = huge_page_zeros(rows.shape, rows.dtype)
    cache[...] = rows
    return cache


def _add_feature(workload: Workload, attributes: dict[str, Any], inputs: dict[str, np.ndarray]) -> None:
    dtype = _FLOATS[workload.query]
    if workload.feature == "softcap":
        attributes["softcap"] = 30.0
    elif workload.feature == "sink":
        inputs["head_sink"] = np.zeros(workload.heads, dtype)
    elif workload.feature == "bias":
        inputs["attention_bias"] = np.zeros((1, 1, workload.tokens, workload.total), dtype)
    elif workload.feature == "window":
        attributes["local_window_size"] = workload.total
    elif workload.feature == "rotary":
        attributes["do_rotary"] = 1
        angles = np.arange(workload.total)[:, None] * 1e4 ** -np.linspace(0, 1, workload.head_size // 2)
        inputs["cos_cache"], inputs["sin_cache"] = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def float_call(call: Call) -> Call:
    """The call over a float cache with the same values, for a peer with formats of its own.

    Codes of past and scales become float32; new keys and values lose what the cache's format cannot hold.
    """
    bits = call.attributes.get("kv_cache_bit_width")
    if bits is None:
        return call
    heads = call.attributes["kv_num_heads"]
    inputs = dict(call.inputs)
    for name, letter in (("key", "k"), ("value", "v")):
        rows = inputs[name].reshape(*inputs[name].shape[:2], heads, -1)
        size = rows.shape[-1]
        scales = head_scales(inputs.pop(f"{letter}_scale"), call.attributes[f"{letter}_quant_type"], heads, size)
        inputs[f"past_{name}"] = dequantize(inputs[f"past_{name}"], scales, bits, size)
        # [B, N_kv, S, H], against which scales are broadcast.
        stored = dequantize(quantize(np.moveaxis(rows, 1, 2), scales, bits), scales, bits, size)
        inputs[name] = np.moveaxis(stored, 1, 2).reshape(inputs[name].shape)
    quantised = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")
    return Call({name: value for name, value in call.attributes.items() if name not in quantised}, inputs)


def make_gemm(workload: Workload, seed: int = 0) -> Gemm:
    rng = np.random.default_rng(seed)
    inner = workload.head_size if workload.operation == "qk_gemm" else workload.total
    rows = rng.standard_normal((workload.tokens, inner), np.float32)
    codes = _stored_rows(workload, rng, (workload.total,))
    return Gemm(rows, codes, _scale(workload, rng, workload.head_size), CACHE_BITS[workload.cache])


def _stored_rows(workload: Workload, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    bits = CACHE_BITS[workload.cache]
    if bits > 8:
        rows = rng.standard_normal((*shape, workload.head_size), np.float32)
        return rows.astype(_FLOATS[workload.cache], copy=False)
    if bits == 8:
        return rng.integers(-128, 128, (*shape, workload.head_size), np.int8)
    return rng.integers(0, 256, (*shape, workload.head_size // 2), np.uint8)


def _scale(workload: Workload, rng: np.random.Generator, channels: int) -> np.ndarray:
    """Such that values are about as large as unit normals."""
    low, high = (0.01, 0.02) if CACHE_BITS[workload.cache] == 8 else (0.15, 0.3)
    return rng.uniform(low, high, channels if workload.cache.endswith("c") else 1).astype(np.float32)
