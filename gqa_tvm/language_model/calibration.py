"""Scales of a quantised cache from what a float32 cache held over a calibration text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gqa_tvm.language_model.cache_modes import (
    CACHE_MODES,
    CacheArray,
    CacheMode,
    LayerScales,
)
from gqa_tvm.language_model.transformer import AttentionFactory, Transformer
from gqa_tvm.language_model.weights import FloatArray, ModelWeights
from gqa_tvm.progress import ProgressBar

CHUNK_TOKENS = 64


@dataclass(frozen=True)
class LayerMagnitudes:
    """Largest absolute key (after rotary) and value of every channel, each ``[N_kv, H]``."""

    key: FloatArray
    value: FloatArray


def observe(weights: ModelWeights, attention: AttentionFactory, tokens: Sequence[int]) -> tuple[LayerMagnitudes, ...]:
    """Runs the calibration tokens through a float32 cache; shows a progress bar."""
    model = Transformer(weights, attention, CACHE_MODES["fp32"], None, capacity=len(tokens))
    with ProgressBar("calibrating the cache scales", len(tokens)) as progress:
        for start in range(0, len(tokens), CHUNK_TOKENS):
            chunk = tokens[start : start + CHUNK_TOKENS]
            model.forward(chunk)
            progress.advance(len(chunk))
    return tuple(
        LayerMagnitudes(_largest_per_channel(layer.key), _largest_per_channel(layer.value)) for layer in model.cache
    )


def scales_for(mode: CacheMode, magnitudes: Sequence[LayerMagnitudes]) -> tuple[LayerScales, ...] | None:
    """Scales that map the largest observed magnitude to the largest code; None for float32."""
    if mode.bit_width == 0:
        return None
    return tuple(LayerScales(_scale(mode, layer.key), _scale(mode, layer.value)) for layer in magnitudes)


def _largest_per_channel(cache: CacheArray) -> FloatArray:
    largest: FloatArray = np.abs(cache[0]).max(axis=1)
    return largest


def _scale(mode: CacheMode, magnitudes: FloatArray) -> FloatArray:
    largest = magnitudes.max(keepdims=True) if mode.quant_type == "PER_TENSOR" else magnitudes
    # A channel that stayed at zero gets a scale that is harmless should it wake up.
    nonzero = np.where(largest > 0, largest, np.float32(1.0))
    scale: FloatArray = (nonzero / np.float32(mode.largest_code)).astype(np.float32).ravel()
    return scale
