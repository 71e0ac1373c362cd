"""A one-line progress bar on stderr, without dependencies."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

BAR_WIDTH = 28
REDRAW_SECONDS = 0.1


class ProgressBar:
    """Shows how much of ``total`` steps is done, as a context manager.

    On a terminal the line is redrawn in place; anywhere else (a log file, a pipe) one line is
    written when the work ends, so that logs stay readable.
    """

    def __init__(self, description: str, total: int, stream: TextIO | None = None) -> None:
        """``total`` is the number of steps (>= 1); ``stream`` defaults to ``sys.stderr``."""
        if total < 1:
            raise ValueError(f"total must be at least 1, got {total}")
        self.description = description
        self.total = total
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty()
        self._started = time.monotonic()
        self._next_redraw = self._started
        self._drawn_width = 0

    def __enter__(self) -> ProgressBar:
        self._redraw()
        return self

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._next_redraw = 0.0
        self._redraw()
        line = "" if self._in_place else self._line()
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def advance(self, steps: int = 1, description: str | None = None) -> None:
        """Counts ``steps`` as done and optionally says what comes next."""
        self.done = min(self.done + steps, self.total)
        if description is not None:
            self.description = description
        self._redraw()

    def _line(self) -> str:
        filled = BAR_WIDTH * self.done // self.total
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        percent = 100 * self.done // self.total
        seconds = time.monotonic() - self._started
        return f"{self.description}  [{bar}] {percent:3d} %  {seconds:.1f} s"

    def _redraw(self) -> None:
        now = time.monotonic()
        if not self._in_place or now < self._next_redraw:
            return
        self._next_redraw = now + REDRAW_SECONDS
        line = self._line()
        # A shorter description must not leave the end of a longer one behind.
        self._stream.write("\r" + line.ljust(self._drawn_width))
        self._stream.flush()
        self._drawn_width = len(line)
