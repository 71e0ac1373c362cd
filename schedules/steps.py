"""Schedule steps shared by the targets: each takes a schedule and block names, and changes only those blocks."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import s_tir

from .block_sizes import BlockSizes, largest_divisor

Schedule = s_tir.Schedule
# The kinds of loops.
SERIAL, VECTORIZED = 0, 2
# Marks of loops over the rows of a task and the keys of a block, and the int32 buffers of kernels where they begin and
# end (`visible_tiles`): the first row that sees a key of the block [1]; the rows of the task [1]; the block's keys that
# some row sees [1]; those that a row or one before it sees [M].
FIRST_ROW = "first_seeing_row"
TASK_ROWS = "task_rows"
LAST_KEY = "last_key"
BLOCK_KEYS = "block_keys"
ROW_KEYS = "row_keys"
# The mark of loops that are unrolled before anything is simplified or vectorised.
UNROLL_FIRST = "unroll_first"


def _own_loops(sch: Schedule, block, count: int):
    return sch.get_loops(block)[-count:]


def _fitted(extent: int, size):
    """`size` made a divisor of `extent`. One that a tuner samples is a random variable, of divisors only."""
    return largest_divisor(extent, size) if isinstance(size, int) else size


def find_block(sch: Schedule, name: str):
    """A block by its name, None if there is none."""
    try:
        return sch.get_sblock(name)
    except s_tir.ScheduleError:
        return None


def parallelize_tasks(sch: Schedule, block_name: str = "task") -> None:
    """Run the tasks (the loops around the outermost block) on all threads."""
    loops = sch.get_loops(sch.get_sblock(block_name))
    sch.parallel(sch.fuse(*loops))


def vectorize_last(sch: Schedule, block_name: str, lanes: int, unroll: int = 1) -> None:
    """Vectorise the innermost axis of an elementwise block, `unroll` vectors at a time."""
    loop = _own_loops(sch, sch.get_sblock(block_name), 1)[0]
    extent = int(sch.get(loop).extent)
    lanes = largest_divisor(extent, lanes)
    vectors = _fitted(extent // lanes, unroll)
    _, middle, inner = sch.split(loop, [None, vectors, lanes])
    sch.unroll(middle)
    sch.vectorize(inner)


def start_at_first_row(sch: Schedule, loop, rows: int) -> None:
    """Mark a loop over the tiles of a task's `rows`: it may begin with the row in buffer FIRST_ROW and end with those
    in TASK_ROWS, where there are such buffers.

    The rows before see no key of the block, those after repeat the last one.
    """
    sch.annotate(loop, FIRST_ROW, rows)


def end_at_last_key(sch: Schedule, loop, keys: int) -> None:
    """Mark a loop over the `keys` keys of a block: it may end with the last one that a row sees."""
    sch.annotate(loop, LAST_KEY, keys)


def end_elementwise_at_last_key(sch: Schedule, block_names: Sequence[str]) -> None:
    """The same for the loops of blocks over [keys, rows]."""
    for name in block_names:
        block = sch.get_sblock(name)
        end_at_last_key(sch, sch.get_loops(block)[0], int(sch.get(block).writes[0].source.shape[0]))


def cache_row_bytes(sch: Schedule, block_name: str) -> int:
    """Bytes of a cache row [column] that a block decodes."""
    source = sch.get(sch.get_sblock(block_name)).reads[0].source
    return int(source.shape[-1]) * tvm.DataType(str(source.dtype)).itemsize


def decode_once(sch: Schedule, block_name: str, sizes: BlockSizes) -> None:
    """Decode a cache block ahead of its use, unless it is float32 already: whole vectors are read where they lie."""
    block = sch.get_sblock(block_name)
    source = sch.get(block).reads[0].source
    if str(source.dtype) == "float32" and sizes.padded_columns(int(source.shape[1])) == int(source.shape[1]):
        sch.compute_inline(block)
    else:
        decode_by_vectors(sch, block_name, sizes.lanes)
        end_elementwise_at_last_key(sch, (block_name,))


def decode_by_vectors(sch: Schedule, block_name: str, lanes: int) -> None:
    """Decode a cache block [t, plane, column] so that one load of a vector serves every plane."""
    _, plane, column = _own_loops(sch, sch.get_sblock(block_name), 3)
    vectors, inner = sch.split(column, [None, lanes])
    sch.reorder(vectors, plane, inner)
    # The last vector may reach beyond the row, where loads are not those of a vector.
    sch.annotate(vectors, UNROLL_FIRST, 1)
    sch.unroll(plane)
    sch.vectorize(inner)


def reduce_down_columns(sch: Schedule, block_name: str, lanes: int, vectors: int) -> None:
    """Reduce [t] for every row with the rows as lanes: `vectors` independent accumulators hide the latency."""
    block = sch.get_sblock(block_name)
    row, t = _own_loops(sch, block, 2)
    extent = int(sch.get(row).extent)
    _, middle, inner = sch.split(row, [None, _fitted(extent // lanes, vectors), lanes])
    sch.reorder(t, middle, inner)
    sch.unroll(middle)
    sch.vectorize(inner)
    end_at_last_key(sch, t, int(sch.get(t).extent))
    sch.decompose_reduction(block, t)
    _vectorize_init(sch, f"{block_name}_init")


def _vectorize_init(sch: Schedule, block_name: str) -> None:
    """Give the initialisation that decompose_reduction split off the tile's own loop kinds."""
    loops = _own_loops(sch, sch.get_sblock(block_name), 1)
    if sch.get(loops[-1]).kind != VECTORIZED:
        sch.vectorize(loops[-1])


