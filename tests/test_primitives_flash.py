"""flash_attention over filled caches: strategies agree with each other and with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gqa_tvm import InvalidArgument
from gqa_tvm.primitives import flash_attention
from gqa_tvm.reference import group_query_attention
from gqa_tvm.targets import FALLBACKS, architecture, missing_features

MODES = {"i8": (8, False), "i8-channel": (8, True), "i4": (4, False), "i4-channel": (4, True)}
STRATEGIES = ("flash", "naive", "flash_decoding")


def make_arguments(mode="i8", *, tokens=4, total=64, head_size=64, heads=4, kv_heads=2, batch=2) -> dict[str, Any]:
    """Arguments with random codes; the entries' lengths differ, the first is `total`."""
    bits, per_channel = MODES[mode]
    rng = np.random.default_rng(tokens + total + head_size)
    shape = (batch, kv_heads, total + 3, head_size if bits == 8 else (head_size + 1) // 2)
    caches = rng.integers(0, 256, (2, *shape)).astype(np.uint8).view(np.int8 if bits == 8 else np.uint8)
    scales = rng.uniform(0.5, 1, (2, kv_heads * head_size if per_channel else 1)).astype(np.float32)
    lengths = rng.integers(tokens, total + 1, batch)
    lengths[0] = total
    return {
        "query": rng.standard_normal((batch, tokens, heads, head_size)).astype(np.float32),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "total_lengths": lengths,
        "k_scale": scales[0] / np.float32(2 ** (bits - 1)),
        "v_scale": scales[1] / np.float32(2 ** (bits - 1)),
        "bits": bits,
    }


def expected(query, key_cache, value_cache, total_lengths, k_scale, v_scale, bits, **rules):
    """The reference entry by entry, as steps that add no keys."""
    batch, tokens, heads, head_size = query.shape
    kv_heads = key_cache.shape[1]
    quant_type = "PER_TENSOR" if k_scale.size == 1 else "PER_CHANNEL"
    nothing = np.zeros((1, 0, kv_heads * head_size), np.float32)
    entries = [
        group_query_attention(
            *(query[b : b + 1].reshape(1, tokens, -1), nothing, nothing),
            *(key_cache[b : b + 1], value_cache[b : b + 1]),
            *(total_lengths[b : b + 1].astype(np.int32) - 1, int(total_lengths[b])),
            k_scale=k_scale,
            v_scale=v_scale,
            num_heads=heads,
            kv_num_heads=kv_heads,
            k_quant_type=quant_type,
            v_quant_type=quant_type,
            kv_cache_bit_width=bits,
            **rules,
        ).output
        for b in range(batch)
    ]
    return np.concatenate(entries).reshape(query.shape)


def assert_close(got, wanted):
    error = np.abs(got - wanted)
    assert got.dtype == np.float32 and (error <= 1e-6 * np.maximum(1, np.abs(wanted))).all(), error.max()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_size", [64, *(pytest.param(h, marks=pytest.mark.slow) for h in (4, 32, 33))])
def test_strategies_agree_with_the_reference(mode, head_size):
    for tokens in (1, 4, 16):
        for total in (4, 32, 64):
            if total >= tokens:
                arguments = make_arguments(mode, tokens=tokens, total=total, head_size=head_size)
                wanted = expected(**arguments)
                for strategy in STRATEGIES:
                    assert_close(flash_attention(**arguments, strategy=strategy), wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "rules", [{"local_window_size": 5}, {"softcap": 2.0}, {"causal": 0}, {"scale": 0.3}], ids=lambda r: next(iter(r))
)
def test_rules_of_the_scores(rules, strategy):
    arguments = make_arguments(tokens=4, total=64)
    got = flash_attention(**arguments, strategy=strategy, **rules)
    wanted = expected(**arguments, **rules)
    assert_close(got, wanted)
    assert np.abs(wanted - expected(**arguments)).max() > 1e-3


@pytest.mark.parametrize("tokens,total", [(1, 3000), (40, 300)])
def test_threads_do_not_matter(tokens, total):
    arguments = make_arguments("i4", tokens=tokens, total=total)
    results = [flash_attention(**arguments, num_threads=n, strategy="auto") for n in (1, 2, 5, None)]
    assert_close(results[0], expected(**arguments))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["generic", "x86-avx2", "x86-avx512"])
