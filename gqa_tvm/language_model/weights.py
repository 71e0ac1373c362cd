"""What a Llama-style model is made of, and a tiny random one of the same architecture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Architecture:
    """The sizes of a Llama-style decoder with grouped query heads and interleaved rotary."""

    num_layers: int
    num_heads: int
    kv_num_heads: int
    head_size: int
    embedding_size: int
    feed_forward_size: int
    vocabulary_size: int
    rope_base: float
    norm_epsilon: float

    @property
    def packed_qkv_size(self) -> int:
        """Columns of a packed QKV row: ``(N + 2 * N_kv) * H``."""
        return (self.num_heads + 2 * self.kv_num_heads) * self.head_size


@dataclass(frozen=True)
class LayerWeights:
    """One block; matrices are ``[out, in]`` as GGUF stores them and applied as ``x @ w.T``."""

    attention_norm: FloatArray  # [E]
    packed_qkv: FloatArray  # [(N + 2 * N_kv) * H, E]: Q heads, K heads, V heads
    attention_output: FloatArray  # [E, N * H]
    feed_forward_norm: FloatArray  # [E]
    gate_and_up: FloatArray  # [2 * F, E]: gate rows, then up rows
    down: FloatArray  # [E, F]


@dataclass(frozen=True)
class ModelWeights:
    """All float32 weights; ``token_embedding`` is the output projection, too."""

    architecture: Architecture
    token_embedding: FloatArray  # [vocabulary, E]
    layers: tuple[LayerWeights, ...]
    output_norm: FloatArray  # [E]


# The head size and the group of three are SmolLM2's: the same kernels run.
TINY_ARCHITECTURE = Architecture(
    num_layers=2,
    num_heads=6,
    kv_num_heads=2,
    head_size=64,
    embedding_size=48,
    feed_forward_size=96,
    vocabulary_size=259,
    rope_base=100000.0,
    norm_epsilon=1e-5,
)


def tiny_random_weights(seed: int = 0) -> ModelWeights:
    """Reproducible random weights of ``TINY_ARCHITECTURE``, for tests and without a network."""
    sizes = TINY_ARCHITECTURE
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> FloatArray:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        values /= np.float32(np.sqrt(columns))
        return values

    def norm() -> FloatArray:
        return rng.uniform(0.5, 1.5, sizes.embedding_size).astype(np.float32)

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=norm(),
            packed_qkv=matrix(sizes.packed_qkv_size, sizes.embedding_size),
            attention_output=matrix(sizes.embedding_size, sizes.num_heads * sizes.head_size),
            feed_forward_norm=norm(),
            gate_and_up=matrix(2 * sizes.feed_forward_size, sizes.embedding_size),
            down=matrix(sizes.embedding_size, sizes.feed_forward_size),
        )

    return ModelWeights(
        architecture=sizes,
        # Small, or the residual stream would make every token predict itself.
        token_embedding=matrix(sizes.vocabulary_size, sizes.embedding_size) / np.float32(8.0),
        layers=tuple(layer() for _ in range(sizes.num_layers)),
        output_norm=norm(),
    )
