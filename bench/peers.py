"""Peers that are timed when asked for, from packages that the project does not need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from calls import Call, float_call
from contenders import Contender
from peer_ggml import ggml_contenders
from peer_openvino import openvino_contenders
from peer_torch import torch_contenders
from peer_vllm import vllm_contenders
from workloads import Workload

PEERS: dict[str, Callable[[Workload, list[Call], int], list[Contender]]] = {
    "torch": torch_contenders,
    "openvino": openvino_contenders,
    "vllm": vllm_contenders,
    "ggml": ggml_contenders,
}
PACKAGES = {"torch": ("torch",), "openvino": ("openvino",), "vllm": ("torch", "vllm"), "ggml": ("llama_cpp",)}


def missing_packages(names: Sequence[str]) -> list[str]:
    """Of the named peers; looked for, not imported."""
    wanted = dict.fromkeys(package for name in names for package in PACKAGES[name])
    return [package for package in wanted if find_spec(package) is None]


def peer_contenders(workload: Workload, calls: list[Call], threads: int, names: Sequence[str]) -> list[Contender]:
    """All that the named peers have for the call. Names begin with the peer's; "inexact" in one: it computes with fewer
    digits than the call asks for. Each fills a cache of its own from past, where its layout or format is another.
    """
    floats = [float_call(call) for call in calls]
    return [contender for name in names for contender in PEERS[name](workload, floats, threads)]
