"""The operator's inputs and the rules about their element types and presence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gqa_tvm.attributes import Attributes
from gqa_tvm.errors import InvalidArgument

_FLOAT32 = np.dtype(np.float32)
_INT8 = np.dtype(np.int8)
_UINT8 = np.dtype(np.uint8)
_INT32 = np.dtype(np.int32)
_INT64 = np.dtype(np.int64)
_CACHE_DTYPES = {0: _FLOAT32, 8: _INT8, 4: _UINT8}  # by cache bits


class Inputs(NamedTuple):
    """The operator's inputs in ONNX Runtime's order, NumPy arrays or None for absent ones."""

    query: np.ndarray  # float32 [B, S, N * H], or packed [B, S, (N + 2 * N_kv) * H]
    key: np.ndarray | None  # float32 [B, S or 0, N_kv * H]
    value: np.ndarray | None  # float32, as key
    past_key: np.ndarray | None  # float32, int8 or uint8 [B, N_kv, C, packed H]
    past_value: np.ndarray | None  # as past_key
    seqlens_k: np.ndarray  # int32, B elements
    total_sequence_length: np.ndarray  # int32 [] or [1]
    cos_cache: np.ndarray | None = None  # float32 [M, R / 2]
    sin_cache: np.ndarray | None = None  # float32 [M, R / 2]
    position_ids: np.ndarray | None = None  # int64 [B, at least S]
    attention_bias: np.ndarray | None = None  # float32 [B or 1, N or 1, S, T]
    head_sink: np.ndarray | None = None  # float32 [N]
    k_scale: np.ndarray | None = None  # float32, 1 or N_kv * H elements
    v_scale: np.ndarray | None = None  # float32, as k_scale
    q_norm_weight: np.ndarray | None = None
    k_norm_weight: np.ndarray | None = None
    query_seqlens: np.ndarray | None = None  # int32 [B]


_REQUIRED = ("query", "seqlens_k", "total_sequence_length")
_INPUT_DTYPES: tuple[tuple[np.dtype[Any], ...], ...] = (
    *((_FLOAT32,),) * 3,
    *((_FLOAT32, _INT8, _UINT8),) * 2,
    *((_INT32,),) * 2,
    *((_FLOAT32,),) * 2,
    (_INT64,),
    *((_FLOAT32,),) * 6,
    (_INT32,),
)


def check_dtypes(inputs: Inputs) -> None:
    """Every input is a NumPy array of the one element type it may have, or absent."""
    for name, array, wanted in zip(inputs._fields, inputs, _INPUT_DTYPES, strict=True):
        if array is None:
            if name in _REQUIRED:
                raise InvalidArgument(f"Input '{name}' is required, got None.")
        elif not isinstance(array, np.ndarray):
            came = type(array).__name__
            raise InvalidArgument(f"Input '{name}' must be a NumPy array, got {came}.")
        elif array.dtype not in wanted:
            raise InvalidArgument(_dtype_text(name, array.dtype, wanted))
    past_key, past_value = inputs.past_key, inputs.past_value
    if past_key is not None and past_value is not None and past_key.dtype != past_value.dtype:
        raise InvalidArgument(
            "Type Error: Input 'past_key' and 'past_value' must have the same type, got "
            f"{past_key.dtype} and {past_value.dtype}."
        )


def check_presence(attributes: Attributes, inputs: Inputs) -> None:
    """Scales come with quantisation; norm weights and query_seqlens are not supported."""
    if attributes.is_quantized:
        if inputs.k_scale is None:
            raise InvalidArgument("k_scale must be provided when k_quant_type is not NONE")
        if inputs.v_scale is None:
            raise InvalidArgument("v_scale must be provided when v_quant_type is not NONE")
    if inputs.q_norm_weight is not None or inputs.k_norm_weight is not None:
        raise InvalidArgument(
            "GroupQueryAttention (CPU): q_norm_weight / k_norm_weight inputs are not supported. "
            "The per-head Q/K RMS normalization prologue is implemented only on the CUDA and "
            "WebGPU EPs."
        )
    if inputs.query_seqlens is not None:
        raise InvalidArgument("query_seqlens is not supported yet.")


def check_cache_dtype(attributes: Attributes, past_key: np.ndarray | None) -> None:
    """The cache is float32 without quantisation, int8 for 8 bits, uint8 for 4 bits."""
    wanted = _CACHE_DTYPES[attributes.cache_bits]
    if past_key is not None and past_key.dtype != wanted:
        raise InvalidArgument(
            f"Tensor type mismatch. past_key and past_value must be {wanted} when "
            f"kv_cache_bit_width is {attributes.cache_bits}, got {past_key.dtype}."
        )


def _dtype_text(name: str, came: np.dtype, wanted: tuple[np.dtype, ...]) -> str:
    if name == "query" and came.name in ("float16", "bfloat16"):
        return f"{came.name} query is not supported yet: Input 'query' must be float32."
    names = " or ".join(map(str, wanted))
    return f"Type Error: Input '{name}' must be {names}, got {came}."
