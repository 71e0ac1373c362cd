"""The ways to keep keys and values: float32, INT8 and INT4, per tensor and per channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gqa_tvm.language_model.weights import Architecture, FloatArray

CacheArray = NDArray[Any]


@dataclass(frozen=True)
class CacheMode:
    """One kind of KV cache, in the terms of the operator's attributes."""

    name: str
    quant_type: str = "NONE"
    bit_width: int = 0  # 0 = float32

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32, int8, or uint8 that holds two INT4 codes."""
        return np.dtype({0: np.float32, 8: np.int8, 4: np.uint8}[self.bit_width])

    @property
    def largest_code(self) -> int:
        """The code that the largest magnitude is mapped to: 127 or 7; 0 for float32."""
        return 0 if self.bit_width == 0 else 2 ** (self.bit_width - 1) - 1

    @property
    def attributes(self) -> dict[str, Any]:
        """The operator's quantisation attributes."""
        return {
            "k_quant_type": self.quant_type,
            "v_quant_type": self.quant_type,
            "kv_cache_bit_width": self.bit_width,
        }

    def packed_head_size(self, head_size: int) -> int:
        """The last dimension of a cache array."""
        return (head_size + 1) // 2 if self.bit_width == 4 else head_size

    def bytes_per_token(self, sizes: Architecture) -> int:
        """Cache bytes a token takes over all layers, keys and values; scales not counted."""
        row = self.packed_head_size(sizes.head_size) * self.dtype.itemsize
        return 2 * sizes.num_layers * sizes.kv_num_heads * row


CACHE_MODES: dict[str, CacheMode] = {
    mode.name: mode
    for mode in (
        CacheMode("fp32"),
        CacheMode("int8-per-tensor", "PER_TENSOR", 8),
        CacheMode("int8-per-channel", "PER_CHANNEL", 8),
        CacheMode("int4-per-tensor", "PER_TENSOR", 4),
        CacheMode("int4-per-channel", "PER_CHANNEL", 4),
    )
}


@dataclass(frozen=True)
class LayerScales:
    """float32 scales of a layer's cache: ``[1]`` per tensor, ``[N_kv * H]`` per channel."""

    key: FloatArray
    value: FloatArray


@dataclass(frozen=True)
class LayerCache:
    """A layer's keys and values, ``[1, N_kv, C, packed H]`` in the mode's dtype."""

    key: CacheArray
    value: CacheArray


def empty_cache(mode: CacheMode, sizes: Architecture, capacity: int) -> tuple[LayerCache, ...]:
    """Zeroed arrays for ``capacity`` tokens in every layer."""
    shape = (1, sizes.kv_num_heads, capacity, mode.packed_head_size(sizes.head_size))
    return tuple(LayerCache(np.zeros(shape, mode.dtype), np.zeros(shape, mode.dtype)) for _ in range(sizes.num_layers))
