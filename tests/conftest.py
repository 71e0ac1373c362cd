"""Memory a kernel must write before it reads is filled with NaN in all tests, so that a slip shows."""

from __future__ import annotations

import os

# Scratch memory: the launcher reads this when it is loaded.
os.environ.setdefault("GQA_TVM_POISON_SCRATCH", "1")

import numpy as np
import pytest

from gqa_tvm import arrays, kernel_calls, operator


def _poisoned(shape, dtype):
    array = arrays.aligned_empty(shape, dtype)
    array.fill(np.nan)
    return array


@pytest.fixture(autouse=True)
def poison_outputs(monkeypatch):
    """Outputs and the partial states of flash decoding start as NaN."""
    for module in (operator, kernel_calls):
        monkeypatch.setattr(module, "aligned_empty", _poisoned)
