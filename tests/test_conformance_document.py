"""docs/conformance.md: the tests it names exist, and every known fault is there once."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "conformance.md").read_text()
RULES, FAULTS = TEXT.split("## Known faults")
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXT)
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in FAULTS.splitlines() if line.startswith("| B")]
STATUSES = ("not measured yet", "measured: ", "does not apply: ")


@lru_cache
def functions_of(file: str) -> dict[str, str]:
    """Test functions of a file with their source, decorators and comments included."""
    text = (TESTS / file).read_text()
    lines = text.splitlines()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    starts = {f.name: min([f.lineno, *(d.lineno for d in f.decorator_list)]) - 1 for f in functions}
    return {f.name: "\n".join(lines[starts[f.name] : f.end_lineno]) for f in functions if f.name.startswith("test_")}


def numbers_in_comments(source: str) -> set[str]:
    return {number for comment in re.findall(r"#(.*)", source) for number in re.findall(r"\bB\d{2,3}\b", comment)}


def test_every_named_test_exists() -> None:
    assert NAMED
    missing = [f"{file}::{name}" for file, name in NAMED if name not in functions_of(file)]
    assert not missing


def test_every_rule_has_a_test() -> None:
    rows = [line for line in RULES.splitlines() if line.startswith("| ") and not line.startswith("| rule ")]
    assert len(rows) > 50
    assert [row for row in rows if "::" not in row.split("|")[2]] == []


def test_every_fault_is_listed_once() -> None:
    listed = re.findall(r"\bB\d{2,3}\b", FAULTS.split("All of them:")[1].split("| number")[0])
    assert len(listed) == len(set(listed)) == 92
    assert [row[0] for row in ROWS] == listed


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_fault_has_tests_that_carry_its_number_or_a_status(row: list[str]) -> None:
    number, _, right, tests = row
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
    assert named or right.startswith(STATUSES)
    without = [name for file, name in named if number not in numbers_in_comments(functions_of(file)[name])]
    assert not without


def test_comments_name_listed_faults_alone() -> None:
    listed = {row[0] for row in ROWS}
    for path in TESTS.glob("test_*.py"):
        if path != Path(__file__):
            for name, source in functions_of(path.name).items():
                assert numbers_in_comments(source) <= listed, f"{path.name}::{name}"
