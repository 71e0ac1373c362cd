"""Marks of loops over cache rows that fetch what later loops will read."""

from __future__ import annotations

from .block_sizes import BlockSizes
from .steps import SERIAL, UNROLL_FIRST, VECTORIZED, Schedule, find_block

# The marks of a loop that reads rows: how many bytes ahead it fetches; and of the loops of its block around it.
FETCH_AHEAD = "fetch_ahead"
FETCH_AROUND = "fetch_around"
# The marks of loops that fetch rows of the next block, by cache: how many keys it has.
FETCH_NEXT_BLOCK = {"key_cache": "fetch_next_keys", "value_cache": "fetch_next_values"}
# The blocks that read keys or values in flash_decode, the first that is there: loaded, decoded, or used as they are.
_READERS = (
    ("load_k", "packed_k", "dequantize_k", "qk_partial_update"),
    ("load_k_short", "packed_k_short"),
    ("load_v", "packed_v", "dequantize_v", "sv_product_update", "sv_product_update_o"),
)


def fetch_ahead(sch: Schedule, sizes: BlockSizes) -> None:
    """Let the products of flash_decode fetch keys and values that come some rows after those that they read."""
    for readers in _READERS:
        block = next(filter(None, (find_block(sch, name) for name in readers)), None)
        if block is not None and sizes.fetch_bytes:
            _mark_loops(sch, block, sizes.fetch_bytes)


def fetch_next_block(sch: Schedule, sizes: BlockSizes) -> None:
    """Let the products of flash_prefill fetch the keys and values that come after the block's."""
    for block, cache in (("qk_update", "key_cache"), ("sv_product_update", "value_cache")):
        if sizes.fetch_bytes:
            serial = [loop for loop in sch.get_loops(sch.get_sblock(block)) if sch.get(loop).kind == SERIAL]
            sch.annotate(serial[-1], FETCH_NEXT_BLOCK[cache], sizes.kv_block)


def _mark_loops(sch: Schedule, block, fetch_bytes: int) -> None:
    loops = []
    for loop in sch.get_loops(block):
        if sch.get(loop).kind == VECTORIZED or UNROLL_FIRST in sch.get(loop).annotations:
            break
        loops.append(loop)
    *around, innermost = loops
    sch.annotate(innermost, FETCH_AHEAD, fetch_bytes)
    # Loops of one iteration, too: a tuner's trace has the same marks for every extent.
    for loop in around:
        sch.annotate(loop, FETCH_AROUND, 1)
