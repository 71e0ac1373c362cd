"""Random configurations over all phases and features; the same seed, the same configuration."""

from __future__ import annotations

from typing import Any

import numpy as np
from configuration import Configuration

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
    "padded_chunk",
    "sliding_prompt",
    "sliding_token",
    "sliding_chunk",
    "sliding_padded_chunk",
)
STRATEGIES = ("auto", "naive", "flash", "flash_decoding")
# Groups by head size. Every pair of dtypes, head size and group is kernels to compile, so there are few of them.
Groups = dict[int, tuple[int, ...]]
_NARROW: Groups = {8: (1,), 16: (1, 2), 64: (1, 2), 128: (2,)}
_WIDE: Groups = _NARROW | {24: (7,), 40: (3,), 80: (5,), 96: (8,), 256: (4,)}
# (query, cache, groups); onnxruntime has all of these.
Formats = tuple[tuple[str, str, Groups], ...]
_SHARED: Formats = (
    *(("float32", cache, _NARROW) for cache in ("float32", "int8", "uint8")),
    *(("float16", cache, {64: (2,)}) for cache in ("float16", "int8", "uint8")),
    ("float32", "int8", {16: (7, 9)}),
)
_SHARED_WIDE: Formats = (
    *(("float32", cache, _WIDE) for cache in ("float32", "int8", "uint8")),
    *(("float16", cache, _NARROW) for cache in ("float16", "int8", "uint8")),
    ("float32", "int8", {16: (7, 9)}),
)
# These only the reference has; q/k norm comes on top.
_OWN: Formats = (
    *(("bfloat16", cache, {16: (2,)}) for cache in ("bfloat16", "int8", "uint8")),
    *(("float16", cache, {64: (2,)}) for cache in ("float16", "int8")),
    ("float32", "float16", {16: (2,)}),
    ("float16", "float32", {64: (2,)}),
    ("bfloat16", "float32", {16: (2,)}),
    ("float32", "float32", {7: (1,), 16: (2,), 64: (2,)}),
    ("float32", "int8", {7: (1,), 16: (2,), 64: (2,)}),
    ("float32", "uint8", {7: (1,), 16: (2,), 33: (2,), 64: (2,)}),
)


def random_configuration(seed: int | list[int], *, wide: bool = False, own: bool | None = None) -> Configuration:
    """Draws a configuration that is valid for the operator, and for onnxruntime 1.32 where `own` is False.

    own: whether it is of the share that onnxruntime cannot run, None = one in five. wide: more head sizes and groups.
    """
    rng = np.random.default_rng(seed)
    is_own = bool(rng.random() < 0.2) if own is None else own
    formats = _OWN if is_own else _SHARED_WIDE if wide else _SHARED
    query, cache, groups = formats[rng.integers(len(formats))]
    phase = PHASES[rng.integers(len(PHASES))]
    sliding = phase.startswith("sliding")
    head_size = int(rng.choice(_head_sizes(groups, cache, sliding and not is_own)))
    drawn = {
        "seed": int(rng.integers(2**31)),
        "phase": phase,
        "query": query,
        "cache": cache,
        "head_size": head_size,
        "group": int(rng.choice(groups[head_size])),
        "kv_heads": int(rng.choice([1, 2, 3])),
    }
    # Without past onnxruntime does not know the type of codes, and a float cache has the query's.
    may_lack_past = cache == query or (is_own and cache in ("int8", "uint8"))
    drawn |= _draw_sliding_lengths(rng, phase) if sliding else _draw_lengths(rng, phase, may_lack_past)
    drawn |= _draw_scores(rng, drawn) | _draw_tokens(rng, drawn, is_own) | _draw_cache(rng, drawn, is_own)
    return Configuration(**drawn)


def _chance(rng: np.random.Generator, probability: float) -> bool:
    return bool(rng.random() < probability)


