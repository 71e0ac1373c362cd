"""Tensor intrinsics of AVX-512 VNNI and AVX-VNNI, each described by its own loop nest.

size: bytes of a vector, 64 or 32. Its lanes have 4 bytes, its groups 16, within which unpack instructions work.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

_GROUP_BYTES = 16


def _register(name: str, describe, implement) -> str:
    TensorIntrin.register(name, describe, implement, override=True)
    return name


def _vector(buffer, *index):
    return buffer[(*index, T.ramp(0, 1, int(buffer.shape[-1])))]


def _buffer(handle, shape, dtype: str):
    strides = [T.int64() for _ in shape[:-1]] + [1]
    return T.match_buffer(handle, shape, dtype, offset_factor=1, align=1 if dtype != "int32" else 4, strides=strides)


def _dot(accumulator, unsigned, signed):
    dtype = str(accumulator.ty)
    instruction = f"llvm.x86.avx512.vpdpbusd.{tvm.DataType(dtype).lanes * 32}"
    return T.call_llvm_pure_intrin(dtype, instruction, accumulator, unsigned, signed)


def _broadcast_dword(buffer, size: int):
    """Four bytes in every lane."""
    dword = tirx.reinterpret("int32", _vector(buffer))
    return tirx.reinterpret(f"int8x{size}", tirx.Broadcast(dword, size // 4))


def _register_dot(name: str, size: int, a_extent: int, b_dtype: str, factors, vectors) -> str:
    """Register out[lane] += the sum over q < 4 of the product of `factors`; returns the intrinsic's name.

    factors: function (A, B, lane, q) -> an unsigned and a signed byte; vectors: function (A, B) -> the same for all
    lanes, as operands of the instruction. A: uint8 [a_extent]; B: of b_dtype, a whole vector; out: int32 [lanes].
    """
    lanes = size // 4
    b_extent = lanes if b_dtype == "int32" else size

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, b: T.handle, c: T.handle) -> None:
            A = T.meta_var(_buffer(a, (a_extent,), "uint8"))
            B = T.meta_var(_buffer(b, (b_extent,), b_dtype))
            C = T.meta_var(_buffer(c, (lanes,), "int32"))
            with T.sblock("root"):
                T.reads(C[0:lanes], A[0:a_extent], B[0:b_extent])
                T.writes(C[0:lanes])
                emit(A, B, C)

        return body

    def describe(A, B, C):
        with T.grid(lanes, 4) as (lane, q):
            with T.sblock("dot"):
                vl, vq = T.axis.spatial(lanes, lane), T.axis.reduce(4, q)
                unsigned, signed = factors(A, B, vl, vq)
                T.buffer_store(C, C[vl] + T.Cast("int32", unsigned) * T.Cast("int32", signed), [vl])

    def implement(A, B, C):
        T.buffer_store(C, _dot(_vector(C), *vectors(A, B)), [T.ramp(0, 1, lanes)])

    return _register(f"gqa_vnni_{name}_{size}", function(describe), function(implement))


def register_dot_keys(size: int) -> str:
    """Register out[lane] += sum_q codes[4 lane + q] * digits[4 lane + q]; returns the intrinsic's name."""
    return _register_dot(
        "dot_keys",
        size,
        size,
        "int8",
        lambda A, B, lane, q: (A[lane * 4 + q], B[lane * 4 + q]),
        lambda A, B: (_vector(A), _vector(B)),
    )


def register_dot_values(size: int) -> str:
    """Register out[lane] += sum_b digits[b] * codes[4 lane + b]; returns the intrinsic's name."""
    return _register_dot(
        "dot_values",
        size,
        4,
        "int8",
        lambda A, B, lane, b: (A[b], B[lane * 4 + b]),
        lambda A, B: (_broadcast_dword(A, size), _vector(B)),
    )


def register_dot_rows(size: int) -> str:
    """Register out[lane] += sum_q codes[q] * byte q of words[lane]; returns the intrinsic's name."""
    return _register_dot(
        "dot_rows",
        size,
        4,
        "int32",
        lambda A, B, lane, q: (A[q], T.Cast("int8", B[lane] >> (q * 8))),
        lambda A, B: (_broadcast_dword(A, size), tirx.reinterpret(f"int8x{size}", _vector(B))),
    )


