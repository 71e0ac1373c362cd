"""The operator against the float64 reference and live onnxruntime on random calls of all phases and features.

`make parity` runs many more of them, others each day.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from parity import difference
from random_configurations import PHASES, STRATEGIES, random_configuration
from shrink import find_mismatch, program, shrink

SEED = os.environ.get("GQA_TVM_PARITY_SEED")
CALLS = int(os.environ.get("GQA_TVM_PARITY_CALLS", 300))
CHUNK = 10


def _configuration(index: int):
    return random_configuration([int(SEED or 0), index], wide=SEED is not None)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CALLS, CHUNK))
def test_random_configurations(first: int) -> None:
    for index in range(first, min(first + CHUNK, CALLS)):
        configuration = _configuration(index)
        mismatch = find_mismatch(configuration)
        if mismatch is not None:
            small = shrink(configuration, mismatch)
            again = find_mismatch(small) or mismatch
            raise AssertionError(
                f"GQA_TVM_PARITY_SEED={SEED}, call {index}: {mismatch}\n{configuration}\n"
                f"Shrunk, {again}\n{small}\n\n{program(small, again)}"
            )


def test_the_calls_cover_every_phase_and_feature() -> None:
    configurations = [random_configuration([0, index]) for index in range(300)]
    drawn = {(name, value) for c in configurations for name, value in vars(c).items()}
    wanted: dict[str, tuple[object, ...]] = {
        "phase": PHASES,
        "strategy": STRATEGIES,
        "query": ("float32", "float16", "bfloat16"),
        "cache": ("float32", "float16", "bfloat16", "int8", "uint8"),
        "qk_output": (0, 1, 2),
        "causal": (0, 1),
        "bias": ("", "1", "B", "N", "BN"),
        "seqlens_shape": (0, 1, 2),
    }
    flags = ("smooth", "sink", "bias_masks", "packed", "norm", "interleaved", "per_channel", "negative_scale")
    wanted |= dict.fromkeys((*flags, "stale_nan", "in_place"), (False, True))
    assert {(name, value) for name, values in wanted.items() for value in values} <= drawn
    facts = {
        "scale": any(c.scale < 0 for c in configurations),
        "softcap": any(c.softcap for c in configurations),
        "window": any(c.window > 0 and not c.sliding for c in configurations),
        "partial rotary": any(0 < 2 * c.rotary < c.head_size for c in configurations),
        "position_ids": any(c.position_columns and c.rotary for c in configurations),
        "ragged prompt": any(c.is_prompt and min(c.totals) < c.total for c in configurations),
        "idle entry": any(c.counts and 0 in c.counts for c in configurations),
        "more tokens than rows": any(c.sliding and c.new_tokens > (c.capacity or 0) for c in configurations),
        "T below the totals": any(c.total < max(c.totals) for c in configurations),
        "several chunks of keys": any(c.total > 1024 for c in configurations),
        "several blocks of rows": any(c.new_tokens * c.group > 96 for c in configurations),
    }
    assert not [name for name, holds in facts.items() if not holds]


def test_most_calls_are_compared_with_onnxruntime() -> None:
    rules = [difference(random_configuration([0, index])) for index in range(300)]
    assert rules.count(None) > 200
    assert {"#D2", "#D4", "#D6", "#D7", "#D9"} <= set(rules)


@pytest.mark.parametrize("index", range(5))
def test_the_same_seed_is_the_same_call(index: int) -> None:
    first, second = (random_configuration([3, index]).draw() for _ in range(2))
    assert first.attributes == second.attributes
    for name, array in first.inputs.items():
        other = second.inputs[name]
        assert (array is None and other is None) or array.tobytes() == other.tobytes()


def test_results_do_not_depend_on_the_strategy() -> None:
    """The same call by every strategy: caches equal, outputs within the contract."""
    calls = [c for c in (random_configuration([1, index]) for index in range(60)) if not c.qk_output and c.bits == 8]
    for configuration in calls[:8]:
        for strategy in STRATEGIES:
            assert find_mismatch(replace(configuration, strategy=strategy)) is None, (strategy, configuration)
