"""The memory behind KVCache: alignment, huge pages, growth, and that it goes back."""

from __future__ import annotations

import mmap
import weakref
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from gqa_tvm.cache_buffers import KVCache

HUGE_PAGE = 2 << 20


class RecordedMap(mmap.mmap):
    """Mappings that are alive, and what they were told."""

    alive: ClassVar[weakref.WeakSet[RecordedMap]]
    calls: ClassVar[list[Any]]
    refuses = False

    def __new__(cls, *args: Any, **keywords: Any) -> RecordedMap:
        made = super().__new__(cls, *args, **keywords)
        cls.alive.add(made)
        cls.calls.append(keywords.get("flags"))
        return made

    def madvise(self, option: int, *rest: int) -> None:
        self.calls.append(("advice", option))
        if self.refuses:
            raise OSError(22, "no huge pages here")
        super().madvise(option, *rest)


@pytest.fixture
def maps(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", RecordedMap)
    monkeypatch.setattr(RecordedMap, "calls", [], raising=False)
    monkeypatch.setattr(RecordedMap, "alive", weakref.WeakSet(), raising=False)
    return RecordedMap


def _address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("keywords", "dtype", "columns"),
    [
        ({}, np.float32, 9),
        ({"dtype": "float16"}, np.float16, 9),
        ({"dtype": ml_dtypes.bfloat16}, ml_dtypes.bfloat16, 9),
        ({"bits": 8, "k_scale": 1, "v_scale": 1}, np.int8, 9),
        ({"bits": 4, "k_scale": 1, "v_scale": 1, "dtype": np.uint8}, np.uint8, 5),
    ],
)
def test_buffers_are_zero_and_aligned(keywords, dtype, columns):
    for capacity, alignment in ((3, 64), (100_000, HUGE_PAGE)):
        cache = KVCache(3, 2, capacity, 9, **keywords)
        for array in (cache.key, cache.value):
            assert array.shape == (3, 2, capacity, columns) and array.dtype == dtype and array.flags.carray
            assert _address(array) % alignment == 0 and not array.view(np.uint8).any()
        assert cache.nbytes == 2 * 6 * capacity * columns * np.dtype(dtype).itemsize and cache.capacity == capacity


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no advice about huge pages")
@pytest.mark.parametrize("refuses", [False, True])
def test_large_buffers_ask_for_huge_pages_in_private_memory(maps, monkeypatch, refuses):
    monkeypatch.setattr(maps, "refuses", refuses)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    KVCache(1, 1, HUGE_PAGE // 32 - 1, 8)
    assert maps.calls == [private] * 2
    maps.calls.clear()
    cache = KVCache(1, 1, HUGE_PAGE // 32, 8)
    assert maps.calls == [private, ("advice", mmap.MADV_HUGEPAGE)] * 2
    cache.key[:] = 1


def test_systems_without_these_calls(monkeypatch):
    for name in ("MADV_HUGEPAGE", "MAP_PRIVATE"):
        monkeypatch.delattr(mmap, name, raising=False)
    cache = KVCache(1, 1, HUGE_PAGE // 32, 8)
    cache.key[:] = 1
    assert _address(cache.value) % HUGE_PAGE == 0


def test_growth_keeps_valid_rows_and_old_arrays():
    cache = KVCache(2, 2, 8, 16, 8, k_scale=1, v_scale=1)
    old = cache.arguments([8, 3])
    cache.advance()
    rng = np.random.default_rng(0)
    for array in (cache.key, cache.value):
        array[...] = rng.integers(-128, 128, array.shape)
    before = cache.key.copy(), cache.value.copy()
    cache.arguments(1)
    assert cache.capacity == 16 and cache.length.tolist() == [8, 3]
    new = cache.key, cache.value
    for got, kept, name in zip(new, before, ("past_key", "past_value"), strict=True):
        for b, length in enumerate((8, 3)):
            np.testing.assert_array_equal(got[b, :, :length], kept[b, :, :length])
            assert not got[b, :, length:].any()
        np.testing.assert_array_equal(old[name], kept)
        assert not np.shares_memory(got, old[name])
    cache.arguments(40)
    assert cache.capacity == 48


def test_memory_goes_back(maps):
    kept = KVCache(1, 1, 8, 8).key
    for _ in range(200):
        cache = KVCache(1, 2, 1 << 13, 64)
        cache.arguments(1 << 13)
        cache.advance()
        cache.arguments(1)
        cache.value[:, :, :1000] = 1
        assert len(maps.alive) == 3
    del cache
    assert len(maps.alive) == 1 and kept[0, 0, 7, 7] == 0
    del kept
    assert not maps.alive
