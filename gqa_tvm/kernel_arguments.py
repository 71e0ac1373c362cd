"""Values of the scalar kernel parameters that encode a choice; shared by kernels and their callers."""

from __future__ import annotations

ROTARY_OFF, ROTARY_HALF_SPLIT, ROTARY_INTERLEAVED = 0, 1, 2
SINK_NONE, SINK_SMOOTH, SINK_HEAD = 0, 1, 2
# Columns of `entries` [B, 4] int32: cache rows before the new tokens, cache rows after them, new tokens that count, and
# the position of cache row 0 in the sequence (above 0 only in a sliding window cache).
ENTRY_PAST, ENTRY_TOTAL, ENTRY_NEW, ENTRY_ORIGIN = 0, 1, 2, 3
# Keys that lie together in a packed cache: a row of the kernels' buffer holds so many.
PACKED_KEYS = {"key_cache": 16, "value_cache": 4}
# qk_output, 0 = not wanted
QK_BEFORE_SOFTMAX, QK_AFTER_SOFTMAX = 1, 2
