"""How exact attention over quantised caches is."""

from __future__ import annotations

import os

from .errors import InvalidArgument
from .kernels import Precision

PRECISIONS: dict[str, Precision] = {"exact": "", "balanced": "balanced", "fast": "fast"}
_VARIABLE = "ORT_MLAS_QKGEMM_S8_APPROX_VNNI"


def precision_from(name: str, approximate_qk: bool | None) -> Precision:
    """The kernels' precision, "" = as exact as float32.

    name: "exact", "balanced" or "fast". approximate_qk: query rows in 8 bits for INT8 caches; None = where ONNX
    Runtime's environment variable is 1 and nothing else is asked for. Raises InvalidArgument.
    """
    if name not in PRECISIONS:
        raise InvalidArgument(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
    if approximate_qk is not None and not isinstance(approximate_qk, bool):
        raise InvalidArgument(f"approximate_qk must be True, False or None, got {approximate_qk!r}")
    if PRECISIONS[name]:
        if approximate_qk:
            raise InvalidArgument(f"give precision={name!r} or approximate_qk=True, not both")
        return PRECISIONS[name]
    wanted = os.environ.get(_VARIABLE) == "1" if approximate_qk is None else approximate_qk
    return "approximate" if wanted else ""
