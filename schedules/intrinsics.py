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
