"""Codes of inputs and scales at the edges: the same bytes from every target and every path that appends."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from operator_calls import (
    CACHES,
    EVERY_TARGET,
    FLOATS,
    TOLERANCES,
    assert_close,
    assert_same_cache,
    copies,
    expected,
    make_call,
    run,
)

from gqa_tvm import GroupQueryAttention, InvalidArgument

KV_HEADS, HEAD_SIZE = 2, 64
SCALES = (0.1, -0.1, 0.0, -0.0, 1.0, 1e-39, -1e-39, 0.003, 0.3, 7.3, -2.0, 1e-30, 1e30)
NUMBERS = (
    *(0.0, -0.0, np.nan, np.inf, -np.inf, 100.0, -100.0, 0.05, 0.15, 0.25, -0.05, -0.15, 12.75, -12.85),
    *(1e-40, -1e-40, 3e38, -3e38, 1e-7),
)
# Halves are ties of the rounding; the others lie around the ends of both ranges.
STEPS = (0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.5, 6.5, -7.5, -8.5, 8.5, 126.5, 127.5, -127.5, -128.5, 128.5, 35.5, -61.5)


class Path(NamedTuple):
    """How the edge rows reach the cache: in `batch` entries, after `past` tokens each."""

    batch: int
    past: int
    counts: tuple[int, ...] | None = None  # query_seqlens
    sliding: tuple[int, int] | None = None  # capacity, window


ROWS = len(NUMBERS) + 2 * len(STEPS) + 1
PATHS = {
    "prompt": Path(1, 0),
    "decode": Path(ROWS, 2),
    "chunk": Path(1, 2),
    "padded chunk": Path(2, 3, (ROWS // 2, ROWS // 2 - 3)),
    "sliding decode": Path(ROWS, 8, sliding=(8, 6)),
    "sliding staged": Path(1, 0, sliding=(2 * ROWS // 3, ROWS // 2)),
    "sliding chunk": Path(1, 2, sliding=(ROWS + 2, ROWS)),
}


def channel_scales() -> np.ndarray:
    """[N_kv, H] float32: every edge scale in every head, neighbours differ."""
    return np.resize(np.array(SCALES, np.float32), (KV_HEADS, HEAD_SIZE))


def edge_rows() -> np.ndarray:
    """[ROWS, N_kv, H] float32: every number and every step against every scale."""
    scales = channel_scales()
    with np.errstate(all="ignore"):
        steps = np.array(STEPS, np.float32)[:, None, None] * scales
        beside = np.nextafter(steps, np.float32(0))
    numbers = np.broadcast_to(np.array(NUMBERS, np.float32)[:, None, None], (len(NUMBERS), *scales.shape))
    return np.concatenate([numbers, steps, beside, np.ones((1, *scales.shape), np.float32)])


def edge_call(path: Path, dtype: str, cache: str) -> tuple[dict[str, Any], dict[str, Any]]:
    tokens = ROWS // path.batch
    total = path.past + tokens
    capacity, window = path.sliding or (total, -1)
    attributes, inputs = make_call(
        cache, dtype=dtype, tokens=tokens, total=total, batch=path.batch, capacity=capacity, head_size=HEAD_SIZE
    )
    if path.sliding:
        attributes.update(sliding_window_cache=1, local_window_size=window)
    if path.counts:
        counts = np.array(path.counts, np.int32)
        inputs.update(query_seqlens=counts, seqlens_k=path.past + counts - 1)
    # Another order of scales for V, so that a mix-up shows.
    inputs["k_scale"], inputs["v_scale"] = channel_scales().reshape(-1), channel_scales()[:, ::-1].copy()
    with np.errstate(over="ignore"):
        rows = edge_rows().astype(FLOATS[dtype])
    inputs["key"] = rows.reshape(path.batch, tokens, -1)
    inputs["value"] = np.ascontiguousarray(rows[..., ::-1]).reshape(path.batch, tokens, -1)
    return attributes, inputs


@lru_cache(maxsize=32)
def wanted_result(path: Path, dtype: str, cache: str) -> Any:
    attributes, inputs = edge_call(path, dtype, cache)
    return expected(attributes, inputs, in_place=True)


def test_the_edges_tell_right_from_wrong() -> None:
    scales = channel_scales()
    with np.errstate(all="ignore"):
        inverse = np.where(scales == 0, np.float32(1), np.float32(1) / scales)
        product, quotient = edge_rows() * inverse, edge_rows() / scales
        usual = np.isfinite(product) & np.isfinite(quotient) & (np.abs(product) < 127)
        differ = np.rint(product) != np.rint(quotient)
        half_up = np.rint(product) != np.floor(product + np.float32(0.5))
    assert (differ & usual).sum() > 5 and (half_up & usual).sum() > 100


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("cache", ["i8-channel", "i4-channel"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("target", EVERY_TARGET)
def test_bytes_of_edge_values(target: str, dtype: str, cache: str, path: Path) -> None:  # B56, B58
    attributes, inputs = edge_call(path, dtype, cache)
    wanted = wanted_result(path, dtype, cache)
    got = run(attributes, inputs, in_place=True, target=target, strategy="naive")
    assert_same_cache(got, wanted)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("cache", ["i8-channel", "i4-channel"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_bytes_are_those_of_onnxruntime(dtype: str, cache: str, path: Path) -> None:
    oracle = pytest.importorskip("oracle")
    attributes, inputs = edge_call(path, dtype, cache)
    theirs = oracle.run_onnxruntime(attributes, inputs, in_place=True)
    wanted = wanted_result(path, dtype, cache)
    valid = np.array(inputs["seqlens_k"]) + 1
    if path.sliding:
        capacity, window = path.sliding
        group = capacity - window + 1
        valid = valid - np.maximum(0, -(-(valid - capacity) // group)) * group
    for b, rows in enumerate(valid):
        np.testing.assert_array_equal(theirs.present_key[b, :, :rows], wanted.present_key[b, :, :rows])
        np.testing.assert_array_equal(theirs.present_value[b, :, :rows], wanted.present_value[b, :, :rows])


@pytest.mark.parametrize("cache", ["i8-channel", "i4-channel"])
@pytest.mark.parametrize("strategy", ["naive", "flash", "flash_decoding"])
def test_codes_of_edge_values_are_read_as_finite_numbers(strategy: str, cache: str) -> None:
    """NaN and infinities end as the largest codes; scales 0, negative and denormal are ordinary numbers."""
    attributes, inputs = edge_call(PATHS["chunk"], "f32", cache)
    # Scores stay small: the rounding of large ones alone would exceed the tolerance.
    attributes["scale"] = 0.01
    for name in ("k_scale", "v_scale"):
        inputs[name][np.abs(inputs[name]) > 0.3] = 0.02
    wanted = expected(attributes, inputs)
    got = run(attributes, inputs, strategy=strategy)
    assert_same_cache(got, wanted)
    assert np.isfinite(got.output).all()
    assert_close(got.output, wanted.output)


@pytest.mark.parametrize("cache", ["i8", "i4"])
@pytest.mark.parametrize("scale", [0.0, -0.05, 1e-39, 0.05])
def test_one_scale_at_the_edge(scale: float, cache: str) -> None:  # B58
    attributes, inputs = make_call(cache, tokens=3, total=20)
    inputs["k_scale"][:] = scale
    inputs["v_scale"][:] = scale
    wanted = expected(attributes, inputs)
    got = run(attributes, inputs)
    assert_same_cache(got, wanted)
    assert_close(got.output, wanted.output)
    assert (got.output == 0).all() == (scale == 0)


# --- bytes of int4 ---


@pytest.mark.parametrize("target", EVERY_TARGET)
def test_int4_nibbles_and_the_end_of_an_odd_row(target: str) -> None:  # B55
    key = np.array([1, 2, 3, -1, 7.5, -8.5, 100, -100], np.float32)
    for head_size, row in ((8, "a97b0f0f"), (5, "a97b8f")):
        new = key[None, None, :head_size]
        attributes, inputs = make_call("i4", total=4, capacity=4, heads=1, kv_heads=1, head_size=head_size)
        one = np.ones(1, np.float32)
        inputs.update(key=new, value=new, k_scale=one, v_scale=one)
        inputs["past_key"][...] = inputs["past_value"][...] = 0xFF
        got = run(attributes, inputs, in_place=True, target=target, strategy="naive")
        assert got.present_key[0, 0, 3].tobytes().hex() == row
        assert got.present_value[0, 0, 3].tobytes().hex() == row
        assert (got.present_key[0, 0, :3] == 0xFF).all()


# --- shapes of scales ---


@pytest.mark.parametrize("cache", ["i8", "i4"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1)], ids=str)
def test_shapes_of_one_scale(shape: tuple[int, ...], cache: str) -> None:
    check_scale_shape(cache, shape)


@pytest.mark.parametrize("cache", ["i8-channel", "i4-channel"])
@pytest.mark.parametrize(
    "shape", [(2, 64), (2, 1, 64), (1, 2, 1, 64), (64, 2), (1, 128), (4, 32), (128, 1, 1)], ids=str
)
def test_shapes_of_channel_scales(shape: tuple[int, ...], cache: str) -> None:  # B60
    check_scale_shape(cache, shape)


def check_scale_shape(cache: str, shape: tuple[int, ...]) -> None:
    """Elements count in C order, whatever the shape and the strides."""
    attributes, inputs = make_call(cache, tokens=3, total=20)
    wanted = expected(attributes, inputs)
    for name in ("k_scale", "v_scale"):
        wide = np.zeros((2, *shape), np.float32, order="F")
        wide[0] = inputs[name].reshape(shape)
        inputs[name] = wide[0]
    got = GroupQueryAttention(**attributes)(**inputs)
    assert_same_cache(got, wanted)
    assert_close(got.output, wanted.output, TOLERANCES["f32"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("cache", [cache for cache in CACHES if cache != "f32"])
def test_scales_that_are_not_finite_are_refused(cache: str, name: str, value: float) -> None:
    attributes, inputs = make_call(cache, total=20)
    inputs[name][-1] = value
    before = copies(inputs)
    with pytest.raises(InvalidArgument, match=f"{name} must be finite, got {value} at index {inputs[name].size - 1}"):
        GroupQueryAttention(**attributes)(**inputs, present_key=inputs["past_key"], present_value=inputs["past_value"])
    for kept in ("past_key", "past_value"):
        np.testing.assert_array_equal(inputs[kept], before[kept])
