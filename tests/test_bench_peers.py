"""The other engines that bench/ can time beside this project."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import gate
import peers
import run
from calls import float_call, make_call
from contenders import operator_contenders
from workloads import Workload, decode, prefill

from gqa_tvm.reference import group_query_attention


@pytest.mark.parametrize("cache", ["i8", "i8c", "i4", "i4c"])
@pytest.mark.parametrize("more", [{}, {"window": 4}], ids=["", "window"])
def test_peers_get_the_values_of_the_codes(cache, more):
    call = make_call(Workload("chunk", cache, 3, 20, 4, 2, 16, **more))
    floats = float_call(call)
    assert {array.dtype for name, array in floats.inputs.items() if "key" in name or "value" in name} == {
        np.dtype("f4")
    }
    wanted, got = (group_query_attention(**c.inputs, **c.attributes).output for c in (call, floats))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("peer", peers.PEERS)
@pytest.mark.parametrize(
    ("workload", "counts"),
    [
        (decode("f32", 70, 4, 2, 32), {"torch": 1, "openvino": 2, "vllm": 1, "ggml": 1}),
        (decode("f16", 70, 4, 2, 32, query="f16"), {"torch": 1, "openvino": 2, "vllm": 1, "ggml": 1}),
        (prefill("f32", 70, 4, 2, 32), {"torch": 1, "openvino": 2, "vllm": 1, "ggml": 1}),
        (prefill("f16", 70, 4, 2, 32, query="f16"), {"torch": 1, "openvino": 2, "vllm": 1, "ggml": 1}),
        (decode("f16", 70, 4, 2, 32), {"openvino": 2, "ggml": 1}),
        (decode("i8", 150, 4, 2, 32, batch=2, ragged=True), {"openvino": 2, "vllm": 1, "ggml": 1}),
        (Workload("chunk", "f32", 5, 150, 9, 3, 64, window=7), {"openvino": 2, "vllm": 1, "ggml": 1}),
        (prefill("i4", 70, 4, 2, 32), {"openvino": 1, "ggml": 1}),
        (decode("f32", 70, 4, 2, 32, feature="softcap"), {}),
    ],
    ids=lambda value: value.name if isinstance(value, Workload) else "",
)
def test_peers_pass_the_gate(peer, workload, counts):
    if missing := peers.missing_packages([peer]):
        pytest.skip(f"not installed: {', '.join(missing)}")
    if peer not in counts:
        assert peers.peer_contenders(workload, [make_call(workload)], 1, [peer]) == []
        return
    call = make_call(workload)
    found = peers.peer_contenders(workload, [call], 1, [peer])
    ours = operator_contenders(workload, [call], 1)[:1]
    assert gate.check_operator(workload, call, ours + found) == ours + found
    exact = [contender for contender in found if contender.tolerance is None]
    # The plugin of a CPU without bfloat16 has one way less.
    assert len(found) == counts[peer] or (peer == "openvino" and len(found) == counts[peer] - 1)
    assert all(contender.name.split()[:2] == [peer, "inexact"] for contender in found if contender not in exact)
    assert all(contender.name == peer for contender in exact)


def test_peers_must_be_installed(monkeypatch, capsys):
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "vllm" else object())
    assert run.main(["--peers", "torch", "vllm"]) == 2
    assert capsys.readouterr().err.startswith("not installed: vllm;")
