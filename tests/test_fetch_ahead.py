"""flash_decode asks for every line of the cache once, some rows before it reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fetched_lines import TOKENS

from gqa_tvm.targets import architecture, missing_features

_L1_BYTES = 32768
# target, cache, heads per KV head, head size, layout: with one pass over the values and several, whole vectors and not,
# decoded on the way and ahead.
_CASES = [
    ("x86-avx512-vnni", "i8", 1, 128, "bnsh"),
    ("x86-avx512-vnni", "i8", 2, 128, "bnsh"),
    ("x86-avx512-vnni", "i8", 7, 64, "bnsh"),
    ("x86-avx512-vnni", "i4", 4, 128, "bnsh"),
    ("x86-avx512-vnni", "i8", 2, 80, "bnsh"),
    ("x86-avx512-vnni", "i8", 2, 128, "packed"),
    ("x86-avx512-vnni", "i4", 2, 128, "packed"),
    ("x86-avx512", "f16", 2, 128, "bnsh"),
    ("x86-avx2", "i4", 3, 64, "bnsh"),
    ("x86-avx2", "f16", 2, 72, "bnsh"),
]
_FLOAT32 = ("x86-avx2", "f32", 2, 128, "bnsh")
_ROW_BYTES = {"i8": 1, "i4": 0.5, "f16": 2}
_LINE = 64


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    """Case -> offsets of what was fetched of keys and of values; cases whose target does not run here are left out."""
    runs_here = architecture() == "x86-64"
    cases = [case for case in (*_CASES, _FLOAT32) if runs_here and not missing_features(case[0])]
    facts = {"GQA_TVM_FACTS": f"l1_bytes={_L1_BYTES}", "GQA_TVM_CACHE": str(tmp_path_factory.mktemp("cache"))}
    child = subprocess.run(
        [sys.executable, Path(__file__).parent / "fetched_lines.py"],
        input=json.dumps(cases),
        env={**os.environ, **facts},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return dict(zip(cases, json.loads(child.stdout), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_line_is_fetched_once(fetched, case):
    if case not in fetched:
        pytest.skip(f"{case[0]} does not run here")
    _, cache, _, head_size, layout = case
    keys_per_row = (16, 4) if layout == "packed" else (1, 1)
    for offsets, keys in zip(fetched[case], keys_per_row, strict=True):
        row_bytes = int(head_size * _ROW_BYTES[cache]) * keys
        first = _L1_BYTES // 4 // row_bytes
        rows = range(first, first + TOKENS // keys)
        assert sorted(offsets) == [row * row_bytes + byte for row in rows for byte in range(0, row_bytes, _LINE)]


@pytest.mark.slow
def test_float32_rows_are_left_to_the_prefetchers(fetched):
    if _FLOAT32 not in fetched:
        pytest.skip("x86-avx2 does not run here")
    assert fetched[_FLOAT32] == [[], []]
