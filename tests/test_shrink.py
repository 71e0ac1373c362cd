"""Planted faults are found, shrunk to what they need, and printed as a program that shows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from configuration import Call, Configuration
from parity import check, run_operator
from shrink import find_mismatch, program, shrink

import gqa_tvm

BUSY = Configuration(
    seed=11,
    kv_heads=2,
    group=2,
    head_size=16,
    new_tokens=3,
    total=12,
    totals=(12, 9),
    counts=(3, 2),
    capacity=16,
    scale=0.3,
    softcap=2.5,
    window=7,
    smooth=True,
    bias="BN",
    bias_masks=True,
    rotary=8,
    interleaved=True,
    position_columns=3,
    cache="int8",
    per_channel=True,
    in_place=True,
    strategy="naive",
    seqlens_shape=1,
)


def _without(name: str) -> Any:
    """An operator that does not know an attribute."""

    def operate(configuration: Configuration, call: Call) -> Any:
        attributes = {key: value for key, value in call.attributes.items() if key != name}
        return run_operator(configuration, call._replace(attributes=attributes))

    return operate


def _last_value_missing(configuration: Configuration, call: Call) -> Any:
    """An operator that does not write the newest row of every entry with more than one new token."""
    result = run_operator(configuration, call)
    present = result.present_value.copy()
    for b, total in enumerate(configuration.totals):
        if configuration.new_tokens > 1:
            present[b, :, total - 1] = 0
    return result._replace(present_value=present)


def _packs_badly(configuration: Configuration, call: Call) -> Any:
    """An operator that refuses more than one entry."""
    if configuration.batch > 1:
        raise gqa_tvm.InvalidArgument("batch size")
    return run_operator(configuration, call)


FAULTS = {
    "softcap": (_without("softcap"), "output", {"softcap", "total", "totals", "capacity"}),
    "window": (_without("local_window_size"), "output", {"window", "total", "totals", "capacity"}),
    "interleaved": (_without("rotary_interleaved"), "present_key", {"interleaved", "rotary", "head_size"}),
    "newest row": (_last_value_missing, "present_value", {"new_tokens", "total", "totals", "capacity"}),
    "batch": (_packs_badly, "call", {"totals"}),
}


def test_the_busy_call_is_right() -> None:
    check(BUSY)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_shrunk_to_what_it_needs(fault: str) -> None:
    operate, name, needed = FAULTS[fault]
    mismatch = find_mismatch(BUSY, operate)
    assert mismatch is not None
    assert (mismatch.name, mismatch.wanted_by) == (name, "reference")
    small = shrink(BUSY, mismatch, operate)
    assert find_mismatch(small, operate) is not None
    plain = Configuration(seed=small.seed)
    changed = {field for field, value in vars(small).items() if value != getattr(plain, field)}
    assert changed <= needed, str(small)
    assert small.kv_heads * small.new_tokens * small.total * small.batch <= 16, str(small)


@pytest.mark.slow
@pytest.mark.parametrize("wanted_by", ["reference", "onnxruntime"])
def test_the_program_shows_the_fault(wanted_by: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Ten lines, run with the operator as it is and with one that ignores softcap."""
    mismatch = find_mismatch(BUSY, _without("softcap"))
    assert mismatch is not None
    small = shrink(BUSY, mismatch, _without("softcap"))
    mismatch.wanted_by = wanted_by
    source = program(small, mismatch)
    # onnxruntime as judge needs one import more.
    assert len(source.splitlines()) <= 10 + (wanted_by == "onnxruntime"), source
    assert max(map(len, source.splitlines())) <= 120, source
    exec(source, {})
    assert float(capsys.readouterr().out) < 1e-5
    right = gqa_tvm.GroupQueryAttention

    def faulty(softcap: float, **attributes: Any) -> Any:
        return right(**attributes)

    monkeypatch.setattr(gqa_tvm, "GroupQueryAttention", faulty)
    exec(source, {})
    assert float(capsys.readouterr().out) > 1e-4


@pytest.mark.parametrize("configuration", [BUSY, Configuration(), Configuration(query="bfloat16", cache="bfloat16")])
def test_the_program_draws_what_the_test_drew(configuration: Configuration) -> None:
    mismatch = _refusal(configuration)
    names: dict[str, Any] = {}
    exec(program(configuration, mismatch), names)
    call = configuration.draw()
    assert names["attributes"] == call.attributes
    for name, array in call.inputs.items():
        # In place the call has written its past.
        if array is not None and not (configuration.in_place and name.startswith("past")):
            np.testing.assert_array_equal(names["inputs"][name].view(np.uint8), array.view(np.uint8), err_msg=name)


def _refusal(configuration: Configuration) -> Any:
    def refuse(configuration: Configuration, call: Call) -> Any:
        raise gqa_tvm.InvalidArgument("no")

    return find_mismatch(configuration, refuse)
