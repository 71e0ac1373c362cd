"""The tool that times tuned sizes beside the defaults: what it leaves out, what it prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import tuned
from timing import Spread
from workloads import decode

SMALL = decode("f32", 24, 4, 2, 16)


def test_shapes_with_default_sizes_are_left_out(capsys, monkeypatch):
    monkeypatch.setattr(tuned, "SELECTIONS", {"documentation": (SMALL,)})
    monkeypatch.setattr(tuned, "operators", lambda call, threads: {name: _Same() for name in ("tuned", "default")})
    assert tuned.main([]) == 1
    assert "1 other shapes run with the default sizes" in capsys.readouterr().out


class _Same:
    """An operator whose plan is always the same."""

    def __init__(self, sizes: object = 1, shift: float = 0.0) -> None:
        self.last_plan = type("Plan", (), {"block_sizes": sizes})
        self.shift = shift

    def __call__(self, **inputs):
        return type("Result", (), {"output": inputs["query"] + self.shift})


@pytest.mark.parametrize("shift,code", [(0.0, 0), (0.1, 1)])
def test_a_table_of_right_results_only(capsys, monkeypatch, shift, code):
    monkeypatch.setattr(tuned, "SELECTIONS", {"documentation": (SMALL,)})
    both = lambda call, threads: {"tuned": _Same(2, shift), "default": _Same(1)}  # noqa: E731
    monkeypatch.setattr(tuned, "operators", both)
    monkeypatch.setattr(tuned, "measure", lambda *rest: {"tuned": [1e-3, 1e-3], "default": [2e-3, 2e-3]})
    assert tuned.main([]) == code
    printed = capsys.readouterr()
    assert ("2.000" in printed.out) == (code == 0) and ("differ" in printed.err) == (code == 1)


def test_a_slower_shape_is_bold():
    line, gain = tuned.row(SMALL, 1, {"tuned": [2.0, 2.0], "default": [1.0, 1.0]})
    assert "**0.500**" in line and gain == Spread.of([0.5, 0.5]).median
