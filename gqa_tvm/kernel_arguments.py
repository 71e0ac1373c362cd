"""Values of the scalar kernel parameters that encode a choice; shared by kernels and their callers."""

from __future__ import annotations

ROTARY_OFF, ROTARY_HALF_SPLIT, ROTARY_INTERLEAVED = 0, 1, 2
SINK_NONE, SINK_SMOOTH, SINK_HEAD = 0, 1, 2
# qk_output, 0 = not wanted
QK_BEFORE_SOFTMAX, QK_AFTER_SOFTMAX = 1, 2
