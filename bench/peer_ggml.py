"""The attention of llama.cpp on CPUs as a contender: ggml, from the shared libraries that llama-cpp-python carries.

A graph writes the new keys and values into a cache (ggml_set_rows) and attends to all of it (ggml_flash_attn_ext); both
are timed. Graph, plan and work buffer are made before. Query, new rows and output are float32, as ggml has them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_size_t, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from calls import Call, as_kv_cache
from contenders import Contender
from peer_torch import let_openmp_sleep
from workloads import Workload

# Of enum ggml_type and enum ggml_prec.
_F32, _F16, _Q4_0, _Q8_0, _I64 = 0, 1, 2, 8, 27
_PREC_F32 = 10
_DTYPES = {_F32: np.float32, _F16: np.float16, _I64: np.int64}
# Values that share a scale in the quantised types.
_BLOCK = 32
# Tokens from which on float caches are multiplied in tiles, in float32.
_TILE_ROWS = 64
# Of what describes tensors and a graph; their data are elsewhere.
_CONTEXT_BYTES = 1 << 20


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", ctypes.c_bool))


# By name: type of the result, types of the parameters.
_FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "ggml_init": (c_void_p, [_InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_new_tensor_4d": (c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64, c_int64]),
    "ggml_permute": (c_void_p, [c_void_p, c_void_p, c_int, c_int, c_int, c_int]),
    "ggml_set_rows": (c_void_p, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "ggml_flash_attn_ext": (c_void_p, [*[c_void_p] * 5, c_float, c_float, c_float]),
    "ggml_flash_attn_ext_set_prec": (None, [c_void_p, c_int]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
    "ggml_backend_free": (None, [c_void_p]),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_tensor_alloc": (c_int, [c_void_p, c_void_p, c_void_p]),
    "ggml_backend_graph_plan_create": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_graph_plan_compute": (c_int, [c_void_p, c_void_p]),
    "ggml_backend_graph_plan_free": (None, [c_void_p, c_void_p]),
}


class _Mode(NamedTuple):
    """ggml's type of the cache; tolerance of the largest result."""

    name: str
    cache: int
    tolerance: float | None = None


# Query and sums over the values are rounded to float16, at every key: the longer the cache, the less is right.
_FEW_ROWS_F16 = _Mode("ggml inexact f16", _F16, 0.1)
# A float16 scale for every 32 values of a row, codes of codes; the query is rounded to 8 bits.
_MODES = {
    "f32": _Mode("ggml", _F32),
    "f16": _Mode("ggml", _F16),
    **dict.fromkeys(("i8", "i8c"), _Mode("ggml inexact q8_0", _Q8_0, 2e-2)),
    **dict.fromkeys(("i4", "i4c"), _Mode("ggml inexact q4_0", _Q4_0, 0.2)),
}


def ggml_contenders(workload: Workload, calls: list[Call], threads: int) -> list[Contender]:
    """One, with ggml's nearest type of cache; none for features other than a window."""
    is_few_f16 = workload.cache == "f16" and workload.tokens < _TILE_ROWS
    mode = _FEW_ROWS_F16 if is_few_f16 else _MODES[workload.cache]
    has_blocks = mode.cache in _DTYPES or workload.head_size % _BLOCK == 0
    if workload.feature not in ("", "window") or not has_blocks:
        return []
    ggml = _library()
    layers = [_Layer(ggml, workload, call, mode.cache, threads) for call in calls]
    return [
        Contender(
            mode.name,
            [layer.run for layer in layers],
            lambda: layers[0].output.reshape(calls[0].inputs["query"].shape),
            writes_cache=False,
            keep=[layers],
            tolerance=mode.tolerance,
        )
    ]


def _library() -> ctypes.CDLL:
    """ggml for CPUs, through which the functions of its base are found, too. llama-cpp-python is not imported.

    Raises ImportError when the package that is installed was built without it.
    """
    let_openmp_sleep()
    spec = importlib.util.find_spec("llama_cpp")
    folders = spec.submodule_search_locations if spec else None
    paths = [path for folder in folders or () for path in Path(folder, "lib").glob("libggml-cpu.*")]
    if not paths:
        raise ImportError("llama_cpp without libggml-cpu: install llama-cpp-python from its sources")
    library = ctypes.CDLL(str(paths[0]))
    for name, (result, parameters) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    return library


