"""What this machine can do at most, measured in the same run as the rows it is compared with."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
# From what fits a core's own cache to what no cache holds.
WORKING_SETS = (MIB // 2, 2 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 256 * MIB)
_SOURCE = Path(__file__).with_name("limits.c")
# The widest vectors first; what every compiler takes last.
_FLAGS = (["-O3", "-march=native"], ["-O3", "-mcpu=native"], ["-O2"])
_FMA_REPEATS = 4_000_000
_READ_BYTES = 512 * MIB
_ATTEMPTS = 5


@dataclass(frozen=True)
class Limits:
    """threads that worked; flops: float32 operations a second; bandwidths: bytes a second by bytes of working set."""

    threads: int
    flops: float
    bandwidths: dict[int, float]

    def bandwidth(self, working_set: int) -> float:
        """Bytes a second from a working set of so many bytes, between two measured ones on logarithmic axes."""
        sizes = sorted(self.bandwidths)
        if working_set <= sizes[0]:
            return self.bandwidths[sizes[0]]
        for low, high in itertools.pairwise(sizes):
            if working_set <= high:
                share = math.log(working_set / low) / math.log(high / low)
                return self.bandwidths[low] ** (1 - share) * self.bandwidths[high] ** share
        return self.bandwidths[sizes[-1]]

    def seconds(self, flops: float, read_bytes: int, working_set: int) -> float:
        """The least time for so much work: the larger of arithmetic at its peak and reading at the bandwidth."""
        return max(flops / self.flops, read_bytes / self.bandwidth(working_set))


def measure_limits(threads: int) -> Limits:
    """Best of several attempts each, as disturbance only takes away. Raises RuntimeError without a C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        library = _compile(Path(folder))
        flops, bandwidths = 0.0, dict.fromkeys(WORKING_SETS, 0.0)
        for _ in range(_ATTEMPTS):
            flops = max(flops, library.peak_flops(threads, _FMA_REPEATS))
            for size, best in bandwidths.items():
                repeats = max(1, _READ_BYTES // size)
                bandwidths[size] = max(best, library.read_bandwidth(size, threads, repeats))
    return Limits(threads, flops, bandwidths)


def _compile(folder: Path) -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the limits of this machine need a C compiler (gcc, cc or CC)")
    path = folder / "limits.so"
    for flags in _FLAGS:
        command = [compiler, *flags, "-std=gnu11", "-fPIC", "-shared", "-pthread", str(_SOURCE), "-o", str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            break
    else:
        raise RuntimeError(f"{compiler} cannot compile {_SOURCE.name}: {result.stderr}")
    library = ctypes.CDLL(str(path))
    library.peak_flops.argtypes = (ctypes.c_int, ctypes.c_long)
    library.read_bandwidth.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_long)
    library.peak_flops.restype = library.read_bandwidth.restype = ctypes.c_double
    return library
