"""Joining softmax states (m, l, acc) of disjoint key ranges, and the last step that turns a state into output."""

from __future__ import annotations

from tvm import tirx

from .softmax import reciprocal_sum, shifted_exp


def weight(maximum, joint_maximum, bits: bool = True):
    """Factor of a state's l and acc when it joins others under `joint_maximum`; 0 for an empty state."""
    return shifted_exp(maximum, joint_maximum, bits)


def joint_maximum(maximum, sink):
    """Running maximum after a sink joined: one more score without a value (head_sink, or 0 for smooth softmax)."""
    return tirx.Select(sink > maximum, sink, maximum)


def normalise(factor, denominator):
    """What acc is multiplied by to give the output row: factor / denominator, 0 for a fully masked row."""
    return factor * reciprocal_sum(denominator)
