"""Kernels are right at other block sizes than the defaults, and sizes that cannot work are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gqa_tvm.schedules.block_sizes import default_block_sizes
from operator_calls import assert_close, expected, make_call

from gqa_tvm import GroupQueryAttention, runtime
from gqa_tvm.targets import best_target, family_facts, find_target
from gqa_tvm.tuned_sizes import SizesTable
from gqa_tvm.variants import machine_variant

VARIANTS = (
    {"kv_block": 192, "decode_kv_block": 128, "kv_chunk": 256},
    {"qk_row_vectors": 1, "sv_row_tile": 4, "sv_column_vectors": 1, "decode_sv_unroll": 1, "key_tile_bytes": 0},
    {"decode_rows": 5},
)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(f"{n}={x}" for n, x in v.items()))
@pytest.mark.parametrize("cache", ["f32", "i8-channel", "i4-channel"])
def test_other_block_sizes(cache, variant, tmp_path, monkeypatch):
    changed = machine_variant(best_target())._replace(base=None)
    changed = changed._replace(sizes=SizesTable(replace(changed.sizes.default, **variant)))
    runtime.launcher()
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path))
    monkeypatch.setattr(runtime, "machine_variant", lambda target: changed)
    monkeypatch.setattr(runtime, "_libraries", {})
    for tokens, total in ((1, 255), (1, 600), (9, 257), (60, 193)):
        attributes, inputs = make_call(cache, tokens=tokens, total=total)
        for strategy in ("naive", "flash", "flash_decoding"):
            got = GroupQueryAttention(**attributes, strategy=strategy)(**inputs)
            assert_close(got.output, expected(attributes, inputs).output)
            assert not np.isnan(got.output).any()


@pytest.mark.parametrize("name,value", [("q_block", 40), ("kv_block", 3), ("kv_chunk", 1000), ("decode_kv_block", 0)])
def test_sizes_that_do_not_divide_are_refused(name, value):
    with pytest.raises(ValueError, match="block sizes"):
        replace(default_block_sizes(family_facts(find_target("x86-avx512"))), **{name: value})


@pytest.mark.parametrize("tile_bytes", [0, 256, 1024])
@pytest.mark.parametrize("row_tile", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("key_bytes", [32, 128, 192, 512, 1024])
def test_a_tile_of_keys_is_short_and_fits_the_accumulators(tile_bytes, row_tile, key_bytes):
    sizes = default_block_sizes(family_facts(find_target("x86-avx512")))
    keys = replace(sizes, key_tile_bytes=tile_bytes).decode_key_tile(row_tile, key_bytes)
    assert keys * row_tile <= sizes.decode_accumulators and sizes.decode_kv_block % keys == 0
    most = max(2, tile_bytes // key_bytes) if tile_bytes else sizes.decode_accumulators
    assert keys <= most
    assert 2 * keys > most or 2 * keys * row_tile > sizes.decode_accumulators
