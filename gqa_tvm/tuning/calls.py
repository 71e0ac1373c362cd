"""Calls of the operator that run a task's kernel, with random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels import KernelSpec
from .task import Shape

_FLOATS = {"f32": "float32", "f16": "float16"}


def make_call(spec: KernelSpec, shape: Shape, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(attributes, inputs); the past is a buffer of `total` rows that may be written in place."""
    rng = np.random.default_rng(seed)
    attributes: dict[str, Any] = {"num_heads": shape.kv_heads * shape.group_size, "kv_num_heads": shape.kv_heads}

    def hidden(heads: int) -> np.ndarray:
        values = rng.standard_normal((1, shape.tokens, heads * shape.head_size), np.float32)
        return values.astype(_float_dtype(spec.query))

    inputs: dict[str, Any] = {
        "query": hidden(attributes["num_heads"]),
        "key": hidden(shape.kv_heads),
        "value": hidden(shape.kv_heads),
        "past_key": _cache(spec, shape, rng),
        "past_value": _cache(spec, shape, rng),
        "seqlens_k": np.full(1, shape.total - 1, np.int32),
        "total_sequence_length": np.array([shape.total], np.int32),
    }
    if not spec.is_float_cache:
        bits = 4 if spec.cache == "i4" else 8
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": bits}
        inputs |= {name: np.full(1, 0.02 if bits == 8 else 0.25, np.float32) for name in ("k_scale", "v_scale")}
    return attributes, inputs


def _cache(spec: KernelSpec, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    dimensions = (1, shape.kv_heads, shape.total, spec.cache_columns)
    if spec.is_float_cache:
        return rng.standard_normal(dimensions, np.float32).astype(_float_dtype(spec.cache))
    limits = np.iinfo(np.uint8 if spec.cache == "i4" else np.int8)
    return rng.integers(limits.min, limits.max, dimensions, limits.dtype, endpoint=True)


def _float_dtype(name: str) -> Any:
    if name == "bf16":
        from ml_dtypes import bfloat16

        return bfloat16
    return np.dtype(_FLOATS[name])