def _head_sizes(groups: Groups, cache: str, for_oracle: bool) -> list[int]:
    """onnxruntime's sliding windows need wider heads for codes."""
    multiple = {"int8": 16, "uint8": 32}.get(cache, 1) if for_oracle else 1
    return [size for size in groups if size % multiple == 0] or [64]


def _draw_lengths(rng: np.random.Generator, phase: str, may_lack_past: bool) -> dict[str, Any]:
    """Lengths of a cache that keeps every key."""
    if phase == "padded_chunk":
        return _draw_padded_lengths(rng)
    low, high = ((2, 40), (40, 300), (300, 2500))[rng.choice(3, p=[0.55, 0.41, 0.04])]
    total = int(rng.integers(low, high))
    batch = 1 if phase.endswith("chunk") else int(rng.integers(1, 5))
    new_tokens = 1
    if phase.endswith("prompt"):
        total = new_tokens = _draw_new_tokens(rng)
    elif phase.endswith("chunk"):
        new_tokens = int(rng.integers(2, max(3, min(120, total))))
        total = max(total, new_tokens + 1)
    # T is an upper bound: entries may be shorter, all of them too.
    totals = rng.integers(new_tokens if phase.endswith("chunk") else 1, total + 1, batch)
    if _chance(rng, 0.5):
        totals[rng.integers(batch)] = total
    capacity: int | None = total + int(rng.integers(0, 2) * rng.integers(1, 20))
    if phase.startswith("growing"):
        capacity = total - new_tokens
    elif phase == "first_prompt":
        capacity = None if may_lack_past and _chance(rng, 0.7) else 0
    return {
        "new_tokens": new_tokens,
        "total": total,
        "totals": tuple(totals.tolist()),
        "capacity": capacity,
        "shared_kv": phase.startswith("shared_kv"),
        "in_place": capacity is not None and capacity >= total and _chance(rng, 0.5),
    }


def _draw_new_tokens(rng: np.random.Generator) -> int:
    return int(rng.integers(*((1, 41), (41, 130))[rng.choice(2, p=[0.85, 0.15])]))


