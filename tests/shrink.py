"""A failing configuration made small, and as a program that shows the failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
from configuration import Configuration
from parity import Mismatch, NotACall, Operate, check, run_operator

LINE = 120
ATTEMPTS = 400
_HEAD_SIZES = (8, 16, 32, 64)
# What is made smaller, not dropped.
_SIZES = {
    *("seed", "query", "cache", "kv_heads", "group", "head_size"),
    *("new_tokens", "total", "totals", "capacity", "sliding"),
}
_COMPARISONS = {
    "output": "print(np.abs(got.output.astype(float) - wanted.output).max())",
    "output_qk": "print(np.abs(got.output_qk.astype(float) - wanted.output_qk).max())",
    "present_key": "print((got.present_key != wanted.present_key).sum())",
    "present_value": "print((got.present_value != wanted.present_value).sum())",
}


def find_mismatch(configuration: Configuration, operate: Operate = run_operator) -> Mismatch | None:
    """The operator's mismatch; None where it is right, or the configuration is no call."""
    try:
        check(configuration, operate)
    except Mismatch as mismatch:
        return mismatch
    except NotACall:
        pass
    return None


def shrink(configuration: Configuration, mismatch: Mismatch, operate: Operate = run_operator) -> Configuration:
    """The smallest configuration found that is wrong in the same output by the same judge."""

    def fails(candidate: Configuration) -> bool:
        found = find_mismatch(candidate, operate)
        return found is not None and (found.name, found.wanted_by) == (mismatch.name, mismatch.wanted_by)

    return shrink_while(configuration, fails)


def shrink_while(configuration: Configuration, fails: Callable[[Configuration], bool]) -> Configuration:
    """Takes any simpler configuration that still fails, until there is none."""
    tried = {configuration}
    while len(tried) < ATTEMPTS:
        for candidate in _simpler(configuration):
            if candidate not in tried:
                tried.add(candidate)
                if fails(candidate):
                    configuration = candidate
                    break
        else:
            break
    return configuration


def _simpler(c: Configuration) -> Iterator[Configuration]:
    """Candidates, large steps first; some are no calls."""
    for changes in (*_simpler_options(c), *_simpler_batch(c), *_simpler_lengths(c), *_simpler_heads(c)):
        yield replace(c, **changes)


