"""GroupQueryAttention for CPUs with float, INT8 and INT4 KV caches, compiled by Apache TVM."""

from __future__ import annotations

from . import primitives
from .build import build
from .cache_buffers import KVCache
from .errors import BuildError, InvalidArgument
from .operator import GroupQueryAttention, GroupQueryAttentionResult, Plan
from .runtime import KernelLibrary, load

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
    "primitives",
]
