"""Types of command line arguments that several subcommands take."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """An integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def positive_list(text: str) -> list[int]:
    """Integers of at least 1, separated by commas."""
    return [positive(part) for part in text.split(",")]


def name_list(text: str) -> list[str]:
    """Names, separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    number = float(text)
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0, got {number}")
    return number