def register_arrange_probabilities(size: int) -> str:
    """Register 4 keys of `lanes` rows int32 -> 4 vectors of lanes (L, byte) of 4 keys: rows 4 L + j in vector j."""
    lanes = size // 4

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, c: T.handle) -> None:
            A = T.meta_var(_buffer(a, (4, lanes), "int32"))
            C = T.meta_var(_buffer(c, (4, size), "uint8"))
            with T.sblock("root"):
                T.reads(A[0:4, 0:lanes])
                T.writes(C[0:4, 0:size])
                emit(A, C)

        return body

    def describe(A, C):
        with T.grid(4, size) as (j, x):
            with T.sblock("arrange"):
                vj, vx = T.axis.spatial(4, j), T.axis.spatial(size, x)
                byte = T.Cast("int8", A[vx % 4, vx // 16 * 4 + vj] >> (vx // 4 % 4 * 8))
                T.buffer_store(C, tirx.reinterpret("uint8", byte), [vj, vx])

    def implement(A, C):
        vectors = _unpack_rows([_vector(A, i) for i in range(4)], ("int8", "int16"), size)
        for j, vector in enumerate(vectors):
            T.buffer_store(C, tirx.reinterpret(f"uint8x{size}", vector), [j, T.ramp(0, 1, size)])

    return _register(f"gqa_vnni_arrange_probabilities_{size}", function(describe), function(implement))


def _unpack(a, b, element: str, high: bool, size: int):
    """The low or high halves of each 16 bytes of two vectors, element by element in turn."""
    width = {"int8": 1, "int16": 2, "int32": 4, "int64": 8}[element]
    dtype = f"{element}x{size // width}"
    per_group, count = _GROUP_BYTES // width, size // width
    groups = range(size // _GROUP_BYTES)
    first = [g * per_group + i + (per_group // 2 if high else 0) for g in groups for i in range(per_group // 2)]
    lanes = [lane for i in first for lane in (i, count + i)]
    vectors = [tirx.reinterpret(dtype, v) for v in (a, b)]
    return tirx.Shuffle(vectors, [T.int32(lane) for lane in lanes])


def _unpack_rows(rows, elements, size: int):
    """Two rounds of unpacking four vectors; four vectors of int8."""
    first, second = elements
    a, b, c, d = rows
    result = []
    for outer in (False, True):
        ab, cd = _unpack(a, b, first, outer, size), _unpack(c, d, first, outer, size)
        result += [_unpack(ab, cd, second, inner, size) for inner in (False, True)]
    return [tirx.reinterpret(f"int8x{size}", vector) for vector in result]


def _transpose_groups(vectors, size: int):
    """Four vectors of groups of 16 bytes: all groups 0 one after the other, then all groups 1, ..."""
    lanes = size // 4
    dwords = [tirx.reinterpret(f"int32x{lanes}", vector) for vector in vectors]

    def groups(a, b, first, second):
        half = [4 * g + i for g in (first, second) for i in range(4)]
        return tirx.Shuffle([a, b], [T.int32(lane) for lane in (*half, *(lanes + lane for lane in half))])

    if size == 64:
        low, high = ([groups(dwords[i], dwords[i + 1], *half) for i in (0, 2)] for half in ((0, 1), (2, 3)))
        joined = [groups(*pair, *picked) for pair in (low, high) for picked in ((0, 2), (1, 3))]
    else:
        joined = [_join_halves(dwords[i], dwords[i + 1], half) for half in (0, 1) for i in (0, 2)]
    return [tirx.reinterpret(f"int8x{size}", vector) for vector in joined]


def _join_halves(a, b, half: int):
    """The same half of two vectors of 8 lanes."""
    lanes = [4 * half + i for i in range(4)]
    return tirx.Shuffle([a, b], [T.int32(lane) for lane in (*lanes, *(8 + lane for lane in lanes))])


def _register_arrange(
    name: str, size: int, source: str, target: str, elements, index, convert, convert_vector, in_order=False
) -> str:
    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, c: T.handle) -> None:
            A = T.meta_var(_buffer(a, (4, size), source))
            C = T.meta_var(_buffer(c, (4, size), target))
            with T.sblock("root"):
                T.reads(A[0:4, 0:size])
                T.writes(C[0:4, 0:size])
                emit(A, C)

        return body

    def describe(A, C):
        with T.grid(4, size) as (j, x):
            with T.sblock("arrange"):
                vj, vx = T.axis.spatial(4, j), T.axis.spatial(size, x)
                T.buffer_store(C, convert(A[index(vj, vx)]), [vj, vx])

    def implement(A, C):
        vectors = _unpack_rows([_vector(A, i) for i in range(4)], elements, size)
        if in_order:
            vectors = _transpose_groups(vectors, size)
        for j, vector in enumerate(vectors):
            T.buffer_store(C, convert_vector(vector), [j, T.ramp(0, 1, size)])

    return _register(f"gqa_vnni_{name}_{source}_{size}", function(describe), function(implement))


def register_arrange_keys(dtype: str, size: int) -> str:
    """Register 4 rows of a vector -> 4 vectors of lanes (L, row) of 4 columns; int8 becomes unsigned code + 128."""
    flip = dtype == "int8"

    def convert(element):
        return tirx.reinterpret("uint8", element) ^ tirx.const(128, "uint8") if flip else element

    def convert_vector(vector):
        vector = tirx.reinterpret(f"uint8x{size}", vector)
        return vector ^ tirx.Broadcast(tirx.const(128, "uint8"), size) if flip else vector

    return _register_arrange(
        "arrange_keys",
        size,
        dtype,
        "uint8",
        ("int32", "int64"),
        lambda j, x: (x // 4 % 4, x // 16 * 16 + j * 4 + x % 4),
        convert,
        convert_vector,
    )


def register_arrange_values(dtype: str, size: int) -> str:
    """Register 4 rows of a vector -> 4 vectors of lanes (L, column) of 4 rows."""
    return _register_arrange(
        "arrange_values",
        size,
        dtype,
        dtype,
        ("int8", "int16"),
        lambda j, x: (x % 4, x // 16 * 16 + j * 4 + x // 4 % 4),
        lambda element: element,
        lambda vector: tirx.reinterpret(f"{dtype}x{size}", vector),
    )


def register_arrange_values_in_order(dtype: str, size: int) -> str:
    """Register 4 rows of a vector -> 4 vectors of `lanes` columns of 4 rows."""
    return _register_arrange(
        "arrange_values_in_order",
        size,
        dtype,
        dtype,
        ("int8", "int16"),
        lambda j, x: (x % 4, j * (size // 4) + x // 4),
        lambda element: element,
        lambda vector: tirx.reinterpret(f"{dtype}x{size}", vector),
        in_order=True,
    )


def register_group_sum(size: int, groups: int) -> str:
    """Register out[t] += the sum of t's lanes in so many groups of 4, for as many keys as lanes; returns its name.

    in [groups, lanes]: a vector has lanes / groups keys, the groups of 4 of them before those of the next 4.
    """
    lanes = size // 4
    keys = lanes // groups

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, c: T.handle) -> None:
            A = T.match_buffer(a, (groups, lanes), "int32", offset_factor=1, align=4, strides=[T.int64(), 1])
            C = T.match_buffer(c, (lanes,), "int32", offset_factor=1, align=4)
            with T.sblock("root"):
                T.reads(C[0:lanes], A[0:groups, 0:lanes])
                T.writes(C[0:lanes])
                emit(A, C)

        return body

    def describe(A, C):
        with T.grid(lanes, groups) as (t, g):
            with T.sblock("sum"):
                vt, vg = T.axis.spatial(lanes, t), T.axis.reduce(groups, g)
                T.buffer_store(C, C[vt] + A[vt // keys, vt % keys // 4 * (4 * groups) + vg * 4 + vt % 4], [vt])

    def implement(A, C):
        sums = [_vector(A, i) for i in range(groups)]
        while len(sums) > 1:
            sums = [_group_pair_sum(a, b, lanes) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        T.buffer_store(C, _vector(C) + sums[0], [T.ramp(0, 1, lanes)])

    return _register(f"gqa_vnni_group_sum_{size}_{groups}", function(describe), function(implement))


def _group_pair_sum(a, b, lanes: int):
    """Groups of 4 lanes: a0 + a1, a2 + a3, .., b0 + b1, .."""
    even = [8 * g + i for g in range(lanes // 4) for i in range(4)]
    shuffles = [tirx.Shuffle([a, b], [T.int32(lane + 4 * odd) for lane in even]) for odd in (0, 1)]
    buffer = T.alloc_buffer((lanes,), "int32", annotations={"disable_lower_builtin": 1})
    T.buffer_store(buffer, shuffles[0] + shuffles[1], [T.ramp(0, 1, lanes)])
    return buffer[T.ramp(0, 1, lanes)]
