"""GroupQueryAttention's attributes: ONNX Runtime's names and defaults, checked once."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Real

import numpy as np

from gqa_tvm.errors import InvalidArgument

_INTEGERS = (
    "num_heads",
    "kv_num_heads",
    "do_rotary",
    "rotary_interleaved",
    "local_window_size",
    "smooth_softmax",
    "sliding_window_cache",
    "causal",
    "qk_output",
    "kv_cache_bit_width",
)
_FLOATS = ("scale", "softcap")
_EPSILONS = ("q_norm_epsilon", "k_norm_epsilon", "qk_norm_epsilon")
_QUANT_TYPES = ("NONE", "PER_TENSOR", "PER_CHANNEL")
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True)
class Attributes:
    """Checked attributes of one operator; quantisation types are stored in upper case.

    Flags follow ONNX Runtime: they are on only when exactly 1. Epsilons hold float32 values, as ONNX attributes do;
    q_norm_epsilon and k_norm_epsilon stay None when they are not given. Raises InvalidArgument.
    """

    num_heads: int
    kv_num_heads: int
    scale: float = 0.0
    softcap: float = 0.0
    do_rotary: int = 0
    rotary_interleaved: int = 0
    local_window_size: int = -1
    smooth_softmax: int = -1
    sliding_window_cache: int = 0
    causal: int = 1
    qk_output: int = 0
    k_quant_type: str = "NONE"
    v_quant_type: str = "NONE"
    kv_cache_bit_width: int = 0
    q_norm_epsilon: float | None = None
    k_norm_epsilon: float | None = None
    qk_norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        for name in _FLOATS:
            object.__setattr__(self, name, _real(name, getattr(self, name)))
        for name in _EPSILONS:
            object.__setattr__(self, name, _epsilon(name, getattr(self, name)))
        if not math.isfinite(self.scale):
            raise InvalidArgument(f"Attribute 'scale' must be finite, got {self.scale}.")
        if math.isinf(self.softcap) and self.softcap > 0:
            raise InvalidArgument(f"Attribute 'softcap' must be finite, got {self.softcap}.")
        _check_heads(self)
        _check_causal(self)
        for name in ("k_quant_type", "v_quant_type"):
            object.__setattr__(self, name, _quant_type(name, getattr(self, name)))
        _check_window(self)
        _check_quantization(self)
        _check_grouping_and_outputs(self)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.kv_num_heads

    @property
    def is_quantized(self) -> bool:
        """Whether the KV cache holds INT8 or INT4 codes."""
        return self.k_quant_type != "NONE"

    @property
    def cache_bits(self) -> int:
        """Bits of one cache code: 8, 4, or 0 for a float cache."""
        return self.kv_cache_bit_width

    @property
    def use_rotary(self) -> bool:
        """Whether query and key are rotated before anything is cached."""
        return self.do_rotary == 1

    @property
    def is_rotary_interleaved(self) -> bool:
        """Whether rotary pairs are (2i, 2i+1) instead of (i, i + R/2)."""
        return self.rotary_interleaved == 1

    @property
    def use_smooth_softmax(self) -> bool:
        """Whether exp(0) joins the softmax denominator."""
        return self.smooth_softmax == 1

    @property
    def window(self) -> int:
        """Keys a row may see, itself included; -1 when there is no window."""
        return self.local_window_size

    @property
    def use_sliding_window(self) -> bool:
        """Whether the cache keeps a window of the sequence and drops older keys."""
        return self.sliding_window_cache == 1

    @property
    def query_norm_epsilon(self) -> float:
        """Epsilon of the query's RMS norm: q_norm_epsilon, else qk_norm_epsilon."""
        return self.qk_norm_epsilon if self.q_norm_epsilon is None else self.q_norm_epsilon

    @property
    def key_norm_epsilon(self) -> float:
        """Epsilon of the key's RMS norm: k_norm_epsilon, else qk_norm_epsilon."""
        return self.qk_norm_epsilon if self.k_norm_epsilon is None else self.k_norm_epsilon


def _integer(name: str, value: object) -> int:
    try:
        number = int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        came = type(value).__name__
        raise InvalidArgument(f"Attribute '{name}' must be an integer, got {came}.") from None
    if not _INT32_MIN <= number <= _INT32_MAX:
        # Python refuses to print integers of several thousand digits.
        came = str(number) if number.bit_length() <= 64 else f"{number.bit_length()} bits"
        raise InvalidArgument(f"Attribute '{name}' must be in [{_INT32_MIN}, {_INT32_MAX}], got {came}.")
    return number


