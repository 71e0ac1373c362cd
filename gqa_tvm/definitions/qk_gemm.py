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

    Shapes: query [M, E, C], keys [T_block, E, C] -> partial [M, T_block, lanes] and scores [M, T_block].
    Computation: scores[m, t] = sum_l partial[m, t, l], partial[m, t, l] = sum over the columns c = l mod lanes.
    """
    rows, planes, columns = query.shape
    v = te.reduce_axis((0, columns // lanes), name="v")
    e = te.reduce_axis((0, planes), name="e")
    partial = te.compute(
        (rows, keys.shape[0], lanes),
        lambda m, t, lane: te.sum(
            keys[t, e, v * lanes + lane] * query[m, e, v * lanes + lane], axis=[v, e]
        ),
        name=f"{name}_partial",
    )
    lane = te.reduce_axis((0, lanes), name="lane")
    scores = te.compute(
        (rows, keys.shape[0]), lambda m, t: te.sum(partial[m, t, lane], axis=lane), name=name
    )
    return partial, scores
