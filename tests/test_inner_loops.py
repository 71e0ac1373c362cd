"""Counting instructions of inner loops, and what it guards: register tiles that stay in registers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gqa_tvm.kernels import KernelSpec
from gqa_tvm.targets import architecture
from gqa_tvm.variants import machine_variant

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from inner_loops import Loop, count, innermost_loops, multiplying_loops

NESTED = """
.LBB0_1:
\tmovq\t%rax, %rbx
.LBB0_2:
\tvmovups\t(%rdi,%rax), %zmm1
\tvbroadcastss\t(%rsi), %zmm2
\tvfmadd231ps\t%zmm1, %zmm2, %zmm3
\tvfmadd231ps\t64(%rsp), %zmm2, %zmm4
\tvpmovsxbd\t(%rdx), %zmm5
\tvcvtdq2ps\t%zmm5, %zmm5
\tvunpcklps\t%zmm5, %zmm1, %zmm6
\tvmovaps\t%zmm6, %zmm7
\tvmovups\t%zmm7, (%rcx)
\taddq\t$64, %rax
\tjne\t.LBB0_2
\tjne\t.LBB0_1
"""


def test_a_loop_by_hand():
    (loop,) = innermost_loops(NESTED)
    assert len(loop) == 11 and loop[0].startswith("vmovups")
    expected = Loop("k", products=2, loads=4, broadcasts=1, converts=2, shuffles=0, stack=1, total=11)
    assert count("k", loop) == expected


def test_loops_that_clamp_or_multiply_little_are_left_out():
    assert multiplying_loops("k", NESTED) == []
    many = NESTED.replace("\tvfmadd231ps\t%zmm1, %zmm2, %zmm3\n", "\tvfmadd231ps\t%zmm1, %zmm2, %zmm3\n" * 24)
    assert [loop.products for loop in multiplying_loops("k", many)] == [25]
    assert multiplying_loops("k", many.replace("vunpcklps\t", "vmaxps\t")) == []


@pytest.mark.skipif(architecture() != "x86-64", reason="reads x86 assembly")
@pytest.mark.parametrize("cache", ["f32", "i8"])
@pytest.mark.parametrize(("target", "products"), [("x86-avx512-vnni", 24), ("x86-avx512", 24)])
def test_prefill_tiles_stay_in_registers(target, products, cache):
    """Both products in loops of a tile each, mostly multiply-adds, with no accumulator on the stack."""
    from gqa_tvm.lowering import compile_kernel

    spec = KernelSpec("flash_prefill", "f32", cache, 64)
    assembly = compile_kernel(spec, machine_variant(target)).inspect_source("asm")
    tiles = [loop for loop in multiplying_loops(spec.name, assembly) if loop.products == products]
    assert len(tiles) >= 2
    for tile in tiles:
        # Besides the products and their operands: the counter, and the address of a line of the next block.
        assert tile.stack <= 3 and tile.products > 0.45 * tile.total
