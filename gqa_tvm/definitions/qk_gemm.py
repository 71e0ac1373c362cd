"""QKGemm: scores of query rows against cache rows."""

from __future__ import annotations

from tvm import te


def qk_gemm_rows_last(query_t, keys, name: str = "qk"):
    """Scores with the query rows as lanes.

    Shapes: query_t [E, C, M], keys [T_block, E, C] -> [T_block, M].
    Computation: out[t, m] = sum_{e,c} keys[t, e, c] * query_t[e, c, m].
    """
    planes, columns, rows = query_t.shape
    e = te.reduce_axis((0, planes), name="e")
    c = te.reduce_axis((0, columns), name="c")
    return te.compute(
        (keys.shape[0], rows),
        lambda t, m: te.sum(keys[t, e, c] * query_t[e, c, m], axis=[e, c]),
        name=name,
    )


def qk_gemm_rows_first(query, keys, lanes: int, name: str = "qk"):
    """Scores with the keys as lanes of the result, for few rows: partial sums per lane, then their sum.

    Shapes: query [M, E, C], keys [T_block, E, C] -> partial [T_block, M, lanes] and scores [M, T_block].
    Computation: scores[m, t] = sum_l partial[t, m, l], partial[t, m, l] = sum over the columns c = l mod lanes.
    """
    rows, planes, columns = query.shape
    v = te.reduce_axis((0, columns // lanes), name="v")
    e = te.reduce_axis((0, planes), name="e")
    partial = te.compute(
        (keys.shape[0], rows, lanes),
        lambda t, m, lane: te.sum(keys[t, e, v * lanes + lane] * query[m, e, v * lanes + lane], axis=[v, e]),
        name=f"{name}_partial",
    )
    lane = te.reduce_axis((0, lanes), name="lane")
    scores = te.compute((rows, keys.shape[0]), lambda m, t: te.sum(partial[t, m, lane], axis=lane), name=name)
    return partial, scores
