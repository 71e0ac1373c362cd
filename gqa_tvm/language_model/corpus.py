"""Two bundled English texts: one to calibrate on and another one to measure perplexity on."""

from __future__ import annotations

from importlib import resources


def calibration_text() -> str:
    """About 500 words of mixed prose; never used to measure anything."""
    return _read("calibration.txt")


def evaluation_text() -> str:
    """About 1,200 words of a story (1,400 tokens of SmolLM2)."""
    return _read("evaluation.txt")


def _read(name: str) -> str:
    return resources.files("gqa_tvm.language_model").joinpath(name).read_text(encoding="utf-8")
