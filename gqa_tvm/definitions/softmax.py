"""Softmax pieces that the naive and the online form share, so that they cannot drift apart."""

from __future__ import annotations

from tvm import te, tirx

from .exponential import BITS_PER_NAT, exp2_nonpositive


def empty_maximum():
    """The running maximum of a row that has seen no key: the identity of te.max, finite, so that -inf - m is -inf."""
    return tirx.min_value("float32")


def shifted_exp(score, maximum, bits: bool = True):
    """exp(score - maximum) for score <= maximum, of scores in bits or in nats.

    0 for a masked score (-inf), also when nothing was seen yet.
    """
    difference = score - maximum
    return exp2_nonpositive(difference if bits else difference * tirx.const(BITS_PER_NAT, "float32"))


def reciprocal_sum(total):
    """1 / total, and 0 for a fully masked row (total 0), whose output is zeros."""
    zero = tirx.const(0.0, "float32")
    return tirx.Select(total == zero, zero, tirx.const(1.0, "float32") / total)


def online_softmax(scores_at, shape, extent: int, m_old, l_old, rows_last: bool, bits: bool = True):
    """One step of the online softmax over a block of keys.

    scores_at: function (m, t) -> score, in bits or in nats. m_old, l_old: [M] running maximum and sum.
    Computation: m = max(m_old, max_t s), alpha = exp(m_old - m), p = exp(s - m), l = alpha l_old + sum_t p.
    Returns alpha, p (in `shape`: [T_block, M] when rows_last, else [M, T_block]), l, m; every output but alpha may
    overwrite its input, in this order.
    """
    rows = m_old.shape[0]
    t = te.reduce_axis((0, extent), name="t")
    block_max = te.compute((rows,), lambda m: te.max(scores_at(m, t), axis=t), name="block_max")
    m_new = te.compute((rows,), lambda m: tirx.max(m_old[m], block_max[m]), name="m_new")
    alpha = te.compute((rows,), lambda m: shifted_exp(m_old[m], m_new[m], bits), name="alpha")
    at = (lambda a, b: (b, a)) if rows_last else (lambda a, b: (a, b))

    def exponential(i, j):
        m, key = at(i, j)
        return shifted_exp(scores_at(m, key), m_new[m], bits)

    p = te.compute(shape, exponential, name="p")
    t2 = te.reduce_axis((0, extent), name="t")
    block_sum = te.compute((rows,), lambda m: te.sum(p[at(m, t2)], axis=t2), name="block_sum")
    l_new = te.compute((rows,), lambda m: l_old[m] * alpha[m] + block_sum[m], name="l_new")
    # Last, so that a caller may let it overwrite m_old, which alpha still reads.
    m_out = te.compute((rows,), lambda m: m_new[m], name="m_out")
    return alpha, p, l_new, m_out


def block_maximum(scores_at, extent: int, m_old):
    """b = max_t s, m = max(m_old, b), alpha = exp(m_old - m), w = exp(b - m) of a block's scores in bits, all [M].

    scores_at: function (m, t) -> score of `extent` keys.
    """
    rows = m_old.shape[0]
    t = te.reduce_axis((0, extent), name="t")
    block_max = te.compute((rows,), lambda m: te.max(scores_at(m, t), axis=t), name="block_max")
    m_new = te.compute((rows,), lambda m: tirx.max(m_old[m], block_max[m]), name="m_new")
    alpha = te.compute((rows,), lambda m: shifted_exp(m_old[m], m_new[m]), name="alpha")
    weight = te.compute((rows,), lambda m: shifted_exp(block_max[m], m_new[m]), name="weight")
    return block_max, m_new, alpha, weight


def block_softmax(scores, m_old, l_old):
    """As `online_softmax` of scores in bits [M, T_block], with probabilities relative to the block's own maximum b.

    m, alpha, w: of `block_maximum`; p = exp(s - b), l = alpha l_old + w sum_t p. Returns alpha, w, p, l, m; p, l, m may
    overwrite scores, l_old, m_old in this order.
    """
    rows, keys = scores.shape
    block_max, m_new, alpha, weight = block_maximum(lambda m, t: scores[m, t], keys, m_old)
    p = te.compute((rows, keys), lambda m, key: shifted_exp(scores[m, key], block_max[m]), name="p")
    t2 = te.reduce_axis((0, keys), name="t")
    block_sum = te.compute((rows,), lambda m: te.sum(p[m, t2], axis=t2), name="block_sum")
    l_new = te.compute((rows,), lambda m: l_old[m] * alpha[m] + block_sum[m] * weight[m], name="l_new")
    m_out = te.compute((rows,), lambda m: m_new[m], name="m_out")
    return alpha, weight, p, l_new, m_out
