"""The NumPy reference on ragged lengths, cache rows and codes worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference_calls import Array, attention, ramp, random

from gqa_tvm.reference import dequantize, group_query_attention, quantize, softmax

# --- lengths and rows ---


def test_rows_beyond_an_entry_are_never_read() -> None:  # B24
    query, key, value = (random(2, 1, 1, 8, seed=seed) for seed in range(3))
    past = random(2, 1, 5, 8)
    past[1, :, 2:] = np.nan
    result = attention(query, key, value, past, past, totals=[6, 3])
    assert np.isfinite(result.output).all()
    assert np.array_equal(result.present_key[1, 0, 2], key[1, 0, 0])
    assert not result.present_key[1, 0, 3:].any()


def test_prompt_padding_does_not_leak() -> None:  # B25
    query, key, value = (random(2, 4, 1, 8, seed=seed) for seed in range(3))
    for array in query, key, value:
        array[1, 2:] = np.nan
    output = attention(query, key, value, totals=[4, 2]).output
    alone = attention(query[1:, :2], key[1:, :2], value[1:, :2]).output
    np.testing.assert_allclose(output[1, :2], alone[0], rtol=1e-12)


def test_padded_rows_of_a_windowed_prompt() -> None:
    np.testing.assert_allclose(ramp(6, totals=[3], local_window_size=2), [0, 0.5, 1.5, 2, 0, 0])
    np.testing.assert_allclose(ramp(6, totals=[3]), [0, 0.5, 1, 1, 1, 1])


def test_chunks_of_different_length() -> None:  # B27
    query, key, value = (random(2, 3, 1, 8, seed=seed) for seed in range(3))
    past_key, past_value = random(2, 1, 8, 8, seed=3), random(2, 1, 8, 8, seed=4)
    counts = np.array([3, 1], np.int32)
    past = past_key, past_value
    result = attention(query, key, value, *past, totals=[7, 3], total=8, query_seqlens=counts)
    for b, (count, total) in enumerate([(3, 7), (1, 3)]):
        new = np.s_[b : b + 1, :count]
        old = np.s_[b : b + 1, :, : total - count]
        alone = attention(query[new], key[new], value[new], past_key[old], past_value[old])
        np.testing.assert_allclose(result.output[b, :count], alone.output[0], rtol=1e-12)
        assert np.array_equal(result.present_key[b, :, :total], alone.present_key[0])
    assert not result.output[1, 1:].any()
    assert not result.present_key[1, :, 3:].any()


@pytest.mark.parametrize("total", [3, 6])
def test_capacity_is_not_length(total: int) -> None:  # B29
    query, key, value = (random(1, 1, 1, 8, seed=seed) for seed in range(3))
    past = random(1, 1, 6, 8)
    result = attention(query, key, value, past, past, totals=[3], total=total)
    expected = attention(query, key, value, past[:, :, :2], past[:, :, :2]).output
    assert result.present_key.shape[2] == 6
    np.testing.assert_allclose(result.output, expected, rtol=1e-12)


def test_prompt_ignores_what_the_cache_held() -> None:  # B30, B50
    query, key, value = (random(1, 4, 1, 8, seed=seed) for seed in range(3))
    past = np.full((1, 1, 16, 8), np.nan, np.float32)
    result = attention(query, key, value, past, past, total=4, in_place=True)
    assert np.array_equal(result.output, attention(query, key, value).output)
    assert np.isnan(result.present_key[:, :, 4:]).all()


def test_shared_kv_appends_nothing() -> None:  # B31
    query, past = random(1, 1, 2, 8), random(1, 1, 4, 8)
    empty = np.zeros((1, 0, 1, 8), np.float32)
    result = attention(query, empty, empty, past, past, total=4)
    assert np.array_equal(result.present_key, past)
    weights = softmax(query[0, 0].astype(np.float64) @ past[0, 0].T / np.sqrt(8))
    np.testing.assert_allclose(result.output.reshape(2, 8), weights @ past[0, 0], rtol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_inputs_are_never_written(in_place: bool) -> None:  # B33, B79, B80
    query, key, past = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1), random(1, 1, 6, 8)
    for array in query, key, past:
        array.flags.writeable = False
    result = attention(query, key, key, past, past, totals=[3], total=6, in_place=in_place)
    changed = (result.present_key != past).any(axis=-1)[0, 0]
    assert changed.tolist() == [False, False, True, *[not in_place] * 3]


def test_packed_query_key_value() -> None:  # B77
    query, key, value = random(2, 3, 4, 16), random(2, 3, 2, 16, seed=1), random(2, 3, 2, 16)
    packed = np.concatenate([query, key, value], axis=2).reshape(2, 3, -1)
    lengths = np.array([2, 2], np.int32), np.array([3], np.int32)
    heads: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2}
    result = group_query_attention(packed, None, None, None, None, *lengths, **heads)
    expected = attention(query, key, value)
    assert np.array_equal(result.output, expected.output)
    assert np.array_equal(result.present_value, expected.present_value)


def test_rewound_cache() -> None:  # B83
    query, key, value = (random(1, 1, 1, 8, seed=seed) for seed in range(3))
    past = random(1, 1, 10, 8)
    rewound = attention(query, key, value, past, past, totals=[7], total=7).output
    fresh = attention(query, key, value, past[:, :, :6], past[:, :, :6]).output
    np.testing.assert_allclose(rewound, fresh, rtol=1e-12)


@pytest.mark.parametrize("totals", [[0], [3]])
def test_impossible_lengths_are_refused(totals: list[int]) -> None:  # B87
    new = random(1, 2, 1, 8)
    with pytest.raises(ValueError, match="do not fit"):
        attention(new, new, new, totals=totals)


# --- codes ---


INT8: dict[str, Any] = {
    "k_quant_type": "PER_TENSOR",
    "v_quant_type": "PER_TENSOR",
    "kv_cache_bit_width": 8,
}
INT4 = INT8 | {"kv_cache_bit_width": 4}


def scale(*values: float) -> Array:
    return np.array(values, np.float32)


def test_int4_bytes() -> None:  # B55
    x = scale(1, 2, 3, -1, 7.5, -8.5, 100, -100)
    packed = quantize(x, scale(1), 4)
    assert packed.tobytes().hex() == "a97b0f0f"
    expected = [1, 2, 3, -1, 7, -8, 7, -8]
    assert dequantize(packed, scale(1), 4, 8).tolist() == expected


def test_odd_int4_row_ends_with_code_zero() -> None:
    packed = quantize(scale(1, 2, 3), scale(1), 4)
    assert packed.tobytes().hex() == "a98b"
    assert dequantize(packed, scale(0.5), 4, 3).tolist() == [0.5, 1, 1.5]


def test_int8_rounds_half_to_even_by_the_reciprocal() -> None:  # B56
    x = scale(0.05, 0.15, 0.25, -0.05, -0.15, 12.75, -12.85, 100)
    assert quantize(x, scale(0.1), 8).tolist() == [0, 2, 2, 0, -2, 127, -128, 127]


@pytest.mark.parametrize(
    ("step", "codes"),
    [
        (0.0, [0, 3, -100, 127, -128, 127]),
        (-1.0, [0, -3, 100, -128, 127, 127]),
        (1e-39, [127, 127, -128, 127, -128, 127]),
        (np.inf, [0, 0, 0, 127, 127, 127]),
        (np.nan, [127] * 6),
    ],
)
def test_codes_of_odd_scales(step: float, codes: list[int]) -> None:  # B58
    x = scale(0, 3, -100, np.inf, -np.inf, np.nan)
    assert quantize(x, scale(step), 8).tolist() == codes
    assert quantize(x, scale(step), 4).tobytes() == pack(np.clip(codes, -8, 7))


def pack(codes: Array) -> bytes:
    return bytes(low + 8 + 16 * (high + 8) for low, high in codes.reshape(-1, 2).tolist())


def test_zero_scale_counts_as_zero() -> None:  # B58
    new = random(1, 2, 1, 8)
    result = attention(new, new, new, k_scale=scale(0), v_scale=scale(1), **INT8)
    values = np.rint(new[0, :, 0])
    np.testing.assert_allclose(result.output[0], [values[0], values.mean(axis=0)], atol=1e-15)


@pytest.mark.parametrize("shape", [(16,), (2, 8), (2, 1, 8), (1, 2, 1, 8)])
def test_channel_scales_by_kv_head(shape: tuple[int, ...]) -> None:  # B60
    steps = np.linspace(0.01, 0.2, 16, dtype=np.float32).reshape(shape)
    ones = np.ones((1, 1, 2, 8), np.float32)
    types: dict[str, Any] = {
        "k_quant_type": "per_channel",
        "v_quant_type": "PER_CHANNEL",
        "kv_cache_bit_width": 8,
    }
    query = np.ones((1, 1, 4, 8), np.float32)
    codes = attention(query, ones, ones, k_scale=steps, v_scale=steps, **types).present_key
    assert codes[0, 0, 0].tolist() == [100, 44, 28, 21, 16, 14, 12, 10]
    assert codes[0, 1, 0].tolist() == [9, 8, 7, 7, 6, 6, 5, 5]


@pytest.mark.parametrize("tokens", [1, 2])
def test_attention_reads_the_codes(tokens: int) -> None:  # B67
    new = np.full((1, tokens, 1, 8), 0.4, np.float32)
    result = attention(new, new, new, k_scale=scale(1), v_scale=scale(1), **INT8)
    assert not result.output.any()


@pytest.mark.parametrize("mode", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("steps", [[1] * 6, [6], [2, 4]])
def test_cache_does_not_depend_on_the_steps(mode: dict[str, Any], steps: list[int]) -> None:  # B68
    query, key, value = (random(1, 6, 2, 8, seed=seed) for seed in range(3))
    mode = mode | {"k_scale": scale(0.1), "v_scale": scale(0.1)}
    whole = attention(query, key, value, **mode)
    done, past = 0, (whole.present_key[:, :, :0], whole.present_value[:, :, :0])
    for step in steps:
        new = np.s_[:, done : done + step]
        result = attention(query[new], key[new], value[new], *past, **mode)
        past = result.present_key, result.present_value
        np.testing.assert_allclose(result.output, whole.output[new], rtol=1e-9)
        done += step
    assert np.array_equal(past[0], whole.present_key)
    assert np.array_equal(past[1], whole.present_value)