def _draw_counts(rng: np.random.Generator, batch: int, new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(counts, totals) of entries with query padding; one without new tokens has a past."""
    counts = rng.integers(0, new_tokens + 1, batch)
    if _chance(rng, 0.3):
        counts[rng.integers(batch)] = 0
    longest = int(rng.choice([20, 150], p=[0.7, 0.3]))
    return counts, np.maximum(rng.integers(0, longest, batch), counts == 0) + counts


def _draw_padded_lengths(rng: np.random.Generator) -> dict[str, Any]:
    batch, new_tokens = int(rng.integers(1, 4)), _draw_new_tokens(rng)
    counts, totals = _draw_counts(rng, batch, new_tokens)
    pasts = totals - counts
    needed = int(pasts.max()) + new_tokens
    total = max(new_tokens, int(totals.max())) + int(rng.integers(0, 3))
    capacity = max(total, needed) + int(rng.integers(0, 2) * rng.integers(1, 12))
    if _chance(rng, 0.3):
        # The cache grows by the padded chunk.
        capacity, total = int(pasts.max()), max(total, needed)
    return {
        "new_tokens": new_tokens,
        "total": total,
        "totals": tuple(totals.tolist()),
        "counts": tuple(counts.tolist()),
        "capacity": capacity,
        "in_place": capacity >= total and _chance(rng, 0.5),
    }


def _draw_sliding_lengths(rng: np.random.Generator, phase: str) -> dict[str, Any]:
    """Lengths of a window; without query_seqlens several tokens need one entry or S == T, and T is no bound."""
    window = int(rng.integers(1, 9)) if _chance(rng, 0.7) else int(rng.integers(9, 100))
    capacity = window + int(rng.integers(0, 2) * rng.integers(1, 12))
    lengths: dict[str, Any] = {"sliding": True, "window": window, "capacity": capacity, "in_place": _chance(rng, 0.5)}
    new_tokens = 1 if phase == "sliding_token" else int(rng.choice([2, 3, 7, 20, 33, 110]))
    if phase == "sliding_padded_chunk":
        counts, totals = _draw_counts(rng, int(rng.integers(1, 4)), new_tokens)
        total = max(new_tokens, int(totals.max())) + int(rng.integers(0, 3))
        lengths["counts"] = tuple(counts.tolist())
    else:
        batch = 1 if phase == "sliding_chunk" else int(rng.integers(1, 4))
        longest = int(rng.choice([25, 200]))
        pasts = rng.integers(0, longest, batch)
        if phase == "sliding_prompt" and _chance(rng, 0.6):
            pasts[:] = 0
        totals = pasts + new_tokens
        total = int(totals.max()) if _chance(rng, 0.8) else int(rng.integers(1, longest))
        if phase == "sliding_prompt":
            total = new_tokens
    return lengths | {"new_tokens": new_tokens, "total": total, "totals": tuple(totals.tolist())}


def _draw_scores(rng: np.random.Generator, drawn: dict[str, Any]) -> dict[str, Any]:
    scores: dict[str, Any] = {"smooth": _chance(rng, 0.2), "sink": _chance(rng, 0.2)}
    if _chance(rng, 0.3):
        factor = float(rng.choice([1, -1], p=[0.8, 0.2]) * rng.uniform(0.3, 2))
        scores["scale"] = round(factor / drawn["head_size"] ** 0.5, 3)
    if _chance(rng, 0.2):
        scores["softcap"] = round(float(rng.uniform(0.5, 5)), 2)
    total = drawn["total"]
    if not drawn.get("sliding"):
        if _chance(rng, 0.15) and "counts" not in drawn:
            scores["causal"] = 0
        elif _chance(rng, 0.35):
            scores["window"] = int(rng.integers(1, total + 3))
        if _chance(rng, 0.25):
            scores["qk_output"] = int(rng.integers(1, 3))
    if max(drawn["totals"]) <= total and _chance(rng, 0.35):
        scores["bias"] = str(rng.choice(["1", "B", "N", "BN"]))
        scores["bias_masks"] = _chance(rng, 0.5)
    if not scores.get("qk_output") and _chance(rng, 0.35):
        scores["strategy"] = str(rng.choice(STRATEGIES[1:]))
    return scores


def _draw_tokens(rng: np.random.Generator, drawn: dict[str, Any], is_own: bool) -> dict[str, Any]:
    tokens: dict[str, Any] = {
        "packed": not drawn.get("shared_kv") and _chance(rng, 0.25),
        "seqlens_shape": int(rng.choice(3, p=[0.5, 0.4, 0.1])),
    }
    head_size = drawn["head_size"]
    if is_own and _chance(rng, 0.4):
        tokens["norm"] = True
        tokens["q_epsilon"] = 0.5 if _chance(rng, 0.3) else None
    if _chance(rng, 0.4) or (head_size % 16 and not is_own):
        return tokens
    # onnxruntime rotates a multiple of 16 columns.
    half = int(rng.integers(1, head_size // 2 + 1)) if is_own else 8 * int(rng.integers(1, head_size // 16 + 1))
    tokens["rotary"] = half if _chance(rng, 0.5) else head_size // 2
    tokens["interleaved"] = _chance(rng, 0.5)
    if _chance(rng, 0.5):
        tokens["position_columns"] = drawn["new_tokens"] + int(rng.integers(3) * rng.integers(2))
    return tokens


def _draw_cache(rng: np.random.Generator, drawn: dict[str, Any], is_own: bool) -> dict[str, Any]:
    if drawn["cache"] not in ("int8", "uint8"):
        return {"stale_nan": is_own and _chance(rng, 0.4)}
    return {
        "per_channel": _chance(rng, 0.5),
        "scale_shape": int(rng.integers(3)),
        "negative_scale": _chance(rng, 0.1),
    }
