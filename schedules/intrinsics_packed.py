"""Tensor intrinsics of AVX-512 VNNI for packed caches, each described by its own loop nest."""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from .intrinsics_vnni import _broadcast_dword, _buffer, _dot, _vector

_BYTES = 64
_LANES = 16
_WORD = 4


def register_dot_packed_keys() -> str:
    """Register out[lane] += sum_q codes[4 lane + q] * digits[q]; returns the intrinsic's name."""

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, b: T.handle, c: T.handle) -> None:
            A = T.meta_var(_buffer(a, (_BYTES,), "uint8"))
            B = T.meta_var(_buffer(b, (_WORD,), "int8"))
            C = T.meta_var(_buffer(c, (_LANES,), "int32"))
            with T.sblock("root"):
                T.reads(C[0:_LANES], A[0:_BYTES], B[0:_WORD])
                T.writes(C[0:_LANES])
                emit(A, B, C)

        return body

    def describe(A, B, C):
        with T.grid(_LANES, _WORD) as (lane, q):
            with T.sblock("dot"):
                vl, vq = T.axis.spatial(_LANES, lane), T.axis.reduce(_WORD, q)
                product = T.Cast("int32", A[vl * _WORD + vq]) * T.Cast("int32", B[vq])
                T.buffer_store(C, C[vl] + product, [vl])

    def implement(A, B, C):
        T.buffer_store(C, _dot(_vector(C), _vector(A), _broadcast_dword(B, _BYTES)), [T.ramp(0, 1, _LANES)])

    name = "gqa_vnni_dot_packed_keys"
    TensorIntrin.register(name, function(describe), function(implement), override=True)
    return name


def register_arrange_packed() -> str:
    """Register 16 int32 -> their bytes, of four integers by significance; returns the intrinsic's name."""

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, c: T.handle) -> None:
            A = T.meta_var(_buffer(a, (_LANES,), "int32"))
            C = T.meta_var(_buffer(c, (_BYTES,), "uint8"))
            with T.sblock("root"):
                T.reads(A[0:_LANES])
                T.writes(C[0:_BYTES])
                emit(A, C)

        return body

    def describe(A, C):
        with T.grid(_BYTES) as x:
            with T.sblock("arrange"):
                vx = T.axis.spatial(_BYTES, x)
                byte = T.Cast("int8", A[vx // 16 * 4 + vx % 4] >> (vx // 4 % 4 * 8))
                T.buffer_store(C, tirx.reinterpret("uint8", byte), [vx])

    def implement(A, C):
        lanes = [16 * quad + 4 * key + byte for quad in range(4) for byte in range(4) for key in range(4)]
        source = tirx.reinterpret("uint8x64", _vector(A))
        T.buffer_store(C, tirx.Shuffle([source], [T.int32(lane) for lane in lanes]), [T.ramp(0, 1, _BYTES)])

    name = "gqa_vnni_arrange_packed"
    TensorIntrin.register(name, function(describe), function(implement), override=True)
    return name
