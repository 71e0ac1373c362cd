"""Known faults of rotary positions and tables: each test is the smallest case that showed one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from known_fault_calls import FORMATS, STRATEGIES, checked, coded, operate, stored
from operator_calls import assert_close
from reference_calls import Array, random

from gqa_tvm import InvalidArgument


def tables(rows: int, half: int) -> dict[str, Any]:
    return {"cos_cache": random(rows, half, seed=5), "sin_cache": random(rows, half, seed=6), "do_rotary": 1}


def turned(rows: Array, rotary: dict[str, Any], positions: Array, interleaved: int) -> Array:
    """Rows [S, H] rotated pair by pair as complex numbers."""
    half = rotary["cos_cache"].shape[1]
    angles = rotary["cos_cache"][positions] + 1j * rotary["sin_cache"][positions]
    result = rows.copy()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        pair = (rows[:, a] + 1j * rows[:, b]) * angles[:, i]
        result[:, a], result[:, b] = pair.real, pair.imag
    return result


@pytest.mark.parametrize("interleaved", [0, 1])
# (16, 4) and (16, 6) have widths of their own, (80, 16) leaves 48 columns as they are, 24 and 40 are no multiple of 16.
@pytest.mark.parametrize(("head_size", "half"), [(16, 8), (16, 2), (16, 4), (16, 6), (80, 16), (40, 20), (24, 12)])
def test_pairs_and_width_of_the_rotation(head_size, half, interleaved):  # B14, B15, B22
    key, rotary = random(1, 2, 1, head_size), tables(4, half)
    rest = rotary | {"rotary_interleaved": interleaved, "strategy": "naive"}
    got = checked(key, key, key, **rest).present_key[0, 0]
    assert_close(got, turned(key[0, :, 0], rotary, np.arange(2), interleaved), 1e-6)
    np.testing.assert_array_equal(got[:, 2 * half :], key[0, :, 0, 2 * half :])
    assert (got[1, : 2 * half] != key[0, 1, 0, : 2 * half]).all()


@pytest.mark.parametrize("rows", [4, 5, 4096, 3])
def test_tables_may_be_longer_than_the_sequence(rows):  # B16
    new, past = random(1, 1, 1, 8), random(1, 1, 3, 8)
    if rows >= 4:
        checked(new, new, new, past, past, **tables(rows, 4))
        return
    with pytest.raises(InvalidArgument, match="cos_cache dimension 0 shall not be less than total_sequence_length"):
        operate(new, new, new, past, past, **tables(rows, 4))


def test_positions_of_lengths_beyond_the_tables():  # B17
    new, past = random(1, 1, 1, 8), random(1, 1, 32, 8)
    with pytest.raises(
        InvalidArgument, match=r"seqlens_k\[0\] = 20 is out of range for rotary cache dimension 0 \(8\)"
    ):
        operate(new, new, new, past, past, totals=[21], total=8, **tables(8, 4))


@pytest.mark.parametrize("position", [-1, 16, 2**40])
def test_position_ids_outside_the_tables(position):  # B18
    new, past = random(1, 1, 1, 8), random(1, 1, 3, 8)
    rest = tables(16, 4) | {"position_ids": np.array([[position]])}
    with pytest.raises(InvalidArgument, match=rf"position_ids value {position} at index 0 is out of range \[0, 16\)"):
        operate(new, new, new, past, past, **rest)


def test_negative_lengths_with_tables():  # B18
    new, past = random(1, 1, 1, 8), random(1, 1, 3, 8)
    with pytest.raises(InvalidArgument, match=r"seqlens_k\[0\] = -1 is out of range"):
        operate(new, new, new, past, past, totals=[0], total=4, **tables(16, 4))


def test_position_ids_of_one_row_for_two_entries():  # B20
    new = random(2, 3, 1, 8)
    rest = tables(16, 4) | {"position_ids": np.array([[0, 1, 2]])}
    with pytest.raises(
        InvalidArgument, match="position_ids dimension 0 must be equal to the batch size, got 1"
    ) as caught:
        operate(new, new, new, **rest)
    assert "2" in str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache", FORMATS)
def test_positions_need_not_be_slots(cache, strategy):  # B21
    query, key, value = (random(1, 3, 1, 8, seed=seed) for seed in range(3))
    old = [coded(cache, random(1, 1, 4, 8, seed=seed), 0.5) for seed in (3, 4)]
    rotary = tables(16, 4)
    rest = rotary | stored(cache, step=0.5) | {"position_ids": np.array([[4, 7, 5]]), "strategy": strategy}
    result = checked(query, key, value, *old, **rest)
    if cache == "f32":
        wanted = turned(key[0, :, 0], rotary, np.array([4, 7, 5]), 0)
        assert_close(result.present_key[0, 0, 4:], wanted, 1e-6)
    # The mask goes by slot: token 1, at position 7, does not see token 2, at position 5.
    key[:, 2], value[:, 2] = 9, 9
    later = checked(query, key, value, *old, **rest)
    np.testing.assert_array_equal(later.output[:, :2], result.output[:, :2])
    assert (later.output[:, 2] != result.output[:, 2]).any()


@pytest.mark.parametrize(
    ("shape", "words"),
    [((3,), "must be a 2D tensor"), ((1, 2), "dimension 1 must be at least sequence length"), ((2, 3), "dimension 0")],
)
def test_position_ids_of_other_shapes(shape, words):  # B21
    new, past = random(1, 3, 1, 8), random(1, 1, 4, 8)
    with pytest.raises(InvalidArgument, match=f"position_ids {words}"):
        operate(new, new, new, past, past, position_ids=np.zeros(shape, np.int64), **tables(16, 4))


@pytest.mark.parametrize("half", [0, 5, 12])
def test_widths_that_cannot_be(half):  # B22
    new, rest = random(1, 1, 1, 8), tables(4, half)
    if half == 0:
        np.testing.assert_array_equal(checked(new, new, new, **rest).present_key[0, 0], new[0, :, 0])
        return
    with pytest.raises(InvalidArgument, match="cos_cache dimension 1 must be <= head_size / 2"):
        operate(new, new, new, **rest)
