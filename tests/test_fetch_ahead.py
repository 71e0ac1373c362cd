"""flash_decode asks for every line of the cache some rows before it reads it, once or twice; flash_prefill a block
before."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gqa_tvm.targets import architecture, missing_features

_L1_BYTES = 32768
_TOKENS = 768
# target, cache, heads per KV head, head size, layout, keys unless _TOKENS: whole vectors and not, decoded on
# the way and ahead.
_ONE_PASS = [
    ("x86-avx512-vnni", "i8", 1, 128, "bnsh"),
    ("x86-avx512-vnni", "i8", 7, 64, "bnsh"),
    ("x86-avx512-vnni", "i8", 2, 80, "bnsh"),
    ("x86-avx512-vnni", "i8", 2, 128, "packed"),
    ("x86-avx512-vnni", "i4", 2, 128, "packed"),
    ("x86-avx512", "f16", 2, 128, "bnsh"),
    ("x86-avx512-vnni", "f32", 2, 128, "bnsh"),
]
# These read the values of a block of keys in several passes.
_SEVERAL_PASSES = [
    ("x86-avx512-vnni", "i8", 2, 128, "bnsh"),
    ("x86-avx512-vnni", "i4", 4, 128, "bnsh"),
    ("x86-avx2", "i4", 3, 64, "bnsh"),
    ("x86-avx2", "f16", 2, 72, "bnsh"),
    ("x86-avx2", "f32", 2, 128, "bnsh"),
]
_CASES = _ONE_PASS + _SEVERAL_PASSES
# The last keys are far from the end of a block.
_SHORT = [("x86-avx512-vnni", "i8", 2, 128, "bnsh", 80), ("x86-avx2", "f16", 2, 128, "bnsh", 20)]
# Prompts: float products read rows as they are, or decode them ahead.
_PROMPTS = [
    ("x86-avx512", "f32", 2, 128, "bnsh", _TOKENS, 32),
    ("x86-avx512", "f16", 2, 128, "bnsh", _TOKENS, 32),
    ("x86-avx2", "f32", 3, 72, "bnsh", _TOKENS, 40),
    ("x86-avx2", "i4", 1, 64, "bnsh", _TOKENS, 64),
]
_ROW_BYTES = {"i8": 1, "i4": 0.5, "f16": 2, "f32": 4}
_LINE = 64


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    """Case -> offsets of what was fetched of keys and of values; cases whose target does not run here are left out."""
    runs_here = architecture() == "x86-64"
    cases = [case for case in (*_CASES, *_SHORT, *_PROMPTS) if runs_here and not missing_features(case[0])]
    facts = {"GQA_TVM_FACTS": f"l1_bytes={_L1_BYTES}", "GQA_TVM_CACHE": str(tmp_path_factory.mktemp("cache"))}
    child = subprocess.run(
        [sys.executable, Path(__file__).parent / "fetched_lines.py"],
        input=json.dumps([(*case, *(_TOKENS, 1)[len(case) - 5 :]) for case in cases]),
        env={**os.environ, **facts},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return dict(zip(cases, json.loads(child.stdout), strict=True))


def _lines(first_row: int, rows: int, row_bytes: int) -> list[int]:
    return [row * row_bytes + byte for row in range(first_row, first_row + rows) for byte in range(0, row_bytes, _LINE)]


def _offsets(fetched, case):
    if case not in fetched:
        pytest.skip(f"{case[0]} does not run here")
    return fetched[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_line_is_fetched_once(fetched, case):
    _, cache, _, head_size, layout = case
    keys_per_row = (16, 4) if layout == "packed" else (1, 1)
    offsets = _offsets(fetched, case)[: 1 if case in _SEVERAL_PASSES else 2]
    for own, keys in zip(offsets, keys_per_row, strict=False):
        row_bytes = int(head_size * _ROW_BYTES[cache]) * keys
        assert sorted(own) == _lines(_L1_BYTES // 4 // row_bytes, _TOKENS // keys, row_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("case", _SEVERAL_PASSES, ids=lambda case: "-".join(map(str, case)))
def test_several_passes_fetch_the_next_block_in_the_order_of_memory(fetched, case):
    """The last block has none after it: it fetches ahead in its first pass, as if there were no other."""
    row_bytes = int(case[3] * _ROW_BYTES[case[1]])
    offsets = _offsets(fetched, case)[1]
    block = offsets[0] // row_bytes
    assert block % 64 == 0 and _TOKENS % block == 0
    followed, last = offsets[: -block * len(_lines(0, 1, row_bytes))], offsets[-block * len(_lines(0, 1, row_bytes)) :]
    assert followed == _lines(block, _TOKENS - block, row_bytes)
    assert sorted(last) == _lines(_TOKENS - block + _L1_BYTES // 4 // row_bytes, block, row_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("case", _SHORT, ids=lambda case: "-".join(map(str, case)))
def test_loops_over_keys_end_with_the_last_one(fetched, case):
    """Keys come in steps, of 64 at most; values by fours."""
    keys, values = _offsets(fetched, case)
    row_bytes, tokens = int(case[3] * _ROW_BYTES[case[1]]), case[5]
    assert tokens * row_bytes <= len(keys) * _LINE < (tokens + 64) * row_bytes
    assert len(values) * _LINE == tokens * row_bytes


@pytest.mark.slow
@pytest.mark.parametrize("case", _PROMPTS, ids=lambda case: "-".join(map(str, case)))
def test_a_prompt_fetches_every_line_of_the_next_block(fetched, case):
    """In the order of memory, a few times each; nothing of the first block, nothing beyond the one after the last."""
    row_bytes = int(case[3] * _ROW_BYTES[case[1]])
    for own in _offsets(fetched, case):
        rows = [byte // row_bytes for byte in own]
        block = min(rows)
        assert block % 4 == 0 and block <= 96 and max(rows) < (_TOKENS // block + 2) * block
        followed = _TOKENS // block * block - block
        assert set(_lines(block, followed - block, row_bytes)) <= set(own)
        assert sum(a > b for a, b in itertools.pairwise(rows)) <= 2 * _TOKENS // block
        assert max(own.count(byte) for byte in set(own)) <= 64
