"""A small writer of charts as SVG: lines and points on logarithmic axes, and horizontal bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Colours that stay apart for colour-blind readers (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 220, 40, 55
_BAR, _BAR_LEFT = 20, 300


@dataclass(frozen=True)
class Series:
    """points (x, y), both positive; without `line` they stand alone, `hollow` and `dashed` as they say."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    line: bool = True
    dashed: bool = False
    hollow: bool = False
    marks: bool = True


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], x_ticks: Sequence[float] = ()) -> str:
    """An SVG document with both axes logarithmic. x_ticks: where to label x, powers of ten if left out.

    Raises ValueError without a point.
    """
    points = [point for one in series for point in one.points]
    if not points:
        raise ValueError(f"{title}: nothing to draw")
    x_axis = _Axis.around([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
    y_axis = _Axis.around([y for _, y in points], _HEIGHT - _BOTTOM, _TOP)
    parts = [_text(_LEFT, 22, title, size=15), _frame()]
    for x in x_ticks or x_axis.ticks():
        at = x_axis.place(x)
        parts += [_rule(at, _TOP, at, _HEIGHT - _BOTTOM), _text(at, _HEIGHT - _BOTTOM + 18, _number(x), "middle")]
    for y in y_axis.ticks():
        at = y_axis.place(y)
        parts += [_rule(_LEFT, at, _WIDTH - _RIGHT, at), _text(_LEFT - 8, at + 4, _number(y), "end")]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, x_label, "middle"))
    parts.append(f'<g transform="rotate(-90 16 {_HEIGHT / 2})">{_text(16, _HEIGHT / 2, y_label, "middle")}</g>')
    for number, one in enumerate(series):
        parts += _draw(one, x_axis, y_axis)
        parts += _legend(one, _TOP + 14 + 20 * number)
    return _document(_WIDTH, _HEIGHT, parts)


def bar_chart(title: str, bars: Sequence[tuple[str, float]], reference: float, reference_label: str) -> str:
    """Horizontal bars from 0, and a line at `reference`; bars that fall short of it are orange. ValueError if empty."""
    if not bars:
        raise ValueError(f"{title}: nothing to draw")
    height = _TOP + _BAR * len(bars) + 30
    scale = (_WIDTH - _BAR_LEFT - 60) / max(*(value for _, value in bars), reference)
    parts = [_text(16, 22, title, size=15)]
    for number, (label, value) in enumerate(bars):
        y = _TOP + _BAR * number
        colour = COLOURS[0] if value >= reference else COLOURS[1]
        parts.append(_text(_BAR_LEFT - 8, y + 14, label, "end"))
        parts.append(
            f'<rect x="{_BAR_LEFT}" y="{y + 3}" width="{value * scale:.1f}" height="{_BAR - 6}" fill="{colour}"/>'
        )
        parts.append(_text(_BAR_LEFT + value * scale + 5, y + 14, f"{value:.2f}"))
    at, bottom = _BAR_LEFT + reference * scale, height - 26
    parts.append(f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="#333" stroke-dasharray="4 3"/>')
    parts.append(_text(at, bottom + 16, reference_label, "middle"))
    return _document(_WIDTH, height, parts)


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis from pixel `start` to `end`; low and high are powers of ten's exponents, any real."""

    low: float
    high: float
    start: float
    end: float

    @staticmethod
    def around(values: Sequence[float], start: float, end: float) -> _Axis:
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = max(0.05 * (high - low), 0.05)
        return _Axis(low - margin, high + margin, start, end)

    def place(self, value: float) -> float:
        return self.start + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten, or the powers alone where there are many."""
        factors = (1, 2, 5) if self.high - self.low < 2.5 else (1,)
        exponents = range(math.floor(self.low), math.ceil(self.high) + 1)
        candidates = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        return [value for value in candidates if self.low <= math.log10(value) <= self.high]


def _draw(series: Series, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in series.points]
    parts = []
    if series.line:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="M{path}" fill="none" {_stroke(series)}/>')
    if series.marks:
        parts += [_mark(x, y, series) for x, y in places]
    return parts


def _legend(series: Series, y: float) -> list[str]:
    x = _WIDTH - _RIGHT + 14
    parts = [f'<path d="M{x} {y}h26" {_stroke(series)}/>'] if series.line else []
    parts += [_mark(x + 13, y, series)] if series.marks else []
    return [*parts, _text(x + 34, y + 4, series.label)]


def _stroke(series: Series) -> str:
    dashes = ' stroke-dasharray="6 4"' if series.dashed else ""
    return f'stroke="{series.colour}" stroke-width="2"{dashes}'


def _mark(x: float, y: float, series: Series) -> str:
    fill = "#fff" if series.hollow else series.colour
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{series.colour}" stroke-width="1.5"/>'


def _frame() -> str:
    return f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" fill="none" stroke="#333"/>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 else f"{value:.0e}"


def _document(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    style = ' font-family="sans-serif" fill="#222">'
    return "\n".join([head + style, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>"]) + "\n"
