"""Making a pass of a function over kernels or over nodes of their bodies."""

from __future__ import annotations

from collections.abc import Callable

import tvm
import tvm_ffi


def function_pass(rewrite: Callable):
    """Pass that replaces every kernel by rewrite(kernel)."""

    @tvm.transform.module_pass(opt_level=0)
    def apply(mod, _context):
        return tvm.IRModule({name: rewrite(function) for name, function in mod.functions.items()})

    return apply


def rewrite_bodies(*callbacks):
    """Pass that replaces nodes of the functions' bodies; callbacks: (node type, function node -> node)."""
    return function_pass(lambda function: function.with_body(tvm_ffi.structural_map(function.body, callbacks)))
