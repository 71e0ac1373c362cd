"""The operator, the float64 reference and live onnxruntime on one configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from configuration import Call, Configuration, retained_rows
from oracle import OracleError, OracleResult, comparable_rows, run_onnxruntime

from gqa_tvm import GroupQueryAttention
from gqa_tvm.reference import ReferenceResult, group_query_attention, visible_keys

Operate = Callable[[Configuration, Call], Any]
# Relative to max(1, |wanted|). A result is rounded once: half a unit in the last place on top of float32's error.
REFERENCE_TOLERANCE = {"float32": 1e-5, "float16": 1e-5 + 2.0**-11, "bfloat16": 1e-5 + 2.0**-8}
ORACLE_TOLERANCE = {"float32": 1e-5, "float16": 2e-3}


class NotACall(Exception):
    """Reference or onnxruntime refuse the configuration."""


class Mismatch(AssertionError):
    """`name`: the output that is off, or "call" for one that is refused; `wanted_by`: "reference" or "onnxruntime"."""

    def __init__(self, name: str, wanted_by: str, text: str) -> None:
        super().__init__(f"{name} is not what the {wanted_by} says: {text}")
        self.name, self.wanted_by = name, wanted_by


def run_operator(configuration: Configuration, call: Call) -> Any:
    """The operator's result; the call's arrays stay as they are."""
    inputs = {name: None if array is None else array.copy() for name, array in call.inputs.items()}
    present = {}
    if configuration.in_place:
        present = {"present_key": inputs["past_key"], "present_value": inputs["past_value"]}
    return GroupQueryAttention(strategy=configuration.strategy, **call.attributes)(**inputs, **present)


def run_reference(configuration: Configuration, call: Call) -> ReferenceResult:
    try:
        return group_query_attention(**call.inputs, **call.attributes, in_place=configuration.in_place)
    except ValueError as error:
        raise NotACall(str(error)) from error


def run_oracle(configuration: Configuration, call: Call) -> OracleResult:
    try:
        return run_onnxruntime(call.attributes, call.inputs, in_place=configuration.in_place)
    except OracleError as error:
        raise NotACall(str(error)) from error


def check(configuration: Configuration, operate: Operate = run_operator) -> None:
    """Raises Mismatch where the operator differs from the reference, or from onnxruntime without a rule for it."""
    call = configuration.draw()
    wanted = run_reference(configuration, call)
    oracle = None if difference(configuration) else run_oracle(configuration, call)
    try:
        got = operate(configuration, call)
    except Exception as error:
        raise Mismatch("call", "reference", f"{type(error).__name__}: {error}") from error
    tolerance = REFERENCE_TOLERANCE[configuration.query]
    compare(configuration, got, wanted, np.ones(wanted.output.shape[:2], bool), tolerance, "reference")
    if oracle is not None:
        rows = rows_like_onnxruntime(configuration, call)
        compare(configuration, got, oracle, rows, ORACLE_TOLERANCE[configuration.query], "onnxruntime")


def check_reference(configuration: Configuration) -> None:
    """Raises Mismatch where the reference differs from onnxruntime without a rule for it."""
    call = configuration.draw()
    wanted, oracle = run_reference(configuration, call), run_oracle(configuration, call)
    rows = rows_like_onnxruntime(configuration, call)
    compare(configuration, wanted, oracle, rows, ORACLE_TOLERANCE[configuration.query], "onnxruntime")


def difference(configuration: Configuration) -> str | None:
    """The rule of docs/differences.md for a call that onnxruntime refuses or computes otherwise; None = it is asked."""
    c = configuration
    rules = {
        "#D2": c.stale_nan,
        "#D4": c.position_columns > c.new_tokens and c.batch > 1 and c.rotary > 0 and not c.is_prompt,
        "#D6": _has_own_sizes(c),
        "#D7": c.norm or c.query == "bfloat16",
        "#D9": not c.bits and c.cache != c.query,
        # Codes without past: the type of present is not known.
        "#D5": c.bits > 0 and c.capacity is None,
    }
    return next((rule for rule, holds in rules.items() if holds), None)


def _has_own_sizes(c: Configuration) -> bool:
    multiple = 16 if c.rotary else 8
    if c.sliding:
        multiple = {8: 16, 4: 32}.get(c.bits, multiple)
    return bool(c.head_size % multiple or c.rotary % 8)


def rows_like_onnxruntime(configuration: Configuration, call: Call) -> np.ndarray:
    """bool [B, S]: rows without a rule of docs/differences.md, #D1 for what bias masks fully, #D4 for padding."""
    rows = comparable_rows(call.attributes, call.inputs)
    bias = call.inputs["attention_bias"]
    if bias is None:
        return rows
    open_keys = np.broadcast_to(np.isfinite(bias), (configuration.batch, *bias.shape[1:]))
    for b, s in np.argwhere(rows):
        past, total = int(configuration.pasts[b]), configuration.totals[b]
        seen = visible_keys(int(s), past, total, configuration.causal == 1, configuration.window)
        rows[b, s] = seen.start == seen.stop or open_keys[b, :, s, seen].any(axis=-1).all()
    return rows


def compare(
    configuration: Configuration, got: Any, wanted: Any, rows: np.ndarray, tolerance: float, wanted_by: str
) -> None:
    """Bytes of the cache rows that hold a position or, without a window, of all; other results in rows [B, S]."""
    for name in "present_key", "present_value":
        _compare_caches(configuration, getattr(got, name), getattr(wanted, name), name, wanted_by)
    _compare_numbers(got.output[rows], wanted.output[rows], tolerance, "output", wanted_by)
    if (got.output_qk is None) != (wanted.output_qk is None):
        raise Mismatch("output_qk", wanted_by, "only one of them gives it")
    if wanted.output_qk is not None:
        scores, wanted_scores = (result.output_qk.swapaxes(1, 2)[rows] for result in (got, wanted))
        _compare_numbers(scores, wanted_scores, tolerance, "output_qk", wanted_by)


def _compare_caches(
    configuration: Configuration, got: np.ndarray, wanted: np.ndarray, name: str, wanted_by: str
) -> None:
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        came, expected = (f"{array.dtype} {array.shape}" for array in (got, wanted))
        raise Mismatch(name, wanted_by, f"{came} instead of {expected}")
    differs = got.view(f"u{got.itemsize}") != wanted.view(f"u{got.itemsize}")
    if configuration.sliding:
        held = np.array([retained_rows(total, configuration) for total in configuration.totals])
        differs &= (np.arange(got.shape[2]) < held[:, None])[:, None, :, None]
    if differs.any():
        first = tuple(np.argwhere(differs)[0].tolist())
        raise Mismatch(
            name, wanted_by, f"{differs.sum()} elements differ, first {first}: {got[first]} for {wanted[first]}"
        )


def _compare_numbers(got: np.ndarray, wanted: np.ndarray, tolerance: float, name: str, wanted_by: str) -> None:
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    # Infinite scores are equal or wrong.
    with np.errstate(invalid="ignore"):
        error = np.abs(got - wanted) / np.maximum(1, np.abs(wanted))
    wrong = (got != wanted) & ~(error <= tolerance)
    if wrong.any():
        raise Mismatch(
            name, wanted_by, f"{wrong.sum()} of {wrong.size} are wrong, the largest error is {error[wrong].max():.3g}"
        )
