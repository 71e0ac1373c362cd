"""What the inner loops of compiled kernels consist of, read from their assembly: a Markdown table.

    python bench/inner_loops.py                          the attention kernels of head size 128, this CPU's target
    python bench/inner_loops.py flash_decode_f32_i8_h128_r4 --target x86-avx2

A row is a loop without another inside that multiplies: a multiply-add or dot product is one instruction on a vector.
"stack" are operands on the stack: spilled accumulators if the loop writes them, constants kept there if it only reads.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gqa_tvm.kernels import KernelSpec
from gqa_tvm.targets import best_target
from gqa_tvm.variants import machine_variant

KERNELS = (
    *(f"flash_prefill_f32_{cache}_h128" for cache in ("f32", "i8", "i4")),
    "flash_prefill_f16_f16_h128",
    *(f"flash_decode_f32_{cache}_h128_r{rows}" for cache in ("f32", "i8", "i4") for rows in (1, 2, 4)),
    "flash_decode_f16_f16_h128_r2",
)
_PRODUCT = re.compile(r"vfn?m(add|sub)\d*ps|vpdpbusds?|mulps|fmla|fmul|[su]dot")
_KINDS = {
    "load": re.compile(r"v?mov(dq|a|u)\w*|ld[pr1]\w*|ldur"),
    "broadcast": re.compile(r"v?p?broadcast\w*|ld1r|dup"),
    "convert": re.compile(r"vpmov[sz]x\w*|v?cvt\w+|[su]cvtf|fcvt\w*|[su]?shll\w*|[su]xtl\w*"),
    "shuffle": re.compile(
        r"vpunpck\w*|vperm\w*|vpshuf\w*|vshuf\w*|vpalign\w*|vinsert\w*|vextract\w*|zip\d|uzp\d|trn\d|ext|tbl"
    ),
}
_CLAMP = re.compile(r"vmaxps|fmax")
# Register tiles have more; loops over a row or the output have fewer.
_FEWEST = 20
_VECTOR = re.compile(r"%?[xyz]mm\d+|\bv\d+\.|\bq\d+")
# The frame pointer is left out: kernels use it for addresses.
_STACK = re.compile(r"\(%rsp|\[sp[],]")
_STORE = re.compile(r"v?mov(dq|a|u)\w*\t%\w+, .*\(|st[pr1]")


class Loop(NamedTuple):
    """Instructions of an innermost loop by kind; products counts multiply-adds and dot products."""

    kernel: str
    products: int
    loads: int
    broadcasts: int
    converts: int
    shuffles: int
    stack: int
    total: int

    def row(self) -> str:
        cells = [f"`{self.kernel}`", *map(str, self[1:])]
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| kernel | products | loads | broadcasts | converts | shuffles | stack | all |\n|---|--:|--:|--:|--:|--:|--:|--:|"
)


def innermost_loops(assembly: str) -> Iterator[list[str]]:
    """The instructions of every loop that has no other loop inside."""
    lines = assembly.split("\n")
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\.L\w+):", line))}
    jumps = ((i, re.match(r"\s+(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)\s.*?(\.L\w+)", line)) for i, line in enumerate(lines))
    loops = [(labels[jump[1]], i) for i, jump in jumps if jump and labels.get(jump[1], i) < i]
    for begin, end in loops:
        if not any((a, b) != (begin, end) and begin <= a and b <= end for a, b in loops):
            yield [line.strip() for line in lines[begin : end + 1] if re.match(r"\s+[a-z]", line)]


def _only_stores(instructions: Sequence[str]) -> bool:
    """Whether a loop stores every product: it adds tiles to memory, around a loop over products that lies elsewhere."""
    products = sum(bool(_PRODUCT.match(line)) for line in instructions)
    stores = sum(bool(_STORE.match(line)) for line in instructions)
    return stores >= products


def count(kernel: str, instructions: Sequence[str]) -> Loop:
    """A loop's instructions by kind. An operand in memory is a load whatever the instruction is."""
    kinds = dict.fromkeys(("product", "load", "broadcast", "convert", "shuffle"), 0)
    for instruction in instructions:
        name, _, operands = instruction.partition("\t")
        if not _VECTOR.search(operands):
            continue
        reads_memory = "(" in operands.rpartition(",")[0]
        kind = "product" if _PRODUCT.fullmatch(name) else next((k for k, p in _KINDS.items() if p.fullmatch(name)), "")
        if kind == "load" and not reads_memory and "[" not in operands:
            continue  # a copy between registers, or a store
        if kind:
            kinds[kind] += 1
        if kind != "load" and reads_memory:
            kinds["load"] += 1
    stack = sum(bool(_STACK.search(instruction)) for instruction in instructions)
    return Loop(kernel, *kinds.values(), stack, len(instructions))


def multiplying_loops(kernel: str, assembly: str) -> list[Loop]:
    """The innermost loops of both products (not of exp, which clamps), each shape once, most products first."""
    loops = (loop for loop in innermost_loops(assembly) if not any(_CLAMP.match(line) for line in loop))
    found = {count(kernel, loop) for loop in loops if not _only_stores(loop)}
    return sorted((loop for loop in found if loop.products >= _FEWEST), key=lambda loop: (-loop.products, loop))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("kernels", nargs="*", default=KERNELS)
    parser.add_argument("--target", default=best_target())
    options = parser.parse_args(argv)
    from gqa_tvm.lowering import compile_kernel

    variant = machine_variant(options.target)
    print(HEADER)
    for kernel in options.kernels:
        assembly = compile_kernel(KernelSpec.parse(kernel), variant).inspect_source("asm")
        for loop in multiplying_loops(kernel, assembly):
            print(loop.row())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
