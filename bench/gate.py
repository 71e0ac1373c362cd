"""No time without a right result: every contender computes the timed call once and is compared before it is timed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from calls import Call, Gemm
from contenders import OURS, OURS_NAIVE, Contender
from workloads import Workload

from gqa_tvm.primitives import kv_dequantize
from gqa_tvm.reference import group_query_attention

# Of max(1, |wanted|).
TOLERANCES = {"f32": 1e-5}
# Of the largest result: a float16 one is rounded once, sums in float16 are off by more.
ROUNDED = {"f16": 2e-3}
# The same for this project when it was asked for less than float32's precision.
REDUCED = {"balanced": 1e-3, "fast": 1e-3, "approximate": 5e-2}
# The float64 reference takes about a second for so much.
_REFERENCE_FLOPS = 150_000_000


def exact_tolerance(query: str, wanted: np.ndarray) -> float:
    """What an exact result may differ by from `wanted`, of max(1, |wanted|)."""
    return ROUNDED[query] * float(np.abs(wanted).max()) if query in ROUNDED else TOLERANCES[query]


class WrongResult(Exception):
    """A contender's result is off; carries its name and by how much."""


def check_operator(workload: Workload, call: Call, contenders: Sequence[Contender]) -> list[Contender]:
    """The contenders that are right, ours all of them. Writes the cache rows of the call.

    Small calls are compared with the float64 reference, large ones with the last contender that is not this project's
    own, else with the naive path. Raises WrongResult when a result of this project is off.
    """
    judge = None
    if workload.flops <= _REFERENCE_FLOPS:
        wanted = group_query_attention(**call.inputs, **call.attributes, in_place=True)
        truth = wanted.output, written_rows(workload, wanted.present_key, wanted.present_value)
    else:
        judge = _judge(contenders)
        truth = _results_of(workload, call, judge)
    right = []
    for contender in contenders:
        try:
            if contender is not judge:
                _compare(workload, contender, _results_of(workload, call, contender), truth)
        except WrongResult as error:
            if contender.name in (OURS, OURS_NAIVE):
                raise
            print(f"\n{workload.name}: left out: {error}", file=sys.stderr, flush=True)
            continue
        right.append(contender)
    return right


def check_gemm(workload: Workload, gemm: Gemm, contenders: Sequence[Contender]) -> None:
    """Raises WrongResult. Products of K or T terms: the tolerance is of the largest result."""
    values = kv_dequantize(gemm.codes, gemm.scale, gemm.bits).astype(np.float64)
    wanted = gemm.rows @ (values.T if workload.operation == "qk_gemm" else values)
    for contender in contenders:
        contender.runs[0]()
        _compare_arrays(contender.name, contender.output(), wanted, TOLERANCES["f32"] * float(np.abs(wanted).max()))


def written_rows(workload: Workload, keys: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """Copies of the rows of [B, N_kv, T, columns] that the call writes, entry by entry, keys before values."""
    return [
        side[b, :, total - workload.tokens : total].copy()
        for side in (keys, values)
        for b, total in enumerate(workload.totals)
    ]


def _judge(contenders: Sequence[Contender]) -> Contender:
    own = [contender for contender in contenders if contender.name in (OURS, OURS_NAIVE)]
    others = [contender for contender in contenders if contender not in own and contender.writes_cache]
    if others:
        return others[-1]
    if len(own) < 2:
        raise WrongResult("nothing to compare with: no onnxruntime, and too large for the reference")
    return own[-1]


def _results_of(workload: Workload, call: Call, contender: Contender) -> tuple[np.ndarray, list[np.ndarray] | None]:
    """(output, rows it wrote) of a call whose new cache rows are zeros before it."""
    caches = call.inputs["past_key"], call.inputs["past_value"]
    if not contender.writes_cache:
        contender.runs[0]()
        return contender.output(), None
    for side in caches:
        for b, total in enumerate(workload.totals):
            side[b, :, total - workload.tokens : total] = 0
    contender.runs[0]()
    return contender.output(), written_rows(workload, *caches)


def _compare(workload: Workload, contender: Contender, got: Any, wanted: Any) -> None:
    tolerance = exact_tolerance(workload.query, wanted[0])
    if contender.name == OURS and workload.precision != "exact":
        tolerance = REDUCED[workload.precision] * float(np.abs(wanted[0]).max())
    elif contender.tolerance is not None:
        tolerance = contender.tolerance * float(np.abs(wanted[0]).max())
    _compare_arrays(contender.name, got[0], wanted[0], tolerance)
    if got[1] is None:
        return
    for ours, theirs in zip(got[1], wanted[1], strict=True):
        if ours.tobytes() != theirs.tobytes():
            raise WrongResult(f"{contender.name}: the rows it wrote into the cache are others")


def _compare_arrays(name: str, got: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    """|got - wanted| <= tolerance * max(1, |wanted|), which no NaN passes."""
    if got.shape != wanted.shape:
        raise WrongResult(f"{name}: shape {got.shape}, wanted {wanted.shape}")
    wanted = wanted.astype(np.float64)
    error = np.abs(got.astype(np.float64) - wanted) / np.maximum(1.0, np.abs(wanted))
    if not (error <= tolerance).all():
        worst = "NaN" if np.isnan(error).any() else f"{error.max():.2g}"
        raise WrongResult(f"{name}: off by {worst}, allowed {tolerance:.2g}")
