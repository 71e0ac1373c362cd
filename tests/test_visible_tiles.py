"""Loops of flash_prefill end with what its rows see; those of the naive path, which has no such numbers, do not."""

from __future__ import annotations

from collections import Counter

import pytest
import tvm
import tvm_ffi
from gqa_tvm.schedules.steps import BLOCK_KEYS, FIRST_ROW, ROW_KEYS
from tvm import tirx

from gqa_tvm.kernels import KernelSpec
from gqa_tvm.lowering import lowered_module
from gqa_tvm.passes import visible_tiles
from gqa_tvm.variants import family_variant


@pytest.fixture
def bound_loops(monkeypatch):
    """Function (spec, target, architecture) -> how often a loop's range is computed from each buffer, by its name."""
    after_pass = []

    def recorded(function, cover=visible_tiles._cover_visible):
        after_pass.append(cover(function))
        return after_pass[-1]

    monkeypatch.setattr(visible_tiles, "_cover_visible", recorded)

    def count(spec, target, architecture):
        after_pass.clear()
        lowered_module(spec, family_variant(target, architecture))
        (function,) = after_pass
        return Counter(name for names in _names_in_ranges(function) for name in names)

    return count


def _names_in_ranges(function) -> list[set[str]]:
    found = []

    def look(loop):
        names = set()

        def load(element):
            names.add(str(element.source.name))
            return element

        for bound in (loop.min, loop.extent):
            tvm_ffi.structural_map(bound, (tvm.ir.expr.TensorLoad, load))
        found.append(names)
        return loop

    tvm_ffi.structural_map(function.body, (tirx.For, look))
    return found


@pytest.mark.parametrize("cache", ["f32", "i8", "i4"])
@pytest.mark.parametrize(
    ("target", "architecture"),
    [("x86-avx512-vnni", "x86-64"), ("x86-avx2", "x86-64"), ("arm64-neon-dotprod", "aarch64")],
)
def test_loops_of_both_products_end_with_what_rows_see(bound_loops, target, architecture, cache):
    bounds = bound_loops(KernelSpec("flash_prefill", "f32", cache, 64), target, architecture)
    # SV, where not the keys' loop is the outer one QK, too; maximum, exp, sum, and what is arranged for the products.
    assert bounds[FIRST_ROW] >= 2 and bounds[ROW_KEYS] >= 1
    assert bounds[ROW_KEYS] + bounds[BLOCK_KEYS] >= 5


def test_the_naive_path_has_whole_blocks(bound_loops):
    bounds = bound_loops(KernelSpec("naive", "f32", "f32", 64), "x86-avx2", "x86-64")
    assert not any(bounds[name] for name in (FIRST_ROW, BLOCK_KEYS, ROW_KEYS))
