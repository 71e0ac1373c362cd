"""Tensor intrinsics, each described by its own loop nest."""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T


def _shuffle(vectors, lanes):
    return tirx.Shuffle(vectors, [T.int32(lane) for lane in lanes])


def _stack_vector(value, lanes: int):
    """`value` through a one-vector stack buffer: the code generator re-expands bound vector expressions."""
    buffer = T.alloc_buffer((lanes,), "float32", annotations={"disable_lower_builtin": 1})
    T.buffer_store(buffer, value, [T.ramp(0, 1, lanes)])
    return buffer[T.ramp(0, 1, lanes)]


def _pair_sum(a, b, lanes: int):
    """Lane i < lanes / 2 = a[2i] + a[2i + 1], the other half the same of b."""
    even, odd = range(0, 2 * lanes, 2), range(1, 2 * lanes, 2)
    return _stack_vector(_shuffle([a, b], even) + _shuffle([a, b], odd), lanes)


def sum_lanes(vectors, lanes: int):
    """`lanes` vectors -> one vector whose lane i is the sum of vector i, by a tree of pairwise sums.

    Fewer vectors are filled up with the first one; their lanes are not used.
    """
    vectors = list(vectors) + [vectors[0]] * (lanes - len(vectors))
    while len(vectors) > 1:
        vectors = [_pair_sum(a, b, lanes) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _store_sums(source, target, rows: int, keys: int, lanes: int) -> None:
    flat = [(r, k) for r in range(rows) for k in range(keys)]
    for start in range(0, len(flat), lanes):
        group = flat[start : start + lanes]
        sums = sum_lanes([source[k, r, T.ramp(0, 1, lanes)] for r, k in group], lanes)
        for r in sorted({row for row, _ in group}):
            members = [(i, k) for i, (row, k) in enumerate(group) if row == r]
            first_key, count = members[0][1], len(members)
            picked = _shuffle([sums], [i for i, _ in members])
            index = first_key if count == 1 else T.ramp(first_key, 1, count)
            T.buffer_store(target, target[r, index] + picked, [r, index])


def _describe_lane_sum(source, target, rows: int, keys: int, lanes: int) -> None:
    """The loop nest of the intrinsic; axes of extent 1 have no iterator, as the matcher has dropped theirs."""
    extents = {axis: n for axis, n in (("r", rows), ("k", keys)) if n > 1}
    with T.grid(*extents.values(), lanes) as loops:
        loops = dict(zip((*extents, "lane"), loops if extents else (loops,), strict=True))
        with T.sblock("sum"):
            axis = {name: T.axis.spatial(extents[name], loops[name]) for name in extents}
            lane = T.axis.reduce(lanes, loops["lane"])
            r, k = axis.get("r", 0), axis.get("k", 0)
            T.buffer_store(target, target[r, k] + source[k, r, lane], [r, k])


def register_lane_sum(rows: int, keys: int, lanes: int) -> str:
    """Register out[r, k] += sum_lane in[k, r, lane] for a [rows, keys] tile; returns the intrinsic's name."""
    name = f"gqa_lane_sum_r{rows}_k{keys}_w{lanes}"

    @T.prim_func(s_tir=True)
    def description(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (keys, rows, lanes), "float32", offset_factor=1, align=4)
        C = T.match_buffer(c, (rows, keys), "float32", offset_factor=1, align=4, strides=[T.int32(), 1])
        with T.sblock("root"):
            T.reads(C[0:rows, 0:keys], A[0:keys, 0:rows, 0:lanes])
            T.writes(C[0:rows, 0:keys])
            _describe_lane_sum(A, C, rows, keys, lanes)

    @T.prim_func(s_tir=True)
    def implementation(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (keys, rows, lanes), "float32", offset_factor=1, align=4)
        C = T.match_buffer(c, (rows, keys), "float32", offset_factor=1, align=4, strides=[T.int32(), 1])
        with T.sblock("root"):
            T.reads(C[0:rows, 0:keys], A[0:keys, 0:rows, 0:lanes])
            T.writes(C[0:rows, 0:keys])
            _store_sums(A, C, rows, keys, lanes)

    TensorIntrin.register(name, description, implementation, override=True)
    return name


def _exchange(rows: list, distance: int, lanes: int) -> list:
    """Swap the off-diagonal quarters of every block of 2 x distance rows and lanes."""
    result = list(rows)
    low = [lane if not lane & distance else lanes + lane - distance for lane in range(lanes)]
    high = [lane + distance if not lane & distance else lanes + lane for lane in range(lanes)]
    for i in range(lanes):
        if not i & distance:
            pair = [rows[i], rows[i + distance]]
            result[i] = _stack_vector(_shuffle(pair, low), lanes)
            result[i + distance] = _stack_vector(_shuffle(pair, high), lanes)
    return result


def _emit_transpose(addend, source, target, lanes: int) -> None:
    rows = [_stack_vector(source[r, T.ramp(0, 1, lanes)], lanes) for r in range(lanes)]
    distance = lanes // 2
    while distance:
        rows = _exchange(rows, distance, lanes)
        distance //= 2
    for t, column in enumerate(rows):
        index = T.ramp(0, 1, lanes)
        value = column if addend is None else addend[t, index] + column
        T.buffer_store(target, value, [t, index])


def _describe_transpose(addend, source, target, lanes: int) -> None:
    with T.grid(lanes, lanes) as (t, r):
        with T.sblock("transpose"):
            vt, vr = T.axis.spatial(lanes, t), T.axis.spatial(lanes, r)
            value = source[vr, vt] if addend is None else addend[vt, vr] + source[vr, vt]
            T.buffer_store(target, value, [vt, vr])


def _tile(handle, lanes: int):
    return T.match_buffer(handle, (lanes, lanes), "float32", offset_factor=1, align=4, strides=[T.int32(), 1])


def register_transpose(lanes: int) -> str:
    """Register out[t, r] = in[r, t] for a [lanes, lanes] tile; returns the intrinsic's name.

    A network of log2(lanes) stages in registers: LLVM would gather with a stride instead.
    """
    name = f"gqa_transpose_w{lanes}"

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(a: T.handle, c: T.handle) -> None:
            A = T.meta_var(_tile(a, lanes))
            C = T.meta_var(_tile(c, lanes))
            with T.sblock("root"):
                T.reads(A[0:lanes, 0:lanes])
                T.writes(C[0:lanes, 0:lanes])
                emit(None, A, C, lanes)

        return body

    TensorIntrin.register(name, function(_describe_transpose), function(_emit_transpose), override=True)
    return name


def register_transpose_add(lanes: int) -> str:
    """Register out[t, r] = addend[t, r] + in[r, t], else as `register_transpose`."""
    name = f"gqa_transpose_add_w{lanes}"

    def function(emit):
        @T.prim_func(s_tir=True)
        def body(s: T.handle, a: T.handle, c: T.handle) -> None:
            S = T.meta_var(_tile(s, lanes))
            A = T.meta_var(_tile(a, lanes))
            C = T.meta_var(_tile(c, lanes))
            with T.sblock("root"):
                T.reads(S[0:lanes, 0:lanes], A[0:lanes, 0:lanes])
                T.writes(C[0:lanes, 0:lanes])
                emit(S, A, C, lanes)

        return body

    TensorIntrin.register(name, function(_describe_transpose), function(_emit_transpose), override=True)
    return name