def _real(name: str, value: object) -> float:
    if not isinstance(value, Real):
        came = type(value).__name__
        raise InvalidArgument(f"Attribute '{name}' must be a real number, got {came}.")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidArgument(f"Attribute '{name}' is outside the range of float32.") from None
    if _FLOAT32_MAX < abs(number) < float("inf"):
        raise InvalidArgument(f"Attribute '{name}' is outside the range of float32, got {number}.")
    return number


def _epsilon(name: str, value: object) -> float | None:
    if value is None and name != "qk_norm_epsilon":
        return None
    # A value too small for float32 would become 0.
    number = float(np.float32(_real(name, value)))
    if not 0 < number < float("inf"):
        raise InvalidArgument(f"Attribute '{name}' must be finite and positive as a float32, got {value}.")
    return number


def _quant_type(name: str, value: object) -> str:
    if not isinstance(value, str):
        came = type(value).__name__
        raise InvalidArgument(f"Attribute '{name}' must be a string, got {came}.")
    quant_type = value.upper()
    if quant_type not in _QUANT_TYPES:
        raise InvalidArgument(
            f"Invalid KV quantization type: '{quant_type}'. "
            f"Valid values are: {', '.join(_QUANT_TYPES)}. Got {name}={value!r}."
        )
    return quant_type


def _check_heads(attributes: Attributes) -> None:
    for name in ("num_heads", "kv_num_heads"):
        if getattr(attributes, name) <= 0:
            raise InvalidArgument(
                f"{name} must be positive, got {getattr(attributes, name)}: "
                f'info.GetAttr("{name}", &{name}).IsOK() && {name} > 0 was false.'
            )


def _check_causal(attributes: Attributes) -> None:
    if attributes.causal not in (0, 1):
        raise InvalidArgument(f"causal must be 0 or 1. Got {attributes.causal}.")
    if attributes.causal == 0 and attributes.local_window_size != -1:
        raise InvalidArgument(
            "GroupQueryAttention (CPU): local_window_size must be -1 when causal is 0. "
            f"Got {attributes.local_window_size}."
        )


def _check_window(attributes: Attributes) -> None:
    window = attributes.local_window_size
    if attributes.use_sliding_window and window <= 0:
        raise InvalidArgument(
            f"GroupQueryAttention (CPU): sliding_window_cache=1 requires local_window_size > 0. Got {window}."
        )
    if window == 0 or window < -1:
        raise InvalidArgument(f"local_window_size must be -1 (off) or at least 1, got {window}.")


def _check_quantization(attributes: Attributes) -> None:
    k_type, v_type = attributes.k_quant_type, attributes.v_quant_type
    width = attributes.kv_cache_bit_width
    if k_type != v_type:
        if k_type == "NONE":
            raise InvalidArgument(
                f"v_quant_type needs the same k_quant_type, got k_quant_type={k_type}, v_quant_type={v_type}."
            )
        raise InvalidArgument(
            "CPU GroupQueryAttention requires k_quant_type == v_quant_type, got different types: "
            f"{k_type} and {v_type}."
        )
    if attributes.is_quantized and width not in (4, 8):
        raise InvalidArgument(f"kv_cache_bit_width must be 4 or 8 when quantization is enabled, got {width}.")
    if not attributes.is_quantized and width != 0:
        raise InvalidArgument(f"kv_cache_bit_width must be 0 when quantization is disabled, got {width}.")


def _check_grouping_and_outputs(attributes: Attributes) -> None:
    num_heads, kv_num_heads = attributes.num_heads, attributes.kv_num_heads
    if num_heads % kv_num_heads:
        raise InvalidArgument(
            "num_heads must be a multiple of kv_num_heads. Got num_heads % kv_num_heads == "
            f"{num_heads % kv_num_heads} ({num_heads} and {kv_num_heads})."
        )
    if attributes.qk_output not in (0, 1, 2):
        raise InvalidArgument(
            f"qk_output attribute received unsupported value {attributes.qk_output}: "
            "0, 1 (before softmax) and 2 (after softmax) are valid."
        )
    if attributes.use_sliding_window and attributes.qk_output:
        raise InvalidArgument(
            "GroupQueryAttention (CPU): qk_output is not implemented with sliding_window_cache=1. "
            f"Got qk_output={attributes.qk_output}."
        )
