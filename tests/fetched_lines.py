"""Run as a program: what flash_decode and flash_prefill fetch ahead, for every case of standard input.

A case is [target, cache, heads per KV head, head size, layout, keys, new tokens]; its answer: two lists, for keys and
values: how many bytes after the array's begin a fetch was, in their order.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from gqa_tvm import GroupQueryAttention
from gqa_tvm.passes import fetch_ahead, fetch_next_block

_FAR = 1 << 20
_RECORDER = """
#include <stdint.h>
uint64_t gqa_fetched[1 << 20];
int64_t gqa_fetches;
int32_t gqa_record_fetch(void *address) {
    gqa_fetched[gqa_fetches++ & ((1 << 20) - 1)] = (uint64_t)address;
    return 0;
}
"""


def _recorder():
    folder = Path(tempfile.mkdtemp())
    (folder / "recorder.c").write_text(_RECORDER)
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "recorder.c", "-o", folder / "recorder.so"], check=True)
    return ctypes.CDLL(str(folder / "recorder.so"), mode=ctypes.RTLD_GLOBAL)


def _record_instead(load):
    return tirx.Evaluate(tirx.call_extern("int32", "gqa_record_fetch", T.address_of(load)))


def _fetched(recorder, target, cache, group, head_size, layout, tokens, new):
    bits = {"i8": 8, "i4": 4}.get(cache, 0)
    kind = "PER_TENSOR" if bits else "NONE"
    options = {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits} if bits else {}
    op = GroupQueryAttention(num_heads=group, kv_num_heads=1, kv_layout=layout, target=target, num_threads=1, **options)
    columns = head_size // 2 if bits == 4 else head_size
    dtype = {"i8": np.int8, "i4": np.uint8, "f16": np.float16, "f32": np.float32}[cache]
    shapes = [(1, 1, tokens, columns)] * 2
    if layout == "packed":
        shapes = [(1, 1, tokens // 16, columns // 4, 16, 4), (1, 1, tokens // 4, columns, 4)]
    # Far from each other, so that it is plain for which of them a fetch is.
    memory = np.zeros(4 * _FAR, np.uint8)
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape in shapes]
    keys, values = (
        memory[begin : begin + size].view(dtype).reshape(shape)
        for begin, size, shape in zip((_FAR, 3 * _FAR), sizes, shapes, strict=True)
    )
    query_dtype = np.float16 if cache == "f16" else np.float32
    rows = [np.ones((1, new, heads * head_size), query_dtype) for heads in (group, 1, 1)]
    scale = np.ones(1, np.float32)
    extra = {"k_scale": scale, "v_scale": scale} if bits else {}
    lengths = np.array([tokens - 1], np.int32), np.array([tokens], np.int32)
    fetches = ctypes.c_int64.in_dll(recorder, "gqa_fetches")
    fetches.value = 0
    op(*rows, keys, values, *lengths, present_key=keys, present_value=values, **extra)
    addresses = np.ctypeslib.as_array((ctypes.c_uint64 * (1 << 20)).in_dll(recorder, "gqa_fetched"))[: fetches.value]
    offsets = [addresses.astype(np.int64) - array.ctypes.data for array in (keys, values)]
    return [own[abs(own) < _FAR].tolist() for own in offsets]


def main():
    fetch_ahead.fetch_line = fetch_next_block.fetch_line = _record_instead
    recorder = _recorder()
    print(json.dumps([_fetched(recorder, *case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
