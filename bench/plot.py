"""Pictures of a run as SVG: latency over T, naive against flash, speed-up bars, roofline.

    python bench/plot.py docs/performance/ docs/performance/threads_1.jsonl docs/performance/threads_2.jsonl

Writes `<picture>_<threads>.svg` for every number of threads in the files; a picture without rows is left out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contenders import ORT_FLASH, ORT_NAIVE, OURS, OURS_NAIVE
from limits import MIB
from report import Record, read_records
from svg import COLOURS, Series, bar_chart, line_chart

_DECODE = re.compile(r"decode_(?P<cache>f32|i8|i4)_t(?P<keys>\d+)_n16_kv8_h128")
_BARS = re.compile(r"(prefill|decode)_\w+_(s512|s2048|t4096|t32768)_n16_kv8_h128")
_PATHS = ((OURS, "gqa_tvm flash"), (OURS_NAIVE, OURS_NAIVE), (ORT_FLASH, ORT_FLASH), (ORT_NAIVE, ORT_NAIVE))
_GREY = "#666"


def decode_latency(rows: Sequence[Record], limits: Record) -> str:
    """Milliseconds of a decode step over T, three caches, this project and the better path of onnxruntime."""
    series = []
    for colour, cache in zip(COLOURS, ("f32", "i8", "i4"), strict=False):
        found = [(int(m["keys"]), row) for row in rows if (m := _DECODE.fullmatch(row["name"])) and m["cache"] == cache]
        ours = [(keys, _milliseconds(row, OURS)) for keys, row in found]
        theirs = [(keys, _milliseconds(row, row["best_onnxruntime"])) for keys, row in found if row["best_onnxruntime"]]
        series.append(Series(f"gqa_tvm {cache}", sorted(ours), colour))
        series.append(Series(f"onnxruntime {cache}", sorted(theirs), colour, dashed=True, hollow=True))
    return _over_length("Decode, 16/8 heads, H = 128", "keys T", series, limits)


def naive_against_flash_prefill(rows: Sequence[Record], limits: Record) -> str:
    """Both paths of both, prompts of an INT8 cache."""
    series = _path_series(rows, re.compile(r"prefill_i8_s(\d+)_n16_kv8_h128"))
    return _over_length("Prefill, INT8 cache, 16/8 heads, H = 128", "tokens S", series, limits)


def naive_against_flash_decode(rows: Sequence[Record], limits: Record) -> str:
    """Both paths of both, decode steps over an INT8 cache."""
    series = _path_series(rows, re.compile(r"decode_i8_t(\d+)_n16_kv8_h128"))
    return _over_length("Decode, INT8 cache, 16/8 heads, H = 128", "keys T", series, limits)


def speed_up(rows: Sequence[Record], limits: Record) -> str:
    """onnxruntime's better path over this project's time, 16/8 heads."""
    bars = [(row["name"], row["ratio"]["median"]) for row in rows if _BARS.fullmatch(row["name"]) and row["ratio"]]
    bars.sort(key=lambda bar: -bar[1])
    return bar_chart(f"onnxruntime's time / ours, {_threads(limits)}", bars, 1.0, "equal")


def roofline(rows: Sequence[Record], limits: Record) -> str:
    """Useful float operations a second over operations per byte of cache, under what the machine can do."""
    rows = [row for row in rows if row["read_bytes"] and row["flops"] > MIB]
    bandwidths = {int(size): value for size, value in limits["bandwidths"].items()}
    intensities = [row["flops"] / row["read_bytes"] for row in rows]
    series = [
        _roof(f"read from {size // MIB} MiB", bandwidths[size], limits["flops"], intensities, dashed)
        for size, dashed in ((max(bandwidths), False), (8 * MIB, True))
        if intensities
    ]
    shown = (("gqa_tvm", OURS, COLOURS[0], False), ("onnxruntime, better path", None, COLOURS[1], True))
    for label, contender, colour, hollow in shown:
        points = []
        for row, intensity in zip(rows, intensities, strict=True):
            name = contender or row["best_onnxruntime"]
            if name:
                points.append((intensity, row["flops"] / row["seconds"][name]["median"] / 1e9))
        series.append(Series(label, points, colour, line=False, hollow=hollow))
    title = f"Roofline, {_threads(limits)}"
    return line_chart(title, "useful operations per byte of visible cache", "GF/s", series)


PICTURES: tuple[Callable[[Sequence[Record], Record], str], ...] = (
    decode_latency,
    naive_against_flash_prefill,
    naive_against_flash_decode,
    speed_up,
    roofline,
)


def _roof(label: str, bandwidth: float, flops: float, intensities: Sequence[float], dashed: bool) -> Series:
    low, high = min(intensities), max(*intensities, 2 * flops / bandwidth)
    points = [(x, min(x * bandwidth, flops) / 1e9) for x in (low, flops / bandwidth, high)]
    return Series(label, points, _GREY, dashed=dashed, marks=False)


def _path_series(rows: Sequence[Record], name: re.Pattern[str]) -> list[Series]:
    found = [(int(match[1]), row) for row in rows if (match := name.fullmatch(row["name"]))]
    series = []
    for number, (contender, label) in enumerate(_PATHS):
        points = sorted((length, _milliseconds(row, contender)) for length, row in found if contender in row["seconds"])
        is_ours = number < 2
        style: dict[str, Any] = {} if is_ours else {"dashed": True, "hollow": True}
        series.append(Series(label, points, COLOURS[number % 2], **style))
    return series


def _over_length(title: str, x_label: str, series: Sequence[Series], limits: Record) -> str:
    lengths = sorted({x for one in series for x, _ in one.points})
    return line_chart(f"{title}, {_threads(limits)}", x_label, "ms", [s for s in series if s.points], lengths)


def _milliseconds(row: Record, contender: str) -> float:
    return 1e3 * row["seconds"][contender]["median"]


def _threads(limits: Record) -> str:
    return f"{limits['threads']} thread{'s' if limits['threads'] > 1 else ''}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="JSON lines of bench/run.py")
    arguments = parser.parse_args(argv)
    records = [record for path in arguments.results for record in read_records(path)]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for limits in (record for record in records if record["kind"] == "limits"):
        rows = [r for r in records if r["kind"] == "row" and r["threads"] == limits["threads"]]
        for picture in PICTURES:
            try:
                text = picture(rows, limits)
            except ValueError as error:
                print(f"left out: {error}")
                continue
            (arguments.folder / f"{picture.__name__}_{limits['threads']}.svg").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
