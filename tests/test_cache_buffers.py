"""KVCache: decode loops in its buffers equal one prompt of the reference, and its memory is what it promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operator_calls import CACHES, assert_close, first_of

from gqa_tvm import GroupQueryAttention, InvalidArgument
from gqa_tvm.cache_buffers import KVCache
from gqa_tvm.reference import group_query_attention
from gqa_tvm.sliding_window import can_rewind, retained_length

HEADS, KV_HEADS, HEAD_SIZE, TOKENS = 4, 2, 64, 48
HUGE_PAGE = 2 << 20
PROMPT_THEN_TOKENS = [7, 1, 1, 1, 5, *[1] * 17, 3, 1]
RAGGED = [[0, 3, 2], 1, [2, 0, 4], 3, 1, [0, 0, 1], 1, [5, 6, 1], 1]

_ANGLES = np.outer(np.arange(TOKENS), 10000.0 ** -np.linspace(0, 1, HEAD_SIZE // 2)).astype(np.float32)
_CHANNELS = np.random.default_rng(9).uniform(0.02, 0.04, KV_HEADS * HEAD_SIZE).astype(np.float32)
# By name: query dtype, the operator's attributes, KVCache's keywords.
FORMATS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "f32": (np.float32, {}, {}),
    "f16": (np.float16, {}, {"dtype": np.float16}),
    "i8": (np.float32, CACHES["i8-channel"], {"bits": 8, "k_scale": _CHANNELS, "v_scale": 2 * _CHANNELS}),
    "i4": (np.float32, CACHES["i4"], {"bits": 4, "k_scale": 0.3, "v_scale": [0.4]}),
}


class Loop:
    """Steps of the operator through one cache, over tokens that are known beforehand."""

    def __init__(self, form: str = "f32", batch: int = 1, capacity: int = 4, window: int | None = None) -> None:
        dtype, attributes, keywords = FORMATS[form]
        windowed = {} if window is None else {"local_window_size": window}
        self.attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1, **attributes, **windowed}
        # The naive strategy has one kernel for any number of tokens; how the cache is written does not depend on it.
        self.op = GroupQueryAttention(**self.attributes, sliding_window_cache=int(window is not None), strategy="naive")
        self.cache = KVCache(batch, KV_HEADS, capacity, HEAD_SIZE, sliding_window=window, **keywords)
        rng = np.random.default_rng(5)
        widths = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
        self.tokens = [rng.standard_normal((batch, TOKENS, width)).astype(dtype) for width in widths]
        self.tables = np.cos(_ANGLES).astype(dtype), np.sin(_ANGLES).astype(dtype)
        self.outputs = np.full(self.tokens[0].shape, np.nan, dtype)
        self.window = window

    def step(self, new: Any) -> None:
        starts = self.cache.length
        counts = np.broadcast_to(np.array(new), starts.shape)
        # Padding is NaN: whatever reads it shows.
        inputs = [np.full((len(starts), counts.max(), a.shape[2]), np.nan, a.dtype) for a in self.tokens]
        for padded, tokens in zip(inputs, self.tokens, strict=True):
            for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
                padded[b, :count] = tokens[b, start : start + count]
        result = self.op(*inputs, cos_cache=self.tables[0], sin_cache=self.tables[1], **self.cache.arguments(new))
        self.cache.advance()
        assert result.present_key is self.cache.key and result.present_value is self.cache.value
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.outputs[b, start : start + count] = result.output[b, :count]
            assert (result.output[b, count:] == 0).all()

    def check(self) -> None:
        """Every output so far, and the rows of the cache, against one prompt for each entry."""
        tolerance = 1e-3 if self.outputs.dtype == np.float16 else 1e-5
        for b, total in enumerate(self.cache.length.tolist()):
            prompt = self._prompt(b, total)
            assert_close(self.outputs[b, :total].astype(np.float64), prompt.output[0], tolerance)
            rows = total if self.window is None else retained_length(total, self.cache.capacity, self.window)
            for got, wanted in ((self.cache.key, prompt.present_key), (self.cache.value, prompt.present_value)):
                np.testing.assert_array_equal(got[b, :, :rows], wanted[0, :, total - rows :])

    def _prompt(self, b: int, total: int) -> Any:
        inputs = [array[b : b + 1, :total] for array in self.tokens]
        empty = self.cache.key[:1, :, :0]
        lengths = np.array([total - 1], np.int32), np.array([total], np.int32)
        scales = {name: array for name, array in self.cache.arguments(1).items() if name.endswith("_scale")}
        return group_query_attention(*inputs, empty, empty, *lengths, *self.tables, **scales, **self.attributes)


# --- loops with the operator ---


@pytest.mark.parametrize("form", first_of(FORMATS, 2))
def test_a_growing_loop_equals_one_prompt(form):
    loop = Loop(form)
    capacities = set()
    for new in PROMPT_THEN_TOKENS:
        loop.step(new)
        capacities.add(loop.cache.capacity)
    assert capacities == {8, 16, 32, 64} and loop.cache.length.tolist() == [sum(PROMPT_THEN_TOKENS)]
    loop.check()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("window", [None, 3], ids=lambda window: f"{window=}")
def test_entries_of_different_lengths_equal_one_prompt_each(form, window):
    loop = Loop(form, batch=3, capacity=3 if window is None else 4, window=window)
    for new in RAGGED:
        loop.step(new)
    assert loop.cache.length.tolist() == [14, 16, 15] and loop.cache.length.dtype == np.int32
    loop.check()


@pytest.mark.parametrize(("capacity", "window"), [(4, 4), (8, 5), (64, 3), (1, 1)])
def test_a_sliding_window_keeps_its_buffers(capacity, window):
    loop = Loop(capacity=capacity, window=window)
    buffers = loop.cache.key, loop.cache.value
    for new in PROMPT_THEN_TOKENS:
        loop.step(new)
    assert loop.cache.key is buffers[0] and loop.cache.value is buffers[1] and loop.cache.capacity == capacity
    loop.check()


def test_a_failed_call_changes_nothing():
    loop = Loop(batch=2)
    loop.step([2, 5])
    for new in (1, [3, 1]):
        with pytest.raises(InvalidArgument, match="query"):
            loop.op(np.zeros((2, 1, 7), np.float32), **loop.cache.arguments(new))
        loop.step(new)
    loop.check()


# --- rewind ---


@pytest.mark.parametrize(("form", "back"), [("f32", 3), ("i4", [0, 4, 1])])
def test_rewound_tokens_leave_no_trace(form, back):
    loop = Loop(form, batch=3)
    loop.step([6, 7, 5])
    tokens, loop.tokens = loop.tokens, [-array for array in loop.tokens]
    loop.step(back)
    loop.cache.rewind(back)
    loop.tokens = tokens
    assert loop.cache.length.tolist() == [6, 7, 5]
    loop.step(4)
    loop.check()
    loop.cache.rewind(loop.cache.length)
    loop.step(2)
    loop.check()


@pytest.mark.parametrize("back", [1, 2, 4])
def test_a_sliding_window_rewinds_only_to_what_it_holds(back):
    refused = 0
    for total in range(4, 17):
        loop = Loop(capacity=8, window=5)
        loop.step(total)
        allowed = can_rewind(total, back, 8, 5) or back == total
        if allowed:
            loop.cache.rewind(back)
        else:
            refused += 1
            with pytest.raises(InvalidArgument, match="computed again"):
                loop.cache.rewind(back)
        assert loop.cache.length.tolist() == [total - back * allowed]
        loop.step(1)
        loop.check()
    assert 0 < refused < 13


def test_a_sliding_window_rewinds_all_entries_or_none():
    loop = Loop(batch=2, capacity=8, window=5)
    loop.step([9, 8])
    with pytest.raises(InvalidArgument, match=r"tokens\[0\]"):
        loop.cache.rewind(1)
    assert loop.cache.length.tolist() == [9, 8]
    loop.cache.rewind([9, 1])
    loop.step([2, 1])
    loop.check()


# --- arguments ---


def test_arguments_belong_to_the_caller():
    cache = KVCache(2, 1, 16, 8)
    first = cache.arguments(3)
    kept = {name: array.copy() for name, array in first.items()}
    assert first["seqlens_k"].tolist() == [2, 2] and first["total_sequence_length"].tolist() == [3]
    cache.advance()
    later = cache.arguments(1)
    assert later["seqlens_k"].tolist() == [3, 3] and later["total_sequence_length"].tolist() == [4]
    for name, array in kept.items():
        np.testing.assert_array_equal(first[name], array)
    first["seqlens_k"][:] = 99
    cache.length[:] = 99
    assert cache.length.tolist() == [3, 3]
    assert {array.dtype for array in (first["seqlens_k"], first["total_sequence_length"])} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("batch", "past", "new", "padded"),
    [(1, 5, 3, False), (2, 0, 3, False), (2, 5, 1, False), (2, 5, 3, True), (2, 5, [3, 3], True), (1, 0, [3], True)],
)
def test_query_seqlens_come_where_the_operator_needs_them(batch, past, new, padded):
    cache = KVCache(batch, 1, 16, 8)
    if past:
        cache.arguments(past)
        cache.advance()
    given = cache.arguments(new).get("query_seqlens")
    assert (given is not None) == padded
    if padded:
        assert given.dtype == np.int32 and given.tolist() == np.broadcast_to(new, batch).tolist()


def test_scales_are_copies():
    scale = np.ones(16, np.float32)
    cache = KVCache(1, 2, 4, 8, 8, k_scale=scale, v_scale=scale)
    scale[:] = 3
    for name in ("k_scale", "v_scale"):
        given = cache.arguments(1)[name]
        assert given.dtype == np.float32 and given.shape == (16,) and (given == 1).all()


# --- errors ---

_QUANTIZED = {"bits": 8, "k_scale": 1.0, "v_scale": 1.0}


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        *[({name: bad}, name) for name in ("batch", "kv_num_heads", "capacity", "head_size") for bad in (0, -1, 1.0)],
        ({"capacity": 2**31}, "capacity"),
        ({"bits": 2}, "bits must be 0, 4 or 8"),
        ({"bits": None}, "bits"),
        ({"dtype": np.float64}, "float32, float16, bfloat16"),
        ({"dtype": np.int8}, "float32, float16, bfloat16"),
        ({"dtype": np.dtype(np.float32).newbyteorder()}, "float32, float16, bfloat16"),
        ({"dtype": "no such type"}, "dtype"),
        (_QUANTIZED | {"dtype": np.float16}, "dtype must be left out"),
        ({"bits": 8}, "k_scale must be provided"),
        (_QUANTIZED | {"v_scale": None}, "v_scale must be provided"),
        ({"k_scale": 1.0}, "k_scale needs bits"),
        (_QUANTIZED | {"k_scale": np.ones(15)}, "1 or 16 elements, got 15"),
        (_QUANTIZED | {"k_scale": np.ones(16)}, "as many elements each, got 16 and 1"),
        (_QUANTIZED | {"v_scale": np.nan}, "v_scale must be finite"),
        (_QUANTIZED | {"v_scale": 1e39}, "v_scale must be finite"),
        (_QUANTIZED | {"v_scale": "one"}, "v_scale must be numbers"),
        ({"sliding_window": 9}, "capacity must be at least sliding_window"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"capacity": 2**31 - 1, "head_size": 2**31 - 1}, "more than there is"),
        ({"batch": 2**31 - 1, "capacity": 2**31 - 1, "head_size": 2**31 - 1}, "more than there is"),
    ],
)
def test_wrong_construction(keywords, match):
    sizes = {"batch": 1, "kv_num_heads": 2, "capacity": 8, "head_size": 8}
    with pytest.raises(InvalidArgument, match=match):
        KVCache(**(sizes | keywords))


@pytest.mark.parametrize("bad", [-1, 0, [0, 0], [1, -1], [1], [[1, 1]], 1.0, [1.0, 1.0], None, "1", 2**31, [2**40, 1]])
def test_wrong_new_tokens_change_nothing(bad):
    cache = KVCache(2, 1, 8, 8)
    with pytest.raises(InvalidArgument, match="new_tokens"):
        cache.arguments(bad)
    assert cache.length.tolist() == [0, 0] and cache.capacity == 8
    with pytest.raises(InvalidArgument, match="advance"):
        cache.advance()


@pytest.mark.parametrize("bad", [4, -1, [0, 3], [0, -1], [1], 1.0])
def test_wrong_rewinds_change_nothing(bad):
    cache = KVCache(2, 1, 8, 8)
    cache.arguments([3, 2])
    cache.advance()
    with pytest.raises(InvalidArgument, match="tokens"):
        cache.rewind(bad)
    assert cache.length.tolist() == [3, 2]


def test_lengths_end_at_the_largest_int32():
    cache = KVCache(1, 1, 4, 8, sliding_window=2)
    cache.arguments(2**31 - 1)
    cache.advance()
    for new in (1, [1]):
        with pytest.raises(InvalidArgument, match="more than 2147483647"):
            cache.arguments(new)
    assert cache.length.tolist() == [2**31 - 1]


def test_a_cache_that_cannot_grow_stays_as_it_is():
    cache = KVCache(1, 64, 4, 1024)
    cache.arguments(4)
    cache.advance()
    key = cache.key
    with pytest.raises(InvalidArgument, match="more than there is"):
        cache.arguments(2**31 - 5)
    cache.rewind(1)
    assert cache.arguments(1)["past_key"] is key and cache.length.tolist() == [3]


def test_a_call_advances_once():
    cache = KVCache(1, 1, 8, 8)
    cache.arguments(2)
    cache.arguments(3)
    cache.advance()
    with pytest.raises(InvalidArgument, match="advance"):
        cache.advance()
    cache.arguments(1)
    cache.rewind(1)
    with pytest.raises(InvalidArgument, match="advance"):
        cache.advance()
    assert cache.length.tolist() == [2]
