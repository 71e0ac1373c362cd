"""The operator's inputs and the rules about their element types and presence."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gqa_tvm.attributes import Attributes
from gqa_tvm.errors import InvalidArgument

_DType = np.dtype[Any]
_FLOAT32 = np.dtype(np.float32)
_FLOAT16 = np.dtype(np.float16)
_INT8 = np.dtype(np.int8)
_UINT8 = np.dtype(np.uint8)
_INT32 = np.dtype(np.int32)
_INT64 = np.dtype(np.int64)
_CODE_DTYPES = {8: _INT8, 4: _UINT8}  # by cache bits
_FLOAT_NAMES = "float32, float16 or bfloat16"


class Inputs(NamedTuple):
    """The operator's inputs in ONNX Runtime's order, NumPy arrays or None for absent ones.

    T is float32, float16 or bfloat16, one for all inputs. The cache is float32, float16, bfloat16, int8 or uint8.
    """

    query: np.ndarray  # T [B, S, N * H], or packed [B, S, (N + 2 * N_kv) * H]
    key: np.ndarray | None  # T [B, S or 0, N_kv * H]
    value: np.ndarray | None  # T, as key
    past_key: np.ndarray | None  # cache [B, N_kv, C, packed H]
    past_value: np.ndarray | None  # as past_key
    seqlens_k: np.ndarray  # int32, B elements
    total_sequence_length: np.ndarray  # int32 [] or [1]
    cos_cache: np.ndarray | None = None  # T [M, R / 2]
    sin_cache: np.ndarray | None = None  # T [M, R / 2]
    position_ids: np.ndarray | None = None  # int64 [B, at least S]
    attention_bias: np.ndarray | None = None  # T [B or 1, N or 1, S, total_sequence_length]
    head_sink: np.ndarray | None = None  # T [N]
    k_scale: np.ndarray | None = None  # float32, 1 or N_kv * H elements
    v_scale: np.ndarray | None = None  # float32, as k_scale
    q_norm_weight: np.ndarray | None = None  # T [H]
    k_norm_weight: np.ndarray | None = None  # T [H]
    query_seqlens: np.ndarray | None = None  # int32 [B]


_REQUIRED = ("query", "seqlens_k", "total_sequence_length")
_QUERY_TYPED = (
    *("key", "value", "cos_cache", "sin_cache", "attention_bias", "head_sink"),
    *("q_norm_weight", "k_norm_weight"),
)
_FLOAT_CACHES = (_FLOAT32, _FLOAT16)  # and bfloat16, which has no dtype object in NumPy itself
_CACHES = (*_FLOAT_CACHES, _INT8, _UINT8)


def check_dtypes(inputs: Inputs) -> None:
    """Every input is a NumPy array of an element type it may have, or absent."""
    for name, array, wanted in zip(inputs._fields, inputs, _wanted_dtypes(inputs.query), strict=True):
        if array is None:
            continue
        if type(array) is not np.ndarray:
            _check_is_plain_array(name, array)
        if array.dtype not in wanted and not (wanted is _CACHES and _is_bfloat16(array.dtype)):
            raise InvalidArgument(_dtype_text(name, array.dtype, wanted))
    if inputs.query is None or inputs.seqlens_k is None or inputs.total_sequence_length is None:
        absent = next(name for name in _REQUIRED if getattr(inputs, name) is None)
        raise InvalidArgument(f"Input '{absent}' is required, got None.")
    past_key, past_value = inputs.past_key, inputs.past_value
    if past_key is not None and past_value is not None and past_key.dtype != past_value.dtype:
        raise InvalidArgument(
            "Type Error: Input 'past_key' and 'past_value' must have the same type, got "
            f"{past_key.dtype} and {past_value.dtype}."
        )


def check_presence(attributes: Attributes, inputs: Inputs) -> None:
    """Scales come with quantisation, norm weights come as a pair, query_seqlens with causal attention."""
    if attributes.is_quantized:
        if inputs.k_scale is None:
            raise InvalidArgument("k_scale must be provided when k_quant_type is not NONE")
        if inputs.v_scale is None:
            raise InvalidArgument("v_scale must be provided when v_quant_type is not NONE")
    if (inputs.q_norm_weight is None) != (inputs.k_norm_weight is None):
        raise InvalidArgument("Input 'q_norm_weight' and 'k_norm_weight' shall be both present or both absent.")
    if inputs.query_seqlens is not None and attributes.causal != 1:
        raise InvalidArgument(
            f"GroupQueryAttention (CPU): query_seqlens requires causal=1. Got causal={attributes.causal}."
        )


def read_cache_dtype(attributes: Attributes, inputs: Inputs) -> _DType:
    """Return the present arrays' type: the past's, else int8 or uint8 by the bits, else the query's.

    Without quantisation the past is of any float type, not only the query's.
    """
    bits, past_key = attributes.cache_bits, inputs.past_key
    if bits == 0:
        dtype = inputs.query.dtype if past_key is None else past_key.dtype
        if dtype is _FLOAT32 or dtype in _FLOAT_CACHES or _is_bfloat16(dtype):
            return dtype
        raise InvalidArgument(_cache_text(_FLOAT_NAMES, bits, dtype))
    wanted = _CODE_DTYPES[bits]
    if past_key is not None and past_key.dtype != wanted:
        raise InvalidArgument(_cache_text(str(wanted), bits, past_key.dtype))
    return wanted


def _wanted_dtypes(query: object) -> tuple[tuple[_DType, ...], ...]:
    """Return the types each input may have, in order; they depend on the query's."""
    return _wanted_beside(query.dtype) if isinstance(query, np.ndarray) else _wanted_beside(_FLOAT32)


@lru_cache(maxsize=64)
def _wanted_beside(query: _DType) -> tuple[tuple[_DType, ...], ...]:
    is_float = query in (_FLOAT32, _FLOAT16) or _is_bfloat16(query)
    token = (query if is_float else _FLOAT32,)
    return (
        *(token,) * 3,
        *(_CACHES,) * 2,
        *((_INT32,),) * 2,
        *(token,) * 2,
        (_INT64,),
        *(token,) * 2,
        *((_FLOAT32,),) * 2,
        *(token,) * 2,
        (_INT32,),
    )


def _is_bfloat16(dtype: _DType) -> bool:
    """Whether this is the bfloat16 of a package that adds it to NumPy, in this machine's byte order."""
    return dtype.name == "bfloat16" and dtype.itemsize == 2 and dtype.isnative


def _check_is_plain_array(name: str, array: object) -> None:
    """Subclasses are arrays too, but a mask would be lost."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise InvalidArgument(f"Input '{name}' must be a NumPy array, got {type(array).__name__}.")


def _dtype_text(name: str, came: _DType, wanted: tuple[_DType, ...]) -> str:
    if name == "query":
        types = _FLOAT_NAMES
    elif wanted is _CACHES:
        types = "float32, float16, bfloat16, int8 or uint8"
    elif name in _QUERY_TYPED:
        types = f"{wanted[0]}, the type of 'query'"
    else:
        types = str(wanted[0])
    return f"Type Error: Input '{name}' must be {types}, got {came}."


def _cache_text(wanted: str, bits: int, came: _DType) -> str:
    return (
        f"Tensor type mismatch. past_key and past_value must be {wanted} when kv_cache_bit_width is {bits}, got {came}."
    )