def tile_qk_for_registers(sch: Schedule, sizes: BlockSizes, block_name: str = "qk") -> None:
    """Scores [t, m]: a tile of qk_key_tile keys x qk_row_vectors vectors of rows stays in registers over the head."""
    block = sch.get_sblock(block_name)
    t, m, plane, column = _own_loops(sch, block, 4)
    rows, keys = int(sch.get(m).extent), int(sch.get(t).extent)
    t_outer, t_inner = sch.split(t, [None, sizes.qk_key_tile])
    end_at_last_key(sch, t_outer, keys)
    vectors = _fitted(rows // sizes.lanes, sizes.qk_row_vectors)
    m_outer, m_vectors, lane = sch.split(m, [None, vectors, sizes.lanes])
    start_at_first_row(sch, m_outer, rows)
    sch.reorder(m_outer, t_outer, plane, column, t_inner, m_vectors, lane)
    write_back = sch.cache_write(block, 0, "global")
    sch.reverse_compute_at(write_back, t_outer, preserve_unit_loops=True)
    _unroll_tile(sch, write_back, sizes.lanes)
    for loop in (t_inner, m_vectors):
        sch.unroll(loop)
    sch.vectorize(lane)
    sch.decompose_reduction(block, plane)


def tile_sv_for_registers(sch: Schedule, sizes: BlockSizes, name: str = "sv", suffix: str = "") -> None:
    """acc [m, plane, column]: a tile of sv_row_tile rows x sv_column_vectors vectors stays in registers over the keys,
    then the rescaled accumulator is added once."""
    product, result = sch.get_sblock(f"{name}_product{suffix}"), sch.get_sblock(f"{name}{suffix}")
    m, plane, column, t = _own_loops(sch, product, 4)
    columns, rows = int(sch.get(column).extent), int(sch.get(m).extent)
    end_at_last_key(sch, t, int(sch.get(t).extent))
    m_outer, m_inner = sch.split(m, [None, _fitted(rows, sizes.sv_row_tile)])
    start_at_first_row(sch, m_outer, rows)
    vectors = _fitted(columns // sizes.lanes, sizes.sv_column_vectors)
    c_outer, c_vectors, lane = sch.split(column, [None, vectors, sizes.lanes])
    sch.reorder(plane, c_outer, m_outer, t, m_inner, c_vectors, lane)
    sch.reverse_compute_at(result, m_outer, preserve_unit_loops=True)
    _unroll_tile(sch, result, sizes.lanes)
    for loop in (m_inner, c_vectors):
        sch.unroll(loop)
    sch.vectorize(lane)
    sch.decompose_reduction(product, t)


def _unroll_tile(sch: Schedule, block, lanes: int) -> None:
    """Unroll the write-back of a register tile down to whole vectors."""
    loops = sch.get_loops(block)
    outer, inner = sch.split(loops[-1], [None, lanes])
    sch.vectorize(inner)
    sch.unroll(outer)
    for loop in reversed(loops[:-1]):
        if sch.get(loop).kind != 0 or not _is_tile_loop(sch, loop):
            break
        sch.unroll(loop)


def _is_tile_loop(sch: Schedule, loop) -> bool:
    return str(sch.get(loop).loop_var.name).startswith("ax")


def tile_qk_for_lane_sums(
    sch: Schedule, sizes: BlockSizes, row_tile: int, keys: int, intrinsic: str, padded: bool
) -> None:
    """Scores [m, t] of few rows: partial sums of row_tile x `keys` pairs in registers, each decoded key vector used
    by all rows, then summed across lanes by the intrinsic."""
    scores, partial = sch.get_sblock("qk"), sch.get_sblock("qk_partial")
    m, t, lane = _own_loops(sch, scores, 3)
    block = int(sch.get(t).extent)
    t_outer, t_inner = sch.split(t, [None, keys])
    end_at_last_key(sch, t_outer, block)
    # The intrinsic has no loop for an axis of extent 1: that one stays outside.
    outer, inner = (t_inner, m) if keys == 1 else (m, t_inner)
    sch.reorder(t_outer, outer, inner, lane)
    sch.compute_at(partial, t_outer, preserve_unit_loops=True)
    zero = _own_loops(sch, sch.decompose_reduction(scores, outer), 1)[0]
    if keys == 1:
        sch.unroll(zero)
    else:
        sch.vectorize(zero)
    sch.tensorize(outer if row_tile > 1 and keys > 1 else inner, intrinsic)
    t, m, lane, v, plane = _own_loops(sch, partial, 5)
    first = v
    if sizes.decode_query_vectors and row_tile > 1:
        planes, vectors = int(sch.get(plane).extent), int(sch.get(v).extent)
        # Planes of a key are decoded together and need as many registers again.
        together = largest_divisor(vectors, max(1, sizes.decode_query_vectors // (row_tile * planes * planes)))
        first, v = sch.split(v, [None, together])
        sch.reorder(first, t)
    # Else key by key in memory order: the hardware prefetcher follows whole rows.
    sch.reorder(t, v, plane, m, lane)
    for loop in (t, v, plane, m):
        sch.unroll(loop)
    sch.vectorize(lane)
    inline_or_decode(sch, "dequantize_k", sizes.lanes, padded)
    init = sch.decompose_reduction(partial, first)
    for loop in _own_loops(sch, init, 3)[:-1]:
        sch.unroll(loop)


def inline_or_decode(sch: Schedule, block_name: str, lanes: int, padded: bool) -> None:
    """Decode cache elements where they are used; rows that need padding are decoded into a block first."""
    if padded:
        decode_by_vectors(sch, block_name, lanes)
    else:
        sch.compute_inline(sch.get_sblock(block_name))


def tile_sv_for_few_rows(sch: Schedule, sizes: BlockSizes, row_tile: int, padded: bool) -> None:
    """acc [m, plane, column] of few rows: all rows x as many column vectors as fit stay in registers over the keys."""
    product, result = sch.get_sblock("sv_product"), sch.get_sblock("sv")
    m, plane, column, t = _own_loops(sch, product, 4)
    vectors = int(sch.get(column).extent) // sizes.lanes
    planes = int(sch.get(plane).extent)
    fitting = max(1, sizes.decode_accumulators // (row_tile * planes))
    c_outer, c_vectors, lane = sch.split(column, [None, largest_divisor(vectors, fitting), sizes.lanes])
    block = int(sch.get(t).extent)
    t_outer, t_inner = sch.split(t, [None, sizes.decode_sv_unroll])
    end_at_last_key(sch, t_outer, block)
    sch.reorder(c_outer, t_outer, t_inner, c_vectors, plane, m, lane)
    sch.reverse_compute_at(result, c_outer, preserve_unit_loops=True)
    loops = sch.get_loops(result)
    outer, inner = sch.split(loops[-1], [None, sizes.lanes])
    for loop in (*loops[-3:-1], outer):
        sch.unroll(loop)
    sch.vectorize(inner)
    for loop in (t_inner, c_vectors, plane, m):
        sch.unroll(loop)
    sch.vectorize(lane)
    inline_or_decode(sch, "dequantize_v", sizes.lanes, padded)
    sch.decompose_reduction(product, t_outer)


def transpose_by_tiles(sch: Schedule, block_name: str, intrinsic: str, lanes: int, keys: int = 0) -> None:
    """out[.., t, r] from in[.., r, t] by tiles of lanes x lanes in registers; keys: of a block, if t counts them."""
    t, r = _own_loops(sch, sch.get_sblock(block_name), 2)
    t_outer, t_inner = sch.split(t, [None, lanes])
    if keys:
        end_at_last_key(sch, t_outer, keys)
    r_outer, r_inner = sch.split(r, [None, lanes])
    sch.reorder(t_outer, r_outer, t_inner, r_inner)
    sch.tensorize(t_inner, intrinsic)


def reduce_along_row(sch: Schedule, block_name: str, lanes: int) -> None:
    """Reduce [t] of each row with the keys as lanes: lane-wise over the block, then across the lanes once."""
    _, t = _own_loops(sch, sch.get_sblock(block_name), 2)
    _, lane = sch.split(t, [None, lanes])
    by_lane = sch.rfactor(lane, 1)
    row, step, lane = _own_loops(sch, by_lane, 3)
    sch.reorder(row, step, lane)
    sch.vectorize(lane)
    sch.decompose_reduction(by_lane, step)
