"""The NumPy reference's sliding window cache on cases worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference_calls import Array, attention, ramp, random

from gqa_tvm.reference import ReferenceResult, retained_length

TOKENS = 12
CODES: dict[str, Any] = {
    "k_quant_type": "PER_TENSOR",
    "v_quant_type": "PER_TENSOR",
    "k_scale": np.array([0.1], np.float32),
    "v_scale": np.array([0.1], np.float32),
}
CACHES: dict[str, dict[str, Any]] = {
    "float": {},
    "int8": CODES | {"kv_cache_bit_width": 8},
    "int4": CODES | {"kv_cache_bit_width": 4},
}


def empty_cache(cache: str, capacity: int, batch: int = 1) -> tuple[Array, Array]:
    """Rows that no test may read: NaN, or the largest codes."""
    if cache == "float":
        past = np.full((batch, 1, capacity, 8), np.nan, np.float32)
    else:
        dtype, columns = (np.uint8, 4) if cache == "int4" else (np.int8, 8)
        past = np.full((batch, 1, capacity, columns), np.iinfo(dtype).max, dtype)
    return past, past


def run_steps(cache: str, steps: list[int], capacity: int, window: int, **rest: Any) -> tuple[Array, ReferenceResult]:
    """Output [sum(steps), H] and the last result of one entry that takes its tokens in these steps."""
    tokens = tuple(random(1, TOKENS, 1, 8, seed=seed) for seed in range(3))
    past, done, outputs = empty_cache(cache, capacity), 0, []
    for step in steps:
        query, key, value = (array[:, done : done + step] for array in tokens)
        done += step
        result = attention(
            *(query, key, value, *past),
            total=done,
            sliding_window_cache=1,
            local_window_size=window,
            **CACHES[cache],
            **rest,
        )
        past = result.present_key, result.present_value
        outputs.append(result.output[0])
    return np.concatenate(outputs), result


def full_cache(cache: str, window: int) -> ReferenceResult:
    query, key, value = (random(1, TOKENS, 1, 8, seed=seed) for seed in range(3))
    return attention(query, key, value, local_window_size=window, **CACHES[cache])


# --- layout ---


@pytest.mark.parametrize(
    ("capacity", "window", "lengths"),
    [
        (4, 4, [0, 1, 2, 3, 4, 4, 4, 4, 4, 4]),
        (5, 3, [0, 1, 2, 3, 4, 5, 3, 4, 5, 3]),
        (5, 1, [0, 1, 2, 3, 4, 5, 1, 2, 3, 4]),
        (1, 1, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_retained_length(capacity: int, window: int, lengths: list[int]) -> None:
    assert [retained_length(total, capacity, window) for total in range(10)] == lengths
    assert retained_length(np.arange(10, dtype=np.int32), capacity, window).tolist() == lengths


@pytest.mark.parametrize("steps", [[1] * TOKENS, [12], [3, 1, 8], [5, 7], [11, 1]], ids=str)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("capacity", "window"), [(3, 3), (4, 3), (7, 3), (6, 1), (12, 5), (20, 5)])
def test_any_steps_equal_the_full_cache(cache: str, capacity: int, window: int, steps: list[int]) -> None:
    output, last = run_steps(cache, steps, capacity, window)
    whole = full_cache(cache, window)
    np.testing.assert_allclose(output, whole.output[0], rtol=1e-12)
    rows = retained_length(TOKENS, capacity, window)
    assert np.array_equal(last.present_key[:, :, :rows], whole.present_key[:, :, TOKENS - rows :])
    assert np.array_equal(last.present_value[:, :, :rows], whole.present_value[:, :, TOKENS - rows :])
    assert last.present_key.shape[2] == capacity
    assert not last.present_key[:, :, rows:].any()


def test_in_place_keeps_the_bytes_behind_the_rows() -> None:
    past = random(1, 1, 6, 8)
    new = random(1, 1, 1, 8)
    rest: dict[str, Any] = {"sliding_window_cache": 1, "local_window_size": 3, "in_place": True}
    present = attention(new, new, new, past, past, total=7, **rest).present_key[0, 0]
    assert np.array_equal(present[:2], past[0, 0, 4:])
    assert np.array_equal(present[2], new[0, 0, 0])
    assert np.array_equal(present[3:], past[0, 0, 3:])


def test_entries_have_their_own_rows() -> None:
    new, past = random(3, 4, 1, 8), random(3, 1, 6, 8)
    counts, totals = np.array([4, 0, 2], np.int32), [9, 5, 2]
    rest: dict[str, Any] = {"sliding_window_cache": 1, "local_window_size": 4, "query_seqlens": counts}
    result = attention(new, new, new, past, past, totals=totals, total=20, **rest)
    # Three rows are dropped at once: the first entry held 0..4 and keeps 3..8.
    expected = np.concatenate([past[0, 0, 3:5], new[0, :, 0]])
    assert np.array_equal(result.present_key[0, 0], expected)
    assert np.array_equal(result.present_key[1, 0, :5], past[1, 0, :5])
    assert np.array_equal(result.present_key[2, 0, :2], new[2, :2, 0])
    assert not result.output[1].any() and not result.output[2, 2:].any()


def test_rewinding() -> None:
    """Dropping the last k tokens is exact where the layout of fewer tokens is a shorter one."""
    capacity, window = 6, 3
    _, after = run_steps("float", [7, 3], capacity, window)
    _, before = run_steps("float", [8], capacity, window)
    assert retained_length(8, capacity, window) == retained_length(10, capacity, window) - 2
    new = random(1, 1, 1, 8, seed=9)
    rest: dict[str, Any] = {"sliding_window_cache": 1, "local_window_size": window, "total": 9}
    rewound, fresh = (
        attention(new, new, new, past.present_key, past.present_value, **rest) for past in (after, before)
    )
    assert np.array_equal(rewound.output, fresh.output)
    assert np.array_equal(rewound.present_key, fresh.present_key)


# --- positions ---


def test_bias_columns_are_positions() -> None:
    # Value row j holds j. After 8 tokens the 4 rows are 4..7; the next one sees 6, 7, 8 and 7 is masked.
    values = np.arange(4, 9, dtype=np.float32)[None, None, :, None] * np.ones(8, np.float32)
    past, new = values[:, :, :4], values[:, :, 4:]
    bias = np.zeros((1, 1, 1, 9), np.float32)
    bias[..., :6], bias[..., 7] = np.nan, -np.inf
    rest: dict[str, Any] = {"sliding_window_cache": 1, "local_window_size": 3, "attention_bias": bias}
    result = attention(0 * new, 0 * new, new, 0 * past, past, total=9, **rest)
    np.testing.assert_allclose(result.output, 7)
    assert result.present_value[0, 0, :, 0].tolist() == [6, 7, 8, 0]


@pytest.mark.parametrize(
    ("tokens", "total", "totals", "positions"),
    [
        (3, 9, [9], [6, 7, 8]),
        (3, 2, [9], [6, 7, 8]),
        # As many tokens as T are a prompt to the rotation, wherever they stand.
        (3, 3, [9], [0, 1, 2]),
    ],
)
def test_rotary_positions(tokens: int, total: int, totals: list[int], positions: list[int]) -> None:
    key, past = np.ones((1, tokens, 1, 8), np.float32), np.zeros((1, 1, 10, 8), np.float32)
    cos = np.arange(10, dtype=np.float32)[:, None]
    rest: dict[str, Any] = {"do_rotary": 1, "cos_cache": cos, "sin_cache": 0 * cos}
    rest |= {"sliding_window_cache": 1, "local_window_size": 10}
    present = attention(key, key, key, past, past, totals=totals, total=total, **rest).present_key
    assert present[0, 0, 9 - tokens : 9, 0].tolist() == positions


# --- refusals ---


@pytest.mark.parametrize(("window", "with_past"), [(7, True), (0, True), (-1, True), (3, False)])
def test_impossible_capacity_is_refused(window: int, with_past: bool) -> None:
    new, past = random(1, 1, 1, 8), random(1, 1, 6, 8) if with_past else None
    with pytest.raises(ValueError, match="a sliding window cache of"):
        attention(new, new, new, past, past, total=1, sliding_window_cache=1, local_window_size=window)


@pytest.mark.parametrize(("count", "total"), [(-1, 9), (3, 9), (2, 4)])
@pytest.mark.parametrize("sliding", [0, 1])
def test_impossible_counts_are_refused(sliding: int, count: int, total: int) -> None:
    new, past = random(1, 2, 1, 8), random(1, 1, 9, 8)
    rest: dict[str, Any] = {"sliding_window_cache": sliding, "local_window_size": 3}
    with pytest.raises(ValueError, match="do not fit total length"):
        attention(new, new, new, past, past, totals=[5], total=total, query_seqlens=np.array([count]), **rest)


def test_columns_that_are_not_there_are_refused() -> None:
    new, past, bias = random(1, 1, 1, 8), random(1, 1, 6, 8), random(1, 1, 1, 4)
    rest: dict[str, Any] = {"sliding_window_cache": 1, "local_window_size": 3, "attention_bias": bias}
    with pytest.raises(ValueError, match="no column"):
        attention(new, new, new, past, past, totals=[5], total=4, **rest)


def test_rows_that_are_not_there_are_refused() -> None:
    new, past = random(1, 2, 1, 8), random(1, 1, 3, 8)
    rest: dict[str, Any] = {"query_seqlens": np.array([1], np.int32)}
    with pytest.raises(ValueError, match="past must hold 4 rows"):
        attention(new, new, new, past, past, totals=[5], total=6, **rest)


def test_window_of_a_full_cache_reads_the_same_rows() -> None:
    numbers = ramp(1, past=6, local_window_size=3)
    windowed = ramp(1, past=6, local_window_size=3, sliding_window_cache=1, total=7)
    np.testing.assert_allclose(windowed, numbers)
