"""The forward pass in NumPy; attention and its cache belong to the operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gqa_tvm.language_model.cache_modes import CacheMode, LayerCache, LayerScales, empty_cache
from gqa_tvm.language_model.weights import Architecture, FloatArray, LayerWeights, ModelWeights

# Called with ORT's attributes by keyword; what it returns is called with ORT's inputs by keyword
# plus ``present_key`` and ``present_value`` and has the result as ``.output``.
AttentionFactory = Callable[..., Callable[..., Any]]


class Transformer:
    """A model with one sequence in its cache; tokens are appended by ``forward``."""

    def __init__(
        self,
        weights: ModelWeights,
        attention: AttentionFactory,
        mode: CacheMode,
        scales: Sequence[LayerScales] | None,
        capacity: int,
    ) -> None:
        """``attention`` makes the operator of each layer, ``scales`` are needed unless fp32.

        Room for ``capacity`` tokens is reserved at once, so that the cache never moves.
        """
        sizes = weights.architecture
        if (scales is None) != (mode.bit_width == 0):
            raise ValueError(f"scales belong to a quantised cache and only there: {mode.name}")
        self.weights = weights
        self.mode = mode
        self.capacity = capacity
        self.position = 0
        self.attention_seconds = 0.0
        self.cache: tuple[LayerCache, ...] = empty_cache(mode, sizes, capacity)
        self._scales = scales
        self._cos_cache, self._sin_cache = rotary_tables(sizes, capacity)
        self._operators = [
            attention(
                num_heads=sizes.num_heads,
                kv_num_heads=sizes.kv_num_heads,
                do_rotary=1,
                rotary_interleaved=1,
                **mode.attributes,
            )
            for _ in range(sizes.num_layers)
        ]

    def forward(self, tokens: Sequence[int]) -> FloatArray:
        """Appends S tokens and returns their hidden states ``[S, E]`` after the last norm.

        Raises ``ValueError`` when the cache has no room for them.
        """
        total = self.position + len(tokens)
        if total > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {total} are too many")
        epsilon = self.weights.architecture.norm_epsilon
        x = self.weights.token_embedding[np.asarray(tokens, dtype=np.int64)]
        for index, layer in enumerate(self.weights.layers):
            packed_qkv = rms_norm(x, layer.attention_norm, epsilon) @ layer.packed_qkv.T
            x = x + self._attend(index, packed_qkv, total) @ layer.attention_output.T
            x = x + feed_forward(rms_norm(x, layer.feed_forward_norm, epsilon), layer)
        self.position = total
        return rms_norm(x, self.weights.output_norm, epsilon)

    def logits(self, hidden: FloatArray) -> FloatArray:
        """Scores of the next token, ``[S, vocabulary]``, from hidden states ``[S, E]``."""
        scores: FloatArray = hidden @ self.weights.token_embedding.T
        return scores

    def _attend(self, index: int, packed_qkv: FloatArray, total: int) -> FloatArray:
        cache = self.cache[index]
        scales = {}
        if self._scales is not None:
            scales = {"k_scale": self._scales[index].key, "v_scale": self._scales[index].value}
        started = time.perf_counter()
        result = self._operators[index](
            query=packed_qkv[np.newaxis],
            key=None,
            value=None,
            past_key=cache.key,
            past_value=cache.value,
            seqlens_k=np.array([total - 1], np.int32),
            total_sequence_length=np.array([total], np.int32),
            cos_cache=self._cos_cache,
            sin_cache=self._sin_cache,
            present_key=cache.key,
            present_value=cache.value,
            **scales,
        )
        self.attention_seconds += time.perf_counter() - started
        output: FloatArray = result.output[0]
        return output


def rotary_tables(sizes: Architecture, capacity: int) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines of ``position * base ** (-2 i / H)``, each ``[C, H / 2]``."""
    exponents = np.arange(0, sizes.head_size, 2) / sizes.head_size
    angles = np.arange(capacity)[:, np.newaxis] * sizes.rope_base**-exponents
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rms_norm(x: FloatArray, weight: FloatArray, epsilon: float) -> FloatArray:
    """Rows of ``x`` ``[S, E]`` over their root mean square, times ``weight`` ``[E]``."""
    mean_square = np.einsum("se,se->s", x, x) / np.float32(x.shape[1])
    scaled: FloatArray = x / np.sqrt(mean_square + np.float32(epsilon))[:, np.newaxis]
    return scaled * weight


def feed_forward(x: FloatArray, layer: LayerWeights) -> FloatArray:
    """SwiGLU: ``(silu(x gate) * (x up)) down``, ``[S, E]`` to ``[S, E]``."""
    gate, up = np.split(x @ layer.gate_and_up.T, 2, axis=1)
    # silu(g) = g * sigmoid(g); tanh cannot overflow where exp(-g) would.
    silu = gate * (np.float32(0.5) * np.tanh(gate * np.float32(0.5)) + np.float32(0.5))
    product: FloatArray = (silu * up) @ layer.down.T
    return product
