"""SVGemm: probabilities times values, added to the rescaled output."""

from __future__ import annotations

from tvm import te


def sv_gemm(probability, values, accumulator, row_beta, name: str = "sv"):
    """out[m, e, c] = row_beta[m] * accumulator[m, e, c] + sum_t probability(m, t) * values[t, e, c].

    row_beta 0 or 1 is the GEMM's beta; the online softmax passes its rescaling factor alpha here.
    probability: function (m, t) -> expression. Shapes: values [T_block, E, C], accumulator [M, E, C], row_beta [M].
    """
    t = te.reduce_axis((0, values.shape[0]), name="t")
    product = te.compute(
        accumulator.shape,
        lambda m, e, c: te.sum(probability(m, t) * values[t, e, c], axis=t),
        name=f"{name}_product",
    )
    return te.compute(
        accumulator.shape,
        lambda m, e, c: accumulator[m, e, c] * row_beta[m] + product[m, e, c],
        name=name,
    )
