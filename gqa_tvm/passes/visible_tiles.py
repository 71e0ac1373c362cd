"""Compiler pass that lets marked loops over the rows of a task and the keys of a block cover what is visible.

Loops over tiles of rows begin with the first row that sees a key of the block and end with the task's last row, loops
over keys end with the last key that a row of the task, or of the tile around them, sees. Kernels have the numbers in
buffers of these names.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

from ..schedules.steps import BLOCK_KEYS, FIRST_ROW, LAST_KEY, ROW_KEYS, TASK_ROWS
from .functions import function_pass


def visible_tiles():
    """The pass; it comes after blocks have become loops and before buffers are flattened."""
    return function_pass(_cover_visible)


def _cover_visible(function):
    buffers = {}

    def find(allocation):
        buffers.setdefault(allocation.buffer.name, allocation.buffer)
        return allocation

    tvm_ffi.structural_map(function.body, (tirx.AllocBuffer, find))
    if BLOCK_KEYS not in buffers:
        return function

    def load(name, index):
        return tirx.BufferLoad(buffers[name], [index])

    def cover_rows(loop):
        if FIRST_ROW not in loop.annotations:
            return loop
        tile_rows = int(loop.annotations[FIRST_ROW]) // int(loop.extent)
        first = tirx.truncdiv(load(FIRST_ROW, 0), tirx.IntImm("int32", tile_rows))
        end = tirx.truncdiv(load(TASK_ROWS, 0) + (tile_rows - 1), tirx.IntImm("int32", tile_rows))
        last_row = loop.loop_var * tile_rows + (tile_rows - 1)
        return _with_range(loop, first, end, _end_at(loop.body, load(ROW_KEYS, last_row)))

    body = tvm_ffi.structural_map(function.body, (tirx.For, cover_rows))
    return function.with_body(_end_at(body, load(BLOCK_KEYS, 0)))


def _end_at(body, keys):
    """Let the marked loops in `body` end after so many keys."""

    def cover_keys(loop):
        if LAST_KEY not in loop.annotations:
            return loop
        tile_keys = int(loop.annotations[LAST_KEY]) // int(loop.extent)
        end = tirx.truncdiv(keys + (tile_keys - 1), tirx.IntImm("int32", tile_keys)) if tile_keys > 1 else keys
        return _with_range(loop, loop.min, end, loop.body)

    return tvm_ffi.structural_map(body, (tirx.For, cover_keys))


def _with_range(loop, first, end, body):
    return tirx.For(loop.loop_var, first, end - first, loop.kind, body)
