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


def register_lane_dots() -> str:
    """Register out[i, lane] += sum_q rows[4 lane + q] * dwords[4 i + q] for i < 4; returns the intrinsic's name.

    Four instructions, each with another lane of the same register.
    """
    name = "gqa_neon_lane_dots"

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, b: T.handle, c: T.handle) -> None:
            A = T.meta_var(_buffer(a, (_BYTES,), "int8"))
            B = T.meta_var(_buffer(b, (_BYTES,), "int8"))
            C = T.meta_var(_buffer(c, (4, _LANES), "int32"))
            with T.sblock("root"):
                T.reads(C[0:4, 0:_LANES], A[0:_BYTES], B[0:_BYTES])
                T.writes(C[0:4, 0:_LANES])
                emit(A, B, C)

        return body

    def describe(A, B, C):
        with T.grid(4, _LANES, 4) as (i, lane, q):
            with T.sblock("dot"):
                vi, vl, vq = T.axis.spatial(4, i), T.axis.spatial(_LANES, lane), T.axis.reduce(4, q)
                product = T.Cast("int32", A[vl * 4 + vq]) * T.Cast("int32", B[vi * 4 + vq])
                T.buffer_store(C, C[vi, vl] + product, [vi, vl])

    def implement(A, B, C):
        dwords = tirx.reinterpret("int32x4", _vector(B))
        for i in range(4):
            dword = tirx.reinterpret("int8x16", _shuffle([dwords], [i] * _LANES))
            T.buffer_store(C, _dot(_vector(C, i), _vector(A), dword), [i, T.ramp(0, 1, _LANES)])

    TensorIntrin.register(name, function(describe), function(implement), override=True)
    return name


def _register_arrange(name: str, dtypes, source, target, element, arrange) -> str:
    """Register [rows, columns] -> vectors [.., 16] of shape `target`; dtypes: of both.

    element: function (source, .., x) -> element of the target; arrange: function of the source's rows -> pairs (index,
    vector).
    """

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, c: T.handle) -> None:
            A = T.meta_var(_buffer(a, source, dtypes[0]))
            C = T.meta_var(_buffer(c, target, dtypes[1]))
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
                loops = loops if len(target) > 1 else (loops,)
                axes = [T.axis.spatial(extent, loop) for extent, loop in zip(target, loops, strict=True)]
                T.buffer_store(C, element(A, *axes), axes)

    def implement(A, C):
        for where, vector in arrange([_vector(A, row) for row in range(source[0])]):
            T.buffer_store(C, tirx.reinterpret(f"{dtypes[1]}x{_BYTES}", vector), [*where, T.ramp(0, 1, _BYTES)])

    TensorIntrin.register(name, function(describe), function(implement), override=True)
    return name


def _transpose(rows):
    """4 vectors of 4 dwords -> vector j of the dwords j."""
    a, b, c, d = (tirx.reinterpret("int32x4", row) for row in rows)
    for first in ([0, 4, 1, 5], [2, 6, 3, 7]):
        ab, cd = _shuffle([a, b], first), _shuffle([c, d], first)
        for second in ([0, 1, 4, 5], [2, 3, 6, 7]):
            yield _shuffle([ab, cd], second)


def register_arrange_keys(dtype: str) -> str:
    """Register 4 rows of 16 bytes -> 4 vectors, whose lanes are 4 columns of each row: a transpose of 4 x 4 lanes."""

    def arrange(rows):
        for j, vector in enumerate(_transpose(rows)):
            yield (j,), vector

    name = f"gqa_neon_arrange_keys_{dtype}"
    element = lambda A, j, x: A[x // 4, j * 4 + x % 4]  # noqa: E731
    return _register_arrange(name, (dtype, dtype), (4, 16), (4, 16), element, arrange)


def register_arrange_key_pairs(dtype: str) -> str:
    """Register 8 rows of 16 bytes -> 4 x 2 vectors: as `register_arrange_keys` for either half of the rows."""

    def arrange(rows):
        for half in range(2):
            for j, vector in enumerate(_transpose(rows[4 * half : 4 * half + 4])):
                yield (j, half), vector

    name = f"gqa_neon_arrange_key_pairs_{dtype}"
    element = lambda A, j, half, x: A[half * 4 + x // 4, j * 4 + x % 4]  # noqa: E731
    return _register_arrange(name, (dtype, dtype), (8, 16), (4, 2, 16), element, arrange)


def _quads_of_rows(rows):
    """16 rows of 16 bytes -> pairs ((column quad, row quad), vector): lanes are the 4 rows of a column."""
    for j in range(4):
        pairs = (rows[4 * j : 4 * j + 2], rows[4 * j + 2 : 4 * j + 4])
        for half in range(2):
            zip_bytes = [lane for byte in range(8 * half, 8 * half + 8) for lane in (byte, 16 + byte)]
            ab, cd = (tirx.reinterpret("int16x8", _shuffle(pair, zip_bytes)) for pair in pairs)
            for i in range(2):
                lanes = [lane for k in range(4 * i, 4 * i + 4) for lane in (k, 8 + k)]
                yield (2 * half + i, j), _shuffle([ab, cd], lanes)


def register_arrange_values(dtype: str) -> str:
    """Register 16 rows of 16 bytes -> 4 x 4 vectors, whose lanes are 4 of the rows of a column."""
    name = f"gqa_neon_arrange_values_{dtype}"
    element = lambda A, i, j, x: A[j * 4 + x % 4, i * 4 + x // 4]  # noqa: E731
    return _register_arrange(name, (dtype, dtype), (16, 16), (4, 4, 16), element, _quads_of_rows)


def register_arrange_value_pairs(dtype: str) -> str:
    """Register 16 rows of 16 bytes -> 2 x 4 x 2 vectors: as `register_arrange_values`, with column quads in pairs."""

    def arrange(rows):
        for (quad, j), vector in _quads_of_rows(rows):
            yield (quad // 2, j, quad % 2), vector

    name = f"gqa_neon_arrange_value_pairs_{dtype}"
    element = lambda A, i, j, half, x: A[j * 4 + x % 4, i * 8 + half * 4 + x // 4]  # noqa: E731
    return _register_arrange(name, (dtype, dtype), (16, 16), (2, 4, 2, 16), element, arrange)


def register_arrange_digits(digits: int) -> str:
    """Register 4 rows of 4 words -> `digits` vectors, most significant first, whose lanes are bytes of 4 rows.

    The matcher drops an axis of extent 1: a single vector has none.
    """

    def arrange(rows):
        rows = [tirx.reinterpret("int8x16", row) for row in rows]
        # Bytes 0 and 2, or 1 and 3, of words of two rows in turn; then one of the two.
        for d in range(digits):
            half, first = divmod(digits - 1 - d, 2)
            lanes = [lane for byte in range(first, 16, 2) for lane in (byte, 16 + byte)]
            pairs = [tirx.reinterpret("int16x8", _shuffle(pair, lanes)) for pair in (rows[:2], rows[2:])]
            yield (d,)[: digits - 1], _shuffle(pairs, [lane for i in range(half, 8, 2) for lane in (i, 8 + i)])

    def element(A, *index):
        word = A[index[-1] % 4, index[-1] // 4]
        return T.Cast("int8", word >> (T.int32(8 * (digits - 1)) - index[0] * T.int32(8)) if index[1:] else word)

    name = f"gqa_neon_arrange_digits_{digits}"
    target = (digits, 16) if digits > 1 else (16,)
    return _register_arrange(name, ("int32", "int8"), (4, 4), target, element, arrange)