@pytest.mark.parametrize("group", [1, 5, 7, 9])
def test_group_sizes_of_every_target(target, group, monkeypatch):
    if target not in FALLBACKS[architecture()] or missing_features(target):
        pytest.skip(f"this CPU cannot run {target}")
    monkeypatch.setenv("GQA_TVM_TARGET", target)
    arguments = make_arguments("i4-channel", tokens=1, total=150, head_size=40, heads=2 * group)
    assert_close(flash_attention(**arguments), expected(**arguments))


def test_caches_are_read_where_they_are_and_never_written(tmp_path):
    arguments = make_arguments(tokens=4)
    wanted = flash_attention(**arguments)
    for name in ("key_cache", "value_cache"):
        np.save(tmp_path / f"{name}.npy", arguments[name].transpose(0, 2, 1, 3))
        # A write into such memory would end the process.
        arguments[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r").transpose(0, 2, 1, 3)
    arguments["query"] = arguments["query"].transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(flash_attention(**arguments), wanted)


def test_one_cache_may_serve_as_keys_and_values():
    arguments = make_arguments(tokens=1)
    arguments["value_cache"] = arguments["key_cache"]
    assert_close(flash_attention(**arguments), expected(**arguments))


def test_scales_may_differ_in_kind():
    arguments = make_arguments("i8-channel")
    arguments["k_scale"] = arguments["k_scale"][:1]
    repeated = {**arguments, "k_scale": arguments["k_scale"].repeat(128)}
    assert_close(flash_attention(**arguments), expected(**repeated))


BAD_ARGUMENTS = [
    ({"bits": 16}, "bits must be 8 or 4, got 16"),
    ({"bits": 4}, "key_cache must be an array of uint8, got int8"),
    ({"query": np.zeros((2, 4, 64), np.float32)}, "query must have 4 axes"),
    ({"query": np.zeros((2, 4, 3, 64), np.float32)}, "multiple of the KV heads, got 3 and 2"),
    ({"query": np.zeros((3, 4, 4, 64), np.float32)}, "the query's 3 entries, got 2"),
    ({"query": np.zeros((2, 4, 4, 60), np.float32)}, "key_cache must have 60 elements a row for 60 columns, got 64"),
    ({"value_cache": np.zeros((2, 2, 9, 64), np.int8)}, r"one shape, got \(2, 2, 67, 64\) and \(2, 2, 9, 64\)"),
    ({"total_lengths": np.array([3, 64])}, r"within \[S, C\] = \[4, 67\], got 3"),
    ({"total_lengths": np.array([64, 68])}, r"within \[S, C\] = \[4, 67\], got 68"),
    ({"total_lengths": np.array([64])}, r"int32 or int64 of shape \(2,\), got int64 of shape \(1,\)"),
    ({"total_lengths": np.array([64.0, 64.0])}, "got float64"),
    ({"k_scale": np.ones(64, np.float32)}, "k_scale must have 1 element or 128, got 64"),
    ({"v_scale": np.float32("inf")}, "v_scale must be finite, got inf"),
    ({"causal": 0, "local_window_size": 5}, "local_window_size must be -1 when causal is 0"),
    ({"local_window_size": 0}, "local_window_size must be -1"),
    ({"strategy": "fast"}, "strategy must be one of"),
    ({"num_threads": -1}, "num_threads must be a positive integer"),
]


@pytest.mark.parametrize("change,message", BAD_ARGUMENTS, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_arguments(change, message):
    with pytest.raises(InvalidArgument, match=message):
        flash_attention(**{**make_arguments(), **change})
