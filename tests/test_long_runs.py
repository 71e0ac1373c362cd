"""The same tokens in any steps: the same bytes in the cache, the same output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from operator_calls import CACHES, add_rotary, assert_close, first_of, make_call

from gqa_tvm import GroupQueryAttention
from gqa_tvm.sliding_window import can_rewind, retained_length

TOKENS, HEAD_SIZE = 500, 64
CAPACITY, WINDOW = 100, 64
STORED = ("f32", "i8", "i4")
SLIDING = {"sliding_window_cache": 1, "local_window_size": WINDOW}
CLOSE = 1e-6
ONES = (1,) * TOKENS
SEVENS = (7,) * 71 + (3,)
MIXED = (130, 1, 1, 64, 7, 100, 36, 1, 90, 70)


@lru_cache(maxsize=16)
def sequence(cache: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(attributes, inputs) of a first prompt of TOKENS rotated tokens."""
    attributes, inputs = make_call(cache, tokens=TOKENS, total=TOKENS, capacity=TOKENS, seed=seed)
    add_rotary(attributes, inputs)
    return attributes, inputs


def empty_cache(cache: str, capacity: int) -> dict[str, np.ndarray]:
    """Past arrays whose rows must not matter: NaN, or codes of 1 bits."""
    past = sequence(cache)[1]["past_key"][:, :, :1]
    shape = (1, past.shape[1], capacity, past.shape[3])
    side = np.full(shape, np.nan, np.float32) if cache == "f32" else np.full(shape, -1, np.int8).view(past.dtype)
    return {"past_key": side, "past_value": side.copy()}