class _Layer:
    """A call's cache and graph, as a layer of a model has them. Sizes of tensors are ggml's, innermost first."""

    def __init__(self, ggml: ctypes.CDLL, workload: Workload, call: Call, cache: int, threads: int) -> None:
        self._ggml, self._workload = ggml, workload
        self._arrays: list[np.ndarray] = []
        self._context = ggml.ggml_init(_InitParams(_CONTEXT_BYTES, None, True))
        self._backend = ggml.ggml_backend_cpu_init()
        weakref.finalize(self, ggml.ggml_free, self._context)
        weakref.finalize(self, ggml.ggml_backend_free, self._backend)
        ggml.ggml_backend_cpu_set_n_threads(self._backend, threads)
        graph = self._graph(call, cache)
        plan = ggml.ggml_backend_graph_plan_create(self._backend, graph)
        weakref.finalize(self, ggml.ggml_backend_graph_plan_free, self._backend, plan)
        self.run = partial(ggml.ggml_backend_graph_plan_compute, self._backend, plan)

    def _graph(self, call: Call, cache: int) -> int:
        """Appends, then attends."""
        ggml, workload = self._ggml, self._workload
        pasts = np.array(workload.totals)[:, None] - workload.tokens
        positions = self._tensor(_I64, pasts + np.arange(workload.tokens), (workload.tokens, 1, workload.batch, 1))
        sides = []
        for name in ("key", "value"):
            past = self._cache(cache, call.inputs[f"past_{name}"])
            sides.append(ggml.ggml_set_rows(self._context, past, self._rows(call.inputs[name]), positions))
        query = self._rows(call.inputs["query"])
        mask = self._mask(call.attributes.get("local_window_size", -1))
        scale = workload.head_size**-0.5
        output = ggml.ggml_flash_attn_ext(self._context, query, *sides, mask, scale, 0.0, 0.0)
        ggml.ggml_flash_attn_ext_set_prec(output, _PREC_F32)
        shape = (workload.batch, workload.tokens, workload.heads, workload.head_size)
        self.output = self._allocate(output, np.zeros(shape, np.float32))
        graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(graph, output)
        return graph

    def _rows(self, rows: np.ndarray) -> int:
        """rows [B, S, heads * H] as a tensor of H, S, heads, B, in place."""
        workload = self._workload
        sizes = (workload.head_size, rows.shape[-1] // workload.head_size, workload.tokens, workload.batch)
        return self._ggml.ggml_permute(self._context, self._tensor(_F32, rows, sizes), 0, 2, 1, 3)

    def _cache(self, kind: int, past: np.ndarray) -> int:
        """past [B, N_kv, T, H] as a tensor of H, T, N_kv, B of that kind."""
        if kind not in _DTYPES:
            past = self._quantised(kind, past)
        workload = self._workload
        return self._tensor(kind, past, (workload.head_size, workload.total, workload.kv_heads, workload.batch))

    def _quantised(self, kind: int, rows: np.ndarray) -> np.ndarray:
        """uint8 [..., bytes of a row] of floats [..., H]."""
        rows = np.ascontiguousarray(rows, np.float32)
        size = rows.shape[-1]
        codes = np.empty((*rows.shape[:-1], self._ggml.ggml_row_size(kind, size)), np.uint8)
        self._ggml.ggml_quantize_chunk(kind, rows.ctypes.data, codes.ctypes.data, 0, rows.size // size, size, None)
        return codes

    def _mask(self, window: int) -> int | None:
        """Tensor of T, S, 1, B; None where every token sees all keys, which takes less time."""
        workload = self._workload
        keys = np.arange(workload.total)
        positions = np.array(workload.totals)[:, None, None] - workload.tokens + np.arange(workload.tokens)[:, None]
        hidden = keys > positions
        if window > 0:
            hidden |= keys <= positions - window
        if not hidden.any():
            return None
        added = np.where(hidden, np.float16(-np.inf), np.float16(0))
        return self._tensor(_F16, added, (workload.total, workload.tokens, 1, workload.batch))

    def _tensor(self, kind: int, values: np.ndarray, sizes: tuple[int, int, int, int]) -> int:
        """One that reads a copy of the values."""
        tensor = self._ggml.ggml_new_tensor_4d(self._context, kind, *sizes)
        self._allocate(tensor, values.astype(_DTYPES.get(kind, np.uint8), copy=False))
        return tensor

    def _allocate(self, tensor: int, values: np.ndarray) -> np.ndarray:
        """The copy of values that is the tensor's memory from now on: in huge pages, as the caches of everyone."""
        array = as_kv_cache(values)
        buffer = self._ggml.ggml_backend_cpu_buffer_from_ptr(array.ctypes.data, array.nbytes)
        weakref.finalize(self, self._ggml.ggml_backend_buffer_free, buffer)
        self._ggml.ggml_backend_tensor_alloc(buffer, tensor, array.ctypes.data)
        self._arrays.append(array)
        return array
