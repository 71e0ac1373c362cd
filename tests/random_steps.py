"""Random padded chunks and sliding window steps that onnxruntime 1.32 accepts; the same seed, the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

HEADS = ((1, 1), (4, 2), (6, 2), (7, 1), (5, 5))
CACHES = ("float", "int8", "int4")


@dataclass(frozen=True)
class Step:
    """One call with query_seqlens, a sliding window cache or both; retained [B] rows are promised of
    present, counts [B] rows of the output."""

    attributes: dict[str, Any]
    inputs: dict[str, Any]
    in_place: bool
    counts: np.ndarray
    retained: np.ndarray
    features: frozenset[str]

    def __str__(self) -> str:
        lengths = {name: self.inputs[name].tolist() for name in ("seqlens_k", "total_sequence_length")}
        shapes = {name: (array.dtype.name, array.shape) for name, array in self.inputs.items()}
        return f"{self.attributes} {lengths} counts {self.counts} {shapes} {self.in_place=}"


def random_step(seed: int, dtype: type[np.floating[Any]] = np.float32) -> Step:
    """Draws lengths, cache, attributes and optional inputs; dtype is the query's and a float cache's."""
    rng = np.random.default_rng([seed, 1])
    sliding, padded = ((True, False), (True, True), (False, True))[seed % 3]
    cache = CACHES[rng.integers(3)]
    heads, kv_heads = HEADS[rng.integers(len(HEADS))]
    head_size = int(rng.choice([32, 64, 96] if cache == "int4" and sliding else [16, 32, 48, 80]))
    window = int(rng.integers(1, 9))
    capacity = window + int(rng.integers(0, 2) * rng.integers(1, 12)) if sliding else 40
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads}
    if sliding:
        attributes |= {"sliding_window_cache": 1, "local_window_size": window}
    elif rng.random() < 0.5:
        attributes["local_window_size"] = window

    batch, new_tokens, totals, counts, total = _draw_lengths(rng, padded)
    lengths = {"seqlens_k": (totals - 1).astype(np.int32), "total_sequence_length": np.array([total], np.int32)}
    if padded:
        lengths["query_seqlens"] = counts.astype(np.int32)
    hidden = {"query": heads, "key": kv_heads, "value": kv_heads}
    inputs: dict[str, Any] = {
        name: rng.standard_normal((batch, new_tokens, n * head_size)).astype(dtype) for name, n in hidden.items()
    }
    if rng.random() < 0.25:
        inputs = {"query": np.concatenate(list(inputs.values()), axis=2)}
    inputs |= lengths | _draw_cache(rng, attributes, cache, (batch, kv_heads, capacity, head_size), dtype)
    _draw_scores(rng, attributes, inputs, (batch, new_tokens, int(totals.max()), total), dtype)
    _draw_rotary(rng, attributes, inputs, (batch, new_tokens, max(total, int(totals.max()))), head_size, dtype)
    facts = {
        f"{sliding=} {padded=}": True,
        "idle entry": not counts.all(),
        "more tokens than capacity": sliding and new_tokens > capacity,
        "T below the totals": total < totals.max(),
        "packed": "key" not in inputs,
    }
    features = {cache, *attributes, *inputs, *(name for name, holds in facts.items() if holds)}
    retained = totals if not sliding else np.array([_retained(int(t), capacity, window) for t in totals])
    in_place = capacity >= total or sliding
    in_place = in_place and bool(rng.random() < 0.5)
    return Step(attributes, inputs, in_place, counts, retained, frozenset(features))


def _retained(total: int, capacity: int, window: int) -> int:
    """Fills row by row; a full cache keeps its window before the next row comes."""
    rows = 0
    for _ in range(total):
        rows = (window - 1 if rows == capacity else rows) + 1
    return rows


def _draw_lengths(rng: np.random.Generator, padded: bool) -> tuple[int, int, np.ndarray, np.ndarray, int]:
    """(B, S, totals, counts, T). Without query_seqlens several tokens need one entry or S == T, and
    T is no bound."""
    batch = int(rng.integers(1, 4))
    new_tokens = int(rng.choice([1, 2, 3, 7, 20]))
    counts = np.full(batch, new_tokens)
    if padded:
        counts = rng.integers(0, new_tokens + 1, batch)
        pasts = np.maximum(rng.integers(0, 20, batch), counts == 0)
        totals = pasts + counts
        return batch, new_tokens, totals, counts, max(new_tokens, int(totals.max())) + int(rng.integers(0, 3))
    is_prompt = rng.random() < 0.4
    batch = batch if is_prompt or new_tokens == 1 else 1
    totals = rng.integers(0, 25, batch) * (not is_prompt or rng.random() < 0.4) + new_tokens
    total = new_tokens if is_prompt else int(rng.choice([totals.max(), rng.integers(1, 25)], p=[0.8, 0.2]))
    return batch, new_tokens, totals, counts[:batch], total


def _draw_cache(
    rng: np.random.Generator,
    attributes: dict[str, Any],
    cache: str,
    shape: tuple[int, int, int, int],
    dtype: type[np.floating[Any]],
) -> dict[str, Any]:
    if cache == "float":
        return {name: rng.standard_normal(shape).astype(dtype) for name in ("past_key", "past_value")}
    quant_type = str(rng.choice(["PER_TENSOR", "PER_CHANNEL"]))
    bits = int(cache[-1])
    attributes |= {"k_quant_type": quant_type, "v_quant_type": quant_type, "kv_cache_bit_width": bits}
    steps = shape[1] * shape[3] if quant_type == "PER_CHANNEL" else 1
    drawn: dict[str, Any] = {}
    for name in "key", "value":
        codes = rng.integers(0, 256, (*shape[:3], shape[3] * bits // 8), np.uint8)
        drawn[f"past_{name}"] = codes if bits == 4 else codes.view(np.int8)
        drawn[f"{name[0]}_scale"] = (rng.uniform(0.3, 1, steps) * (0.03 if bits == 8 else 0.4)).astype(np.float32)
    return drawn


def _draw_scores(
    rng: np.random.Generator,
    attributes: dict[str, Any],
    inputs: dict[str, Any],
    lengths: tuple[int, int, int, int],
    dtype: type[np.floating[Any]],
) -> None:
    batch, new_tokens, longest, total = lengths
    heads = attributes["num_heads"]
    if rng.random() < 0.25:
        attributes["softcap"] = float(rng.uniform(0.5, 5))
    if rng.random() < 0.2:
        attributes["smooth_softmax"] = 1
    if rng.random() < 0.25:
        inputs["head_sink"] = rng.standard_normal(heads).astype(dtype)
    if longest <= total and rng.random() < 0.4:
        shape = (int(rng.choice([1, batch])), int(rng.choice([1, heads])), new_tokens, total)
        inputs["attention_bias"] = rng.standard_normal(shape).astype(dtype)
    if "sliding_window_cache" not in attributes and rng.random() < 0.3:
        attributes["qk_output"] = int(rng.integers(1, 3))


def _draw_rotary(
    rng: np.random.Generator,
    attributes: dict[str, Any],
    inputs: dict[str, Any],
    lengths: tuple[int, int, int],
    head_size: int,
    dtype: type[np.floating[Any]],
) -> None:
    if rng.random() < 0.4:
        return
    batch, new_tokens, longest = lengths
    attributes |= {"do_rotary": 1, "rotary_interleaved": int(rng.integers(2))}
    half = 8 * int(rng.integers(1, head_size // 16 + 1))
    rows = max(longest, new_tokens) + 2
    for name in "cos_cache", "sin_cache":
        inputs[name] = rng.uniform(-1, 1, (rows, half)).astype(dtype)
    if rng.random() < 0.4:
        inputs["position_ids"] = rng.integers(0, rows - new_tokens + 1, (batch, new_tokens))