def step_inputs(inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The tokens [begin, end) of a sequence, as one step of it."""
    step = {name: inputs[name] for name in ("cos_cache", "sin_cache", "k_scale", "v_scale") if name in inputs}
    step.update({name: inputs[name][:, begin:end] for name in ("query", "key", "value")})
    step["seqlens_k"] = np.array([end - 1], np.int32)
    step["total_sequence_length"] = np.array([end], np.int32)
    return step


def run_steps(
    cache: str, steps: Sequence[int], past: dict[str, np.ndarray], begin: int = 0, seed: int = 0, **attributes: Any
) -> np.ndarray:
    """Output [sum(steps), N*H] of consecutive steps from `begin` on, in place in `past`."""
    usual, inputs = sequence(cache, seed)
    op = GroupQueryAttention(**{**usual, **attributes})
    present = {name.replace("past", "present"): array for name, array in past.items()}
    outputs = []
    for length in steps:
        step = step_inputs(inputs, begin, begin + length)
        outputs.append(op(**step, **past, **present).output[0])
        begin += length
    return np.concatenate(outputs)


def run_padded(cache: str, past: dict[str, np.ndarray], **attributes: Any) -> np.ndarray:
    """Output [TOKENS, N*H] of chunks of 8 rows, of which 0 to 8 count; the padding is NaN."""
    usual, inputs = sequence(cache)
    op = GroupQueryAttention(**{**usual, **attributes})
    present = {name.replace("past", "present"): array for name, array in past.items()}
    rng = np.random.default_rng(1)
    begin, outputs = 1, [run_steps(cache, [1], past, **attributes)]
    while begin < TOKENS:
        count = min(int(rng.integers(0, 9)), TOKENS - begin)
        step = step_inputs(inputs, begin, begin + count)
        for name in ("query", "key", "value"):
            padded = np.full((1, 8, step[name].shape[2]), np.nan, np.float32)
            padded[:, :count] = step[name]
            step[name] = padded
        # The last chunks' padding may not fit behind the valid tokens.
        step["total_sequence_length"] = np.array([min(TOKENS, max(begin + count, 8))], np.int32)
        step["query_seqlens"] = np.array([count], np.int32)
        output = op(**step, **past, **present).output[0]
        assert not output[count:].any()
        outputs.append(output[:count])
        begin += count
    return np.concatenate(outputs)


@lru_cache(maxsize=16)
def one_shot(cache: str, window: int = -1) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(output, cache) of the whole sequence as one prompt into a cache of TOKENS rows."""
    past = empty_cache(cache, TOKENS)
    return run_steps(cache, [TOKENS], past, local_window_size=window), past


def assert_same_rows(past: dict[str, np.ndarray], wanted: dict[str, np.ndarray], rows: slice) -> None:
    """The first rows of the cache are these rows of a full cache."""
    for name, array in wanted.items():
        kept = array[:, :, rows]
        np.testing.assert_array_equal(past[name][:, :, : kept.shape[2]], kept, err_msg=name)


# --- full cache ---


@pytest.mark.parametrize("steps", [ONES, SEVENS, MIXED], ids=["1", "7", "mixed"])
@pytest.mark.parametrize("cache", first_of(STORED))
def test_steps_leave_the_bytes_of_one_prompt(cache: str, steps: Sequence[int]) -> None:  # B68
    wanted, full = one_shot(cache)
    past = empty_cache(cache, TOKENS)
    assert_close(run_steps(cache, steps, past), wanted, CLOSE)
    assert_same_rows(past, full, np.s_[:TOKENS])


@pytest.mark.parametrize("cache", STORED)
def test_padded_chunks_leave_the_bytes_of_one_prompt(cache: str) -> None:
    wanted, full = one_shot(cache)
    past = empty_cache(cache, TOKENS + 8)
    assert_close(run_padded(cache, past), wanted, CLOSE)
    assert_same_rows(past, full, np.s_[:TOKENS])
    untouched = empty_cache(cache, 8)
    np.testing.assert_array_equal(past["past_key"][:, :, TOKENS:], untouched["past_key"])


@pytest.mark.parametrize("steps", [ONES[:60], (6, *ONES[:50]), (20, 7, 13, 1, 59)], ids=["1", "6+1", "mixed"])
@pytest.mark.parametrize("cache", STORED)
def test_growing_caches_hold_the_same_bytes(cache: str, steps: Sequence[int]) -> None:  # B79
    wanted, full = one_shot(cache)
    attributes, inputs = sequence(cache)
    op = GroupQueryAttention(**attributes)
    past = {name: array[:, :, :0] for name, array in full.items()}
    begin = 0
    for length in steps:
        before = {name: array.copy() for name, array in past.items()}
        got = op(**step_inputs(inputs, begin, begin + length), **past)
        assert_close(got.output[0], wanted[begin : begin + length], CLOSE)
        assert_same_rows(past, before, np.s_[:begin])
        past = {"past_key": got.present_key, "past_value": got.present_value}
        begin += length
    assert past["past_key"].shape[2] == begin
    assert_same_rows(past, full, np.s_[:begin])


@pytest.mark.parametrize("steps", [(1,) * 6, (6,), (2, 4), (5, 1)], ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_six_tokens(cache: str, steps: Sequence[int]) -> None:  # B68
    past, whole = empty_cache(cache, 9), empty_cache(cache, 9)
    assert_close(run_steps(cache, steps, past), run_steps(cache, [6], whole), CLOSE)
    assert_same_rows(past, whole, np.s_[:9])


# --- sliding window ---


@pytest.mark.parametrize("steps", [ONES, SEVENS, MIXED, (TOKENS,)], ids=["1", "7", "mixed", "one shot"])
@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize("capacity", [WINDOW, CAPACITY])
def test_sliding_steps_hold_the_last_rows_of_a_full_cache(capacity: int, cache: str, steps: Sequence[int]) -> None:
    wanted, full = one_shot(cache, WINDOW)
    past = empty_cache(cache, capacity)
    assert_close(run_steps(cache, steps, past, **SLIDING), wanted, CLOSE)
    assert_same_rows(past, full, np.s_[TOKENS - retained_length(TOKENS, capacity, WINDOW) :])


@pytest.mark.parametrize("cache", STORED)
def test_sliding_padded_chunks_hold_the_last_rows_of_a_full_cache(cache: str) -> None:
    wanted, full = one_shot(cache, WINDOW)
    past = empty_cache(cache, CAPACITY)
    assert_close(run_padded(cache, past, **SLIDING), wanted, CLOSE)
    assert_same_rows(past, full, np.s_[TOKENS - retained_length(TOKENS, CAPACITY, WINDOW) :])


# --- rewinding ---


@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize("dropped", [1, 37, 299])
def test_rewound_full_cache_is_a_fresh_one(cache: str, dropped: int) -> None:  # B83
    rewound, fresh = empty_cache(cache, TOKENS), empty_cache(cache, TOKENS)
    run_steps(cache, [300], rewound)
    run_steps(cache, [300 - dropped], fresh)
    outputs = [run_steps(cache, [1, 5], past, 300 - dropped, seed=1) for past in (rewound, fresh)]
    np.testing.assert_array_equal(*outputs)
    assert_same_rows(rewound, fresh, np.s_[: 306 - dropped])


@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize(("total", "dropped"), [(300, 1), (300, 14), (90, 80), (100, 60)])
def test_rewound_sliding_cache_is_a_fresh_one(cache: str, total: int, dropped: int) -> None:  # B83
    assert can_rewind(total, dropped, CAPACITY, WINDOW)
    rewound, fresh = empty_cache(cache, CAPACITY), empty_cache(cache, CAPACITY)
    run_steps(cache, [total], rewound, **SLIDING)
    run_steps(cache, [total - dropped], fresh, **SLIDING)
    outputs = [run_steps(cache, [1, 5], past, total - dropped, seed=1, **SLIDING) for past in (rewound, fresh)]
    np.testing.assert_array_equal(*outputs)
    rows = retained_length(total - dropped + 6, CAPACITY, WINDOW)
    assert_same_rows(rewound, fresh, np.s_[:rows])


@pytest.mark.parametrize(("total", "dropped"), [(300, 15), (300, 290), (101, 1)])
def test_sliding_cache_that_dropped_what_the_shorter_sequence_needs(total: int, dropped: int) -> None:
    assert not can_rewind(total, dropped, CAPACITY, WINDOW)
    past, shorter = empty_cache("f32", CAPACITY), empty_cache("f32", CAPACITY)
    run_steps("f32", [total], past, **SLIDING)
    run_steps("f32", [total - dropped], shorter, **SLIDING)
    rows = retained_length(total - dropped, CAPACITY, WINDOW)
    assert not np.array_equal(past["past_key"][:, :, :rows], shorter["past_key"][:, :, :rows])
