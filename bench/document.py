"""Rewrite the tables of a Markdown file from JSON lines, between the markers that say what belongs there.

    python bench/document.py docs/performance.md docs/performance/*.jsonl

    <!-- begin machine -->                                 the machine and its limits
    <!-- begin rows threads=1 match=^prefill_i8 -->        a table of the rows whose names contain the expression
    <!-- begin losses -->                                  all rows in which onnxruntime is faster
    <!-- begin peers threads=1 -->                         the rows of runs with --peers, which the others leave out
    <!-- begin memory -->                                  the table of bench/memory.py

each followed, at some point, by `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from report import Record, machine_lines, memory_table, peer_ratios, read_records, row_table

_SECTION = re.compile(r"(<!-- begin (?P<kind>\w+)(?P<options>[^>]*?) -->\n).*?(<!-- end -->)", re.S)


def rewrite(text: str, records: Sequence[Record]) -> str:
    """The text with every section made anew. Raises ValueError for a section of unknown kind."""

    def section(match: re.Match[str]) -> str:
        options = dict(option.split("=", 1) for option in match["options"].split())
        return f"{match[1]}\n{_content(match['kind'], options, records)}\n\n{match[4]}"

    return _SECTION.sub(section, text)


def _content(kind: str, options: dict[str, str], records: Sequence[Record]) -> str:
    if kind == "machine":
        others = sorted(record["others"] for record in records if record["kind"] == "row")
        disturbed = (
            f"Others kept {others[len(others) // 2]:.2f} cores busy in the median row, {others[-1]:.2f} at most."
        )
        machine = next(record for record in records if record["kind"] == "machine")
        # Of the first run with so many threads.
        limits = {record["threads"]: record for record in reversed(records) if record["kind"] == "limits"}
        lines = machine_lines([machine, *(limits[threads] for threads in sorted(limits))])
        return f"{lines}\n\n{disturbed}"
    if kind == "memory":
        return memory_table([record for record in records if record["kind"] == "memory"])
    rows = [record for record in records if record["kind"] == "row" and (kind == "peers") == bool(peer_ratios(record))]
    if kind == "losses":
        return _losses(rows)
    if kind in ("rows", "peers"):
        threads, name = int(options["threads"]), re.compile(options.get("match", ""))
        found = [row for row in rows if row["threads"] == threads and name.search(row["name"])]
        return row_table(found) if found else "Not measured."
    raise ValueError(f"unknown section {kind}")


def _losses(rows: Sequence[Record]) -> str:
    lost = [row for row in rows if row["ratio"] and row["ratio"]["median"] < 1]
    compared = sum(row["ratio"] is not None for row in rows)
    lines = [f"{len(lost)} of {compared} rows that onnxruntime runs too."]
    for row in sorted(lost, key=lambda row: row["ratio"]["median"]):
        ratio = row["ratio"]
        lines.append(
            f"* `{row['name']}`, threads {row['threads']}: {ratio['median']:.2f} "
            f"(quartiles {ratio['low']:.2f} to {ratio['high']:.2f})"
        )
    return "\n".join([lines[0], "", *lines[1:]]).rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("document", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="JSON lines of bench/run.py and bench/memory.py")
    arguments = parser.parse_args(argv)
    records = [record for path in arguments.results for record in read_records(path)]
    arguments.document.write_text(rewrite(arguments.document.read_text(), records))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
