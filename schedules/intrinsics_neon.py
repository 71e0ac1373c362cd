"""Tensor intrinsics of AArch64 with 8-bit dot products, each described by its own loop nest."""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

_BYTES = 16
_LANES = 4


def _vector(buffer, *index):
    return buffer[(*index, T.ramp(0, 1, int(buffer.shape[-1])))]


def _buffer(handle, shape, dtype: str):
    strides = [T.int64() for _ in shape[:-1]] + [1]
    return T.match_buffer(handle, shape, dtype, offset_factor=1, align=1 if dtype != "int32" else 4, strides=strides)


def _shuffle(vectors, lanes):
    return tirx.Shuffle(vectors, [T.int32(lane) for lane in lanes])


def _dot(accumulator, codes, digits):
    return T.call_llvm_pure_intrin("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", accumulator, codes, digits)


def register_dots() -> str:
    """Register out[lane] += sum_{i, q} codes[i, 4 lane + q] * digits[4 i + q] for i < 4; returns the intrinsic's name.

    Four instructions that take their digits from a lane of one register.
    """
    name = "gqa_neon_dots"

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, b: T.handle, c: T.handle) -> None:
            A = T.meta_var(_buffer(a, (4, _BYTES), "int8"))
            B = T.meta_var(_buffer(b, (_BYTES,), "int8"))
            C = T.meta_var(_buffer(c, (_LANES,), "int32"))
            with T.sblock("root"):
                T.reads(C[0:_LANES], A[0:4, 0:_BYTES], B[0:_BYTES])
                T.writes(C[0:_LANES])
                emit(A, B, C)

        return body

    def describe(A, B, C):
        with T.grid(_LANES, 4, 4) as (lane, i, q):
            with T.sblock("dot"):
                vl, vi, vq = T.axis.spatial(_LANES, lane), T.axis.reduce(4, i), T.axis.reduce(4, q)
                product = T.Cast("int32", A[vi, vl * 4 + vq]) * T.Cast("int32", B[vi * 4 + vq])
                T.buffer_store(C, C[vl] + product, [vl])

    def implement(A, B, C):
        digits = tirx.reinterpret("int32x4", _vector(B))
        total = _vector(C)
        for i in range(4):
            total = _dot(total, _vector(A, i), tirx.reinterpret("int8x16", _shuffle([digits], [i] * _LANES)))
        T.buffer_store(C, total, [T.ramp(0, 1, _LANES)])

    TensorIntrin.register(name, function(describe), function(implement), override=True)
    return name


def _register_arrange(name: str, dtype: str, source, target, index, arrange) -> str:
    """Register bytes [rows, columns] -> vectors [.., 16] of shape `target`, whose element comes from index(.., x)."""

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, c: T.handle) -> None:
            A = T.meta_var(_buffer(a, source, dtype))
            C = T.meta_var(_buffer(c, target, dtype))
            with T.sblock("root"):
                T.reads(whole(A))
                T.writes(whole(C))
                emit(A, C)

        return body

    def whole(buffer):
        return buffer[tuple(slice(0, extent) for extent in buffer.shape)]

    def describe(A, C):
        with T.grid(*target) as loops:
            with T.sblock("arrange"):
                axes = [T.axis.spatial(extent, loop) for extent, loop in zip(target, loops, strict=True)]
                T.buffer_store(C, A[index(*axes)], axes)

    def implement(A, C):
        for where, vector in arrange([_vector(A, row) for row in range(source[0])]):
            T.buffer_store(C, tirx.reinterpret(f"{dtype}x{_BYTES}", vector), [*where, T.ramp(0, 1, _BYTES)])

    TensorIntrin.register(name, function(describe), function(implement), override=True)
    return name


def register_arrange_keys(dtype: str) -> str:
    """Register 4 rows of 16 bytes -> 4 vectors, whose lanes are 4 columns of each row: a transpose of 4 x 4 lanes."""

    def arrange(rows):
        a, b, c, d = (tirx.reinterpret("int32x4", row) for row in rows)
        for half, first in enumerate(([0, 4, 1, 5], [2, 6, 3, 7])):
            ab, cd = _shuffle([a, b], first), _shuffle([c, d], first)
            for quarter, second in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
                yield (2 * half + quarter,), _shuffle([ab, cd], second)

    name = f"gqa_neon_arrange_keys_{dtype}"
    return _register_arrange(name, dtype, (4, 16), (4, 16), lambda j, x: (x // 4, j * 4 + x % 4), arrange)


def register_arrange_values(dtype: str) -> str:
    """Register 16 rows of 16 bytes -> 4 x 4 vectors, whose lanes are 4 of the rows of a column."""

    def arrange(rows):
        for j in range(4):
            pairs = (rows[4 * j : 4 * j + 2], rows[4 * j + 2 : 4 * j + 4])
            for half in range(2):
                zip_bytes = [lane for byte in range(8 * half, 8 * half + 8) for lane in (byte, 16 + byte)]
                ab, cd = (tirx.reinterpret("int16x8", _shuffle(pair, zip_bytes)) for pair in pairs)
                for i in range(2):
                    lanes = [lane for k in range(4 * i, 4 * i + 4) for lane in (k, 8 + k)]
                    yield (2 * half + i, j), _shuffle([ab, cd], lanes)

    name = f"gqa_neon_arrange_values_{dtype}"
    return _register_arrange(
        name, dtype, (16, 16), (4, 4, 16), lambda i, j, x: (j * 4 + x % 4, i * 4 + x // 4), arrange
    )
