"""Known faults of unchecked lengths, shapes and offsets: each test is the smallest case that showed one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from known_fault_calls import STRATEGIES, checked, operate, stored
from operator_calls import assert_close
from reference_calls import attention, random

from gqa_tvm import GroupQueryAttention, InvalidArgument

LIMIT = 2**31


@pytest.mark.parametrize("last", [-1, -2, 4, 100, LIMIT - 1, -LIMIT])
@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize("static", [False, True])
def test_lengths_out_of_range(static, entries, last):  # B87
    new, past = random(entries, 1, 1, 8), random(entries, 1, 4 if static else 3, 8)
    presents = [past, past.copy()] if static else [random(entries, 1, 4, 8, seed=seed) for seed in (1, 2)]
    before = [array.copy() for array in (past, *presents)]
    rest = {"totals": [4] * (entries - 1) + [last + 1], "total": 4}
    rest |= {"present_key": presents[0], "present_value": presents[1]}
    with pytest.raises(InvalidArgument, match=rf"seqlens_k\[{entries - 1}\] = {last} is out of range \[0, 4\)"):
        operate(new, new, new, past, presents[1] if static else past, **rest)
    for array, old in zip((past, *presents), before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize(
    ("lengths", "total", "words"),
    [
        ((2,), (1,), None),
        ((2, 1), (1,), None),
        ((1, 2), (1,), None),
        ((2,), (), None),
        ((), (1,), "seqlens_k must be at least 1D, got scalar"),
        ((3,), (1,), r"seqlens_k must have batch_size \(2\) elements, got 3"),
        ((2,), (2,), "total_sequence_length tensor must be of one element"),
    ],
    ids=str,
)
def test_shapes_of_lengths(lengths, total, words):  # B88, B96
    new, past = random(2, 1, 8), random(2, 1, 3, 8)
    op = GroupQueryAttention(num_heads=1, kv_num_heads=1)
    arguments = new, new, new, past, past, np.full(lengths, 3, np.int32), np.full(total, 4, np.int32)
    if words is None:
        assert op(*arguments).output.shape == (2, 1, 8)
        return
    with pytest.raises(InvalidArgument, match=words):
        op(*arguments)


@pytest.mark.parametrize("total", [-1, 0, 1, 3, 4, 5, 10, LIMIT - 1])
def test_total_against_the_arrays(total):  # B89
    new, past = random(1, 1, 1, 8), random(1, 1, 3, 8)
    if total == 4:
        checked(new, new, new, past, past, total=total)
        return
    # 1 and 3 would fit the arrays, but not the entry's four keys.
    words = r"seqlens_k\[0\] = 3 is out of range" if total in (1, 3) else rf"total_sequence_length.* {total}|={total}"
    with pytest.raises(InvalidArgument, match=words):
        operate(new, new, new, past, past, totals=[4], total=total)


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("total", [0, 3])
def test_no_tokens(total, past):  # B91
    empty, old = np.zeros((1, 0, 1, 8), np.float32), random(1, 1, past, 8)
    wanted = "total_sequence_length" if total == 0 or past == 0 else "sequence_length shall be 1"
    with pytest.raises(InvalidArgument, match=wanted):
        operate(empty, empty, empty, old, old, totals=[3], total=total)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_offsets_beyond_int32_in_one_entry(strategy, tmp_path):  # B92
    capacity, window = 2**21 + 8, 40
    shape = (1, 8, capacity, 128)
    keys, values = (np.memmap(tmp_path / name, np.int8, "w+", shape=shape) for name in "kv")
    assert keys.nbytes > LIMIT
    rng = np.random.default_rng(0)
    for array in keys, values:
        array[:, :, -window:] = rng.integers(-128, 128, (1, 8, window, 128))
    new = np.s_[:, :, -window:-1]
    old = np.array(keys[new]), np.array(values[new])
    query, key, value = (random(1, 1, heads, 128) for heads in (16, 8, 8))
    rest = stored("i8", 8, 128, step=0.03)
    wanted = attention(query, key, value, *old, **rest)
    rest |= {"present_key": keys, "present_value": values, "local_window_size": window, "strategy": strategy}
    got = operate(query, key, value, keys, values, total=capacity, **rest)
    assert_close(got.output, wanted.output)
    np.testing.assert_array_equal(keys[:, :, -window:], wanted.present_key)
    np.testing.assert_array_equal(values[:, :, -window:], wanted.present_value)
    # A wrapped offset would have landed in an earlier head or in front of the file.
    assert not keys[:, :, :64].any() and not keys[:, :, -2 * window : -window].any()


@pytest.mark.slow
def test_offsets_of_many_heads_and_entries():  # B92
    totals, capacity = [64, 5, 4096, 100], 4096
    keys, values = (np.zeros((4, 32, capacity, 128), np.float16) for _ in range(2))
    for b, total in enumerate(totals):
        for seed, array in enumerate((keys, values)):
            array[b, :, : total - 1] = random(32, 1, 128, seed=seed + 2 * b) * np.linspace(0, 1, total - 1)[:, None]
    query, key, value = (random(4, 1, 32, 128, seed=seed).astype(np.float16) for seed in range(3))
    past = [[x[b : b + 1, :, : n - 1].copy() for x in (keys, values)] for b, n in enumerate(totals)]
    rest = {"present_key": keys, "present_value": values, "strategy": "naive"}
    got = operate(query, key, value, keys, values, totals=totals, total=capacity, **rest)
    for b, total in enumerate(totals):
        wanted = attention(query[b : b + 1], key[b : b + 1], value[b : b + 1], *past[b])
        assert_close(got.output[b : b + 1].astype(np.float32), wanted.output, 1e-3)
        np.testing.assert_array_equal(keys[b, :, :total], wanted.present_key[0])
        assert not keys[b, :, total:].any()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_long_rows_on_a_small_stack(strategy):  # B94
    total, head_size = 2**17, 576
    op = GroupQueryAttention(num_heads=1, kv_num_heads=1, strategy=strategy, num_threads=1)
    new = np.zeros((1, 1, head_size), np.float32)

    def call(total):
        cache = np.zeros((1, 1, total, head_size), np.float32)
        lengths = np.array([total - 1], np.int32), np.array([total], np.int32)
        presents = {"present_key": cache, "present_value": cache.copy() if total < 100 else np.zeros_like(cache)}
        return op(new, new, new + total, *presents.values(), *lengths, **presents).output

    # The compiler, which the first call runs, needs a large stack itself.
    call(2)
    outputs, previous = [], threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=lambda: outputs.append(call(total)))
        thread.start()
    finally:
        threading.stack_size(previous)
    thread.join()
    np.testing.assert_allclose(outputs[0], 1, rtol=1e-5)


def test_past_of_two_lengths():  # B96
    new = random(1, 1, 1, 8)
    with pytest.raises(InvalidArgument, match="should have same dimension 2") as caught:
        operate(new, new, new, random(1, 1, 2, 8), random(1, 1, 3, 8), total=3)
    assert "2" in str(caught.value) and "3" in str(caught.value)
    for past in ((random(1, 1, 2, 8), None), (None, random(1, 1, 2, 8))):
        with pytest.raises(InvalidArgument, match="'past_key' and 'past_value' shall be both present or both absent"):
            operate(new, new, new, *past, total=3)
