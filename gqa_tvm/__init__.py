"""GroupQueryAttention for CPUs with float, INT8 and INT4 KV caches, compiled by Apache TVM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import primitives
from .build import build
from .cache_buffers import KVCache
from .errors import BuildError, InvalidArgument
from .kv_layout import pack_kv_cache, unpack_kv_cache
from .operator import GroupQueryAttention, GroupQueryAttentionResult, Plan
from .runtime import KernelLibrary, load

if TYPE_CHECKING:
    from .tuning.tune import tune

__all__ = [
    "BuildError",
    "GroupQueryAttention",
    "GroupQueryAttentionResult",
    "InvalidArgument",
    "KVCache",
    "KernelLibrary",
    "Plan",
    "build",
    "load",
    "pack_kv_cache",
    "primitives",
    "tune",
    "unpack_kv_cache",
]


def __getattr__(name: str) -> Any:
    """`tune` is imported when it is first used: it belongs to the compiler's side."""
    if name == "tune":
        from .tuning.tune import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
