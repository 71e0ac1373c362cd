"""Queries that are hard for fixed-point arithmetic: functions that change the inputs of a call."""

from __future__ import annotations

import numpy as np


def _heavy_tail(inputs):
    inputs["query"] = inputs["query"] * 0.02
    inputs["query"][..., ::16] *= 100


QUERIES = {
    "random": lambda inputs: None,
    "heavy-tailed": _heavy_tail,
    "constant": lambda inputs: inputs.update(query=np.full_like(inputs["query"], 0.3)),
    "tiny": lambda inputs: inputs.update(query=inputs["query"] * np.float32(1e-20)),
    "huge": lambda inputs: inputs.update(query=inputs["query"] * np.float32(1e20)),
    "zero": lambda inputs: inputs.update(query=np.zeros_like(inputs["query"])),
}
