"""Random GroupQueryAttention calls that onnxruntime 1.32 accepts; the same seed, the same call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from oracle import INPUT_NAMES

HEADS = ((1, 1), (3, 3), (4, 2), (6, 2), (7, 1), (8, 1), (9, 3), (5, 5))
HEAD_SIZES = (8, 16, 24, 32, 40, 64, 80, 96, 128)
PHASES = (
    "first_prompt",
    "used_cache_prompt",
    "token_generation",
    "chunk",
    "growing_token",
    "growing_chunk",
    "shared_kv_prompt",
    "shared_kv_token",
    "shared_kv_chunk",
)


@dataclass(frozen=True)
class Configuration:
    """One call: inputs holds all of ORT's input names in ORT's order, None for an absent one."""

    seed: int
    phase: str
    attributes: dict[str, Any]
    inputs: dict[str, np.ndarray | None]
    in_place: bool

    def __str__(self) -> str:
        shapes = " ".join(f"{name}{list(array.shape)}" for name, array in self.inputs.items() if array is not None)
        attributes = " ".join(f"{name}={value}" for name, value in self.attributes.items())
        lengths = " ".join(
            f"{name}={np.ravel(array).tolist()}"
            for name, array in self.inputs.items()
            if array is not None and name in ("seqlens_k", "total_sequence_length")
        )
        place = "in place" if self.in_place else "new present"
        return f"seed {self.seed}: {self.phase} {place} | {lengths} | {attributes} | {shapes}"


@dataclass(frozen=True)
class _Sizes:
    """Lengths of a call; capacity is None without past."""

    batch: int
    new_tokens: int
    kv_tokens: int
    capacity: int | None
    totals: np.ndarray
    total: int

    @property
    def pasts(self) -> np.ndarray:
        if self.new_tokens == self.total:
            return np.zeros_like(self.totals)
        return self.totals - self.new_tokens


def random_configuration(seed: int) -> Configuration:
    """Draws phase, sizes, cache, attributes and optional inputs; float32 query throughout."""
    rng = np.random.default_rng(seed)
    phase = str(rng.choice(PHASES))
    bits = int(rng.choice([0, 4, 8]))
    sizes = _draw_sizes(rng, phase, bits)
    num_heads, kv_num_heads = HEADS[rng.integers(len(HEADS))]
    head_size = int(rng.choice(HEAD_SIZES))
    attributes: dict[str, Any] = {"num_heads": num_heads, "kv_num_heads": kv_num_heads}
    inputs: dict[str, np.ndarray | None] = dict.fromkeys(INPUT_NAMES)

    _draw_tokens(rng, attributes, inputs, sizes, head_size)
    _draw_cache(rng, attributes, inputs, sizes, head_size, bits)
    _draw_rotary(rng, attributes, inputs, sizes, head_size)
    _draw_score_attributes(rng, attributes, head_size, sizes.total)
    if rng.random() < 0.35:
        inputs["attention_bias"] = _draw_bias(rng, attributes, sizes)
    if rng.random() < 0.2:
        inputs["head_sink"] = _normal(rng, num_heads)
    fits_in_place = sizes.capacity is not None and sizes.capacity >= sizes.total
    in_place = fits_in_place and bool(rng.random() < 0.6)
    return Configuration(seed, phase, attributes, inputs, in_place)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _draw_sizes(rng: np.random.Generator, phase: str, bits: int) -> _Sizes:
    batch = 1 if phase.endswith("chunk") else int(rng.integers(1, 5))
    low, high = ((2, 40), (40, 300), (300, 1100))[rng.choice(3, p=[0.55, 0.42, 0.03])]
    total = int(rng.integers(low, high))
    if phase.endswith("prompt"):
        total = new_tokens = int(rng.integers(1, 41))
    elif phase.endswith("chunk"):
        new_tokens = int(rng.integers(2, max(3, min(41, total))))
        total = max(total, new_tokens + 1)
    else:
        new_tokens = 1
    # T is an upper bound: entries may be shorter, all of them too.
    lowest = new_tokens if phase.endswith("chunk") else 1
    totals = rng.integers(lowest, total + 1, batch)
    if rng.random() < 0.5:
        totals[rng.integers(batch)] = total
    capacity: int | None = total + int(rng.integers(0, 2) * rng.integers(1, 20))
    kv_tokens = 0 if phase.startswith("shared_kv") else new_tokens
    if phase.startswith("growing"):
        capacity = total - new_tokens
    elif phase == "first_prompt":
        capacity = None if bits == 0 and rng.random() < 0.7 else 0
    return _Sizes(batch, new_tokens, kv_tokens, capacity, totals, total)


def _draw_tokens(
    rng: np.random.Generator,
    attributes: dict[str, Any],
    inputs: dict[str, np.ndarray | None],
    sizes: _Sizes,
    head_size: int,
) -> None:
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    packed = sizes.kv_tokens > 0 and rng.random() < 0.25
    query_heads = heads + 2 * kv_heads if packed else heads
    inputs["query"] = _normal(rng, sizes.batch, sizes.new_tokens, query_heads * head_size)
    if not packed:
        inputs["key"] = _normal(rng, sizes.batch, sizes.kv_tokens, kv_heads * head_size)
        inputs["value"] = _normal(rng, sizes.batch, sizes.kv_tokens, kv_heads * head_size)
    shapes = ((sizes.batch,), (sizes.batch, 1), (1, sizes.batch))
    shape = shapes[rng.choice(3, p=[0.5, 0.4, 0.1])]
    inputs["seqlens_k"] = (sizes.totals - 1).astype(np.int32).reshape(shape)
    scalar = np.array(sizes.total, np.int32)
    inputs["total_sequence_length"] = scalar if rng.random() < 0.3 else scalar.reshape(1)


def _draw_cache(
    rng: np.random.Generator,
    attributes: dict[str, Any],
    inputs: dict[str, np.ndarray | None],
    sizes: _Sizes,
    head_size: int,
    bits: int,
) -> None:
    """past_key and past_value, their codes over the full range, and the scales."""
    kv_heads = attributes["kv_num_heads"]
    quant_type = str(rng.choice(["PER_TENSOR", "PER_CHANNEL"]))
    if bits:
        attributes.update(k_quant_type=quant_type, v_quant_type=quant_type, kv_cache_bit_width=bits)
    for side in "key", "value":
        if sizes.capacity is not None:
            shape = (sizes.batch, kv_heads, sizes.capacity, head_size)
            if bits == 0:
                inputs[f"past_{side}"] = _normal(rng, *shape)
            elif bits == 8:
                inputs[f"past_{side}"] = rng.integers(-128, 128, shape, np.int8)
            else:
                inputs[f"past_{side}"] = rng.integers(0, 256, (*shape[:3], head_size // 2), np.uint8)
        if bits:
            inputs[f"{side[0]}_scale"] = _draw_scale(rng, quant_type, bits, kv_heads, head_size)


def _draw_scale(rng: np.random.Generator, quant_type: str, bits: int, kv_heads: int, head_size: int) -> np.ndarray:
    """Scales that make codes of unit normals fill the range, or clamp, sometimes negative."""
    shapes: tuple[tuple[int, ...], ...] = ((), (1,))
    if quant_type == "PER_CHANNEL":
        shapes = ((kv_heads * head_size,), (kv_heads, head_size), (1, kv_heads, 1, head_size))
    shape = shapes[rng.integers(len(shapes))]
    widest = 0.03 if bits == 8 else 0.4
    scale = np.asarray(widest * rng.uniform(0.3, 1, shape), np.float32)
    return scale * np.float32(rng.choice([1, -1], p=[0.9, 0.1]))


def _draw_rotary(
    rng: np.random.Generator,
    attributes: dict[str, Any],
    inputs: dict[str, np.ndarray | None],
    sizes: _Sizes,
    head_size: int,
) -> None:
    if head_size % 16 or rng.random() < 0.4:
        return
    attributes.update(do_rotary=1, rotary_interleaved=int(rng.integers(2)))
    half = head_size // 2 if rng.random() < 0.5 else 8 * int(rng.integers(1, head_size // 16 + 1))
    rows = sizes.total + int(rng.integers(0, 6))
    for name in "cos_cache", "sin_cache":
        inputs[name] = rng.uniform(-1, 1, (rows, half)).astype(np.float32)
    if rng.random() < 0.5:
        # With several entries onnxruntime reads wider ids wrongly, except in a first prompt.
        is_prompt = sizes.new_tokens == sizes.total
        spare = int(rng.integers(3)) if sizes.batch == 1 or is_prompt else 0
        ids = rng.integers(0, rows, (sizes.batch, sizes.new_tokens + spare))
        if is_prompt:
            ids[0, 0] = rng.integers(0, rows - sizes.new_tokens + 1)
        inputs["position_ids"] = ids


def _draw_score_attributes(rng: np.random.Generator, attributes: dict[str, Any], head_size: int, total: int) -> None:
    if rng.random() < 0.3:
        sign = rng.choice([1, -1], p=[0.8, 0.2])
        attributes["scale"] = float(sign * rng.uniform(0.3, 2) / np.sqrt(head_size))
    if rng.random() < 0.15:
        attributes["causal"] = 0
    elif rng.random() < 0.35:
        attributes["local_window_size"] = int(rng.integers(1, total + 3))
    if rng.random() < 0.2:
        attributes["softcap"] = float(rng.uniform(0.5, 5))
    if rng.random() < 0.2:
        attributes["smooth_softmax"] = 1
    if rng.random() < 0.25:
        attributes["qk_output"] = int(rng.integers(1, 3))


def _draw_bias(rng: np.random.Generator, attributes: dict[str, Any], sizes: _Sizes) -> np.ndarray:
    """Random bias, half the time with masking entries that leave each row its last visible key."""
    batch = sizes.batch if rng.random() < 0.5 else 1
    heads = attributes["num_heads"] if rng.random() < 0.5 else 1
    bias = _normal(rng, batch, heads, sizes.new_tokens, sizes.total)
    if rng.random() < 0.5:
        masked = rng.random(bias.shape) < 0.3
        for b, s in np.ndindex(sizes.batch, sizes.new_tokens):
            last = sizes.totals[b] - 1
            if attributes.get("causal", 1):
                last = min(last, sizes.pasts[b] + s)
            masked[b % batch, :, s, last] = False
        bias[masked] = -np.inf
    return bias