def _simpler_options(c: Configuration) -> Iterator[dict[str, Any]]:
    if c.sliding:
        yield {"sliding": False, "window": -1, "capacity": max(c.total, *c.totals)}
    is_float = c.bits == 0
    if c.query != "float32":
        yield {"query": "float32", "cache": "float32" if is_float else c.cache}
    if c.cache != c.query:
        yield {"cache": c.query}
    for field in fields(c):
        if field.name not in _SIZES and getattr(c, field.name) != field.default:
            yield {field.name: field.default}
    yield from ({name: 1.0} for name in ("scale", "softcap") if getattr(c, name) not in (0, 1))
    if c.window > 1:
        yield from ({"window": window} for window in (1, c.window // 2, c.window - 1))
    if c.rotary > 1:
        yield {"rotary": min(8, c.rotary - 1)}
    if c.position_columns > c.new_tokens:
        yield {"position_columns": c.new_tokens}
    if len(c.bias) > 1:
        yield from ({"bias": axes} for axes in ("1", *c.bias))


def _simpler_batch(c: Configuration) -> Iterator[dict[str, Any]]:
    if c.batch == 1:
        return
    for b in range(c.batch):
        yield {"totals": c.totals[b : b + 1], "counts": c.counts and c.counts[b : b + 1]}
    yield {"totals": c.totals[1:], "counts": c.counts and c.counts[1:]}


def _simpler_lengths(c: Configuration) -> Iterator[dict[str, Any]]:
    yield from (_with_tokens(c, c.new_tokens - fewer) for fewer in _steps(c.new_tokens - 1))
    yield from (_with_less_past(c, fewer) for fewer in _steps(int(c.pasts.max())))
    if max(c.totals) < c.total and not c.is_prompt:
        yield {"total": max(c.totals)}
    if min(c.totals) < c.total and c.counts is None:
        yield {"totals": (c.total,) * c.batch}
    if c.capacity is not None:
        yield {"capacity": None}
        least = c.window if c.sliding else 0
        yield from ({"capacity": c.capacity - fewer} for fewer in _steps(c.capacity - least))


def _steps(most: int) -> list[int]:
    """What to take away: all, a half, a quarter, ..., 1."""
    return [most >> bit for bit in range(most.bit_length())]


def _with_tokens(c: Configuration, new_tokens: int) -> dict[str, Any]:
    """The same past and fewer new tokens."""
    changes: dict[str, Any] = {"new_tokens": new_tokens}
    counts = np.full(c.batch, new_tokens) if c.counts is None else np.minimum(c.counts, new_tokens)
    if c.is_prompt and not c.sliding:
        totals = np.minimum(c.totals, new_tokens)
    else:
        totals = c.pasts + counts
    if c.counts is not None:
        changes["counts"] = tuple(counts.tolist())
    if c.position_columns:
        changes["position_columns"] = c.position_columns - c.new_tokens + new_tokens
    total = new_tokens if c.is_prompt else max(c.total - c.new_tokens + new_tokens, new_tokens, int(totals.max()))
    return changes | {"totals": tuple(totals.tolist()), "total": total}


def _with_less_past(c: Configuration, fewer: int) -> dict[str, Any]:
    """The same new tokens behind fewer keys."""
    counts = (c.new_tokens,) * c.batch if c.counts is None else c.counts
    totals = tuple(max(total - fewer, count, 1) for total, count in zip(c.totals, counts, strict=True))
    total = c.total if c.is_prompt else max(c.total - fewer, c.new_tokens, *totals)
    capacity = c.capacity
    if capacity is not None and not c.sliding:
        capacity = max(capacity - fewer, 0)
    return {"totals": totals, "total": total, "capacity": capacity}


def _simpler_heads(c: Configuration) -> Iterator[dict[str, Any]]:
    yield from ({"kv_heads": heads} for heads in range(1, c.kv_heads))
    yield from ({"group": group} for group in sorted({1, 2, c.group - 1}) if 1 <= group < c.group)
    for head_size in _HEAD_SIZES:
        if head_size < c.head_size:
            yield {"head_size": head_size, "rotary": min(c.rotary, head_size // 2)}


def program(configuration: Configuration, mismatch: Mismatch) -> str:
    """Python that runs the call and prints how far it is off; with onnxruntime as judge it needs tests/ on the path."""
    attributes, sources = configuration.attributes(), configuration.sources()
    for name in "key", "value", "past_key", "past_value":
        sources.setdefault(name, "None")
    place = f", in_place={configuration.in_place}" if configuration.in_place else ""
    if mismatch.wanted_by == "reference":
        imports = ["from gqa_tvm import GroupQueryAttention, reference"]
        wanted = f"wanted = reference.group_query_attention(**inputs, **attributes{place})"
    else:
        imports = ["from gqa_tvm import GroupQueryAttention", "from oracle import run_onnxruntime"]
        wanted = f"wanted = run_onnxruntime(attributes, inputs{place})"
    strategy = "" if configuration.strategy == "auto" else f', strategy="{configuration.strategy}"'
    present = ', present_key=inputs["past_key"], present_value=inputs["past_value"]' if configuration.in_place else ""
    needs_bfloat16 = "bfloat16" in (configuration.query, configuration.cache)
    return "\n".join(
        [
            *(["import ml_dtypes"] if needs_bfloat16 else []),
            "import numpy as np",
            *imports,
            f"rng = np.random.default_rng({configuration.seed})",
            *_packed("attributes = dict(", attributes),
            *_packed("inputs = dict(", sources),
            wanted,
            f"got = GroupQueryAttention(**attributes{strategy})(**inputs{present})",
            *([_COMPARISONS[mismatch.name]] if mismatch.name in _COMPARISONS else []),
        ]
    )


def _packed(start: str, arguments: dict[str, Any]) -> list[str]:
    """A call of keyword arguments on as few lines as they fit."""
    lines = [start]
    for name, value in arguments.items():
        argument = f"{name}={value}, " if start.startswith("inputs") else f"{name}={value!r}, "
        if len(lines[-1] + argument) > LINE and lines[-1] != start:
            lines.append("    ")
        lines[-1] += argument
    lines[-1] = lines[-1].rstrip(", ") + ")"
    return [line.rstrip() for line in lines]
