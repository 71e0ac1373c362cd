"""How exact attention over quantised caches is."""

from __future__ import annotations

import os

from .errors import InvalidArgument
from .kernels import Precision

PRECISIONS = ("exact", "fast")
_VARIABLE = "ORT_MLAS_QKGEMM_S8_APPROX_VNNI"


def precision_from(name: str, approximate_qk: bool | None) -> Precision:
    """The kernels' precision: "" as exact as float32, "fast", or "approximate".

    name: "exact" or "fast". approximate_qk: query rows in 8 bits for INT8 caches; None = where the environment variable
    of ONNX Runtime is 1 and nothing else is asked for. Raises InvalidArgument.
    """
    if name not in PRECISIONS:
        raise InvalidArgument(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
    if approximate_qk is not None and not isinstance(approximate_qk, bool):
        raise InvalidArgument(f"approximate_qk must be True, False or None, got {approximate_qk!r}")
    if name == "fast":
        if approximate_qk:
            raise InvalidArgument("give precision='fast' or approximate_qk=True, not both")
        return "fast"
    wanted = os.environ.get(_VARIABLE) == "1" if approximate_qk is None else approximate_qk
    return "approximate" if wanted else ""
