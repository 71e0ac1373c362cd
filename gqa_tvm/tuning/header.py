"""Where, with what and how tuned sizes were measured."""

from __future__ import annotations

import platform
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from .logs import Header

_PACKAGES = ("gqa-tvm", "apache-tvm", "apache-tvm-ffi", "xgboost", "numpy")


def log_header(rpc: str | None) -> Header:
    """The head of a log. rpc: address of the tracker whose device measured, None = this machine did."""
    return {
        "cpu": "the device behind the tracker" if rpc else cpu_model(),
        "measured": "runs of the kernel over RPC" if rpc else "whole calls of the operator",
        "versions": {name: _version(name) for name in _PACKAGES},
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": " ".join(["gqa-tvm", *sys.argv[1:]]) if sys.argv and "gqa" in Path(sys.argv[0]).name else "tune()",
    }


def cpu_model() -> str:
    """The name that the CPU gives itself, with family and model number where it has them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = [line.split(":", 1) for line in reversed(lines) if ":" in line]
    fields = {name.strip(): value.strip() for name, value in pairs}
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
