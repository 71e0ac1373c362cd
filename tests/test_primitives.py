"""The kernels one by one against the reference's codes and float64 products."""

from __future__ import annotations

import numpy as np
import pytest

from gqa_tvm import InvalidArgument
from gqa_tvm.primitives import kv_dequantize, kv_quantize, qk_gemm, sv_gemm
from gqa_tvm.reference import dequantize, quantize
from gqa_tvm.targets import FALLBACKS, architecture, missing_features

MODES = {"i8": (8, False), "i8-channel": (8, True), "i4": (4, False), "i4-channel": (4, True)}
BOTH_BITS = pytest.mark.parametrize("bits", [8, 4])
ALL_MODES = pytest.mark.parametrize("mode", MODES)
# Each number of columns is a kernel of its own.
ALL_COLUMNS = pytest.mark.parametrize(
    "columns", [64, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 7, 8, 32, 128))]
)


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def fitting_scale(x, mode):
    """The scale with which the largest |x| gets the largest code."""
    bits, per_channel = MODES[mode]
    largest = np.abs(x).max(axis=0) if per_channel else np.abs(x).max().reshape(1)
    return largest / np.float32(2 ** (bits - 1) - 1)


def random_codes(rows, columns, bits, seed=1):
    """Codes and a scale per column; every code occurs in large arrays, the least one too."""
    rng = np.random.default_rng(seed)
    stored = rng.integers(0, 256, (rows, columns if bits == 8 else (columns + 1) // 2)).astype(np.uint8)
    scale = rng.uniform(0.5, 1.5, columns).astype(np.float32) / (128 if bits == 8 else 8)
    return stored.view(np.int8) if bits == 8 else stored, scale


def assert_product(got, left, right, tolerance=1e-6):
    """got = left @ right but for float32 rounding, which grows with the sum of magnitudes."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    error = np.abs(got - left @ right) - tolerance * (np.abs(left) @ np.abs(right))
    assert got.dtype == np.float32 and (error <= 1e-12).all(), error.max()


@ALL_MODES
@ALL_COLUMNS
def test_round_trip(mode, columns):
    bits, _ = MODES[mode]
    for rows in (1, 4, 16, 64, 65):
        x = uniform(rows, columns)
        scale = fitting_scale(x, mode)
        codes = kv_quantize(x, scale, bits)
        np.testing.assert_array_equal(codes, quantize(x, scale, bits))
        decoded = kv_dequantize(codes, scale, bits, columns)
        np.testing.assert_array_equal(decoded, dequantize(codes, scale, bits, columns))
        assert (np.abs(decoded - x) <= scale * 0.5001).all()


@BOTH_BITS
@pytest.mark.parametrize("scale", [0.1, -0.1, 0.0, 1e-45])
def test_values_and_scales_at_the_edges(bits, scale):
    edges = [0.0, -0.0, 0.05, 0.15, -0.25, 0.5, -0.75, 12.75, -12.85, 100, -100, np.inf, -np.inf, np.nan, 3e38, 1e-45]
    x = np.tile(np.array(edges, np.float32), 4).reshape(1, 64)
    np.testing.assert_array_equal(kv_quantize(x, scale, bits), quantize(x, np.float32(scale), bits))


@BOTH_BITS
def test_every_code_decodes(bits):
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64).view(np.int8 if bits == 8 else np.uint8)
    wanted = dequantize(codes, np.float32(0.3), bits, 64 * (8 // bits))
    np.testing.assert_array_equal(kv_dequantize(codes, np.float32(0.3), bits), wanted)


@ALL_MODES
@ALL_COLUMNS
def test_qk_gemm(mode, columns):
    bits, _ = MODES[mode]
    for rows in (1, 4, 16):
        query = uniform(rows, columns)
        for keys in (1, 8, 32, 128):
            x = uniform(keys, columns, seed=1)
            scale = fitting_scale(x, mode)
            codes = quantize(x, scale, bits)
            decoded = dequantize(codes, scale, bits, columns)
            got = qk_gemm(query, codes, scale, bits)
            assert got.shape == (rows, keys)
            assert_product(got, query, decoded.T)
            assert_product(qk_gemm(query, codes, scale, bits, -0.125), -0.125 * query, decoded.T)
            half_steps = 0.5001 * np.abs(query) @ np.broadcast_to(scale, columns)
            assert (np.abs(got - query @ x.T) <= half_steps[:, None] + 1e-5).all()
            assert_product(
                qk_gemm(query, codes, scale, bits, -0.125), -0.125 * query, dequantize(codes, scale, bits, columns).T
            )


def test_the_query_is_kept_in_full():
    query = np.full((1, 128), 3, np.float32)
    query[0, 0] = 1024
    x = uniform(3, 128, seed=1)
    scale = fitting_scale(x, "i8")
    codes = quantize(x, scale, 8)
    # Queries rounded to 8 bits would be off by up to 4 an element: the step would be 1024 / 127.
    wanted = query.astype(np.float64) @ dequantize(codes, scale, 8, 128).T
    np.testing.assert_allclose(qk_gemm(query, codes, scale, 8), wanted, rtol=0, atol=1e-4)


@ALL_MODES
@ALL_COLUMNS
def test_sv_gemm(mode, columns):
    bits, _ = MODES[mode]
    for rows in (1, 4, 16):
        old = uniform(rows, columns, seed=2)
        for keys in (1, 8, 32, 128):
            probabilities = np.abs(uniform(rows, keys)) + np.float32(1e-3)
            probabilities /= probabilities.sum(axis=1, keepdims=True)
            x = uniform(keys, columns, seed=1)
            scale = fitting_scale(x, mode)
            codes = quantize(x, scale, bits)
            values = dequantize(codes, scale, bits, columns)
            got = sv_gemm(probabilities, codes, scale, bits, columns)
            assert_product(got, probabilities, values)
            assert (np.abs(got - probabilities @ x) <= scale * 0.5001 + 1e-6).all()
            for beta in (0.0, 1.0, 0.5):
                out = np.full_like(old, np.nan) if beta == 0 else old.copy()
                assert sv_gemm(probabilities, codes, scale, bits, columns, beta, out) is out
                wanted = probabilities.astype(np.float64) @ values + (beta * old if beta else 0)
                np.testing.assert_allclose(out, wanted, atol=2e-6)


@BOTH_BITS
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_many_keys_and_any_number_of_threads(bits, rows):
    codes, scale = random_codes(3001, 64, bits)
    values = dequantize(codes, scale, bits, 64)
    query, weights = uniform(rows, 64), uniform(rows, 3001)
    calls = {
        "quantize": lambda n: kv_quantize(values, scale, bits, num_threads=n),
        "dequantize": lambda n: kv_dequantize(codes, scale, bits, num_threads=n),
        "qk": lambda n: qk_gemm(query, codes, scale, bits, num_threads=n),
        "sv": lambda n: sv_gemm(weights, codes, scale, bits, num_threads=n),
    }
    results = {name: call(1) for name, call in calls.items()}
    for threads in (2, 5, None):
        for name, call in calls.items():
            np.testing.assert_array_equal(call(threads), results[name], name)
    np.testing.assert_array_equal(results["dequantize"], values)
    assert_product(results["qk"], query, values.T)
    assert_product(results["sv"], weights, values)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["generic", "x86-avx2", "x86-avx512"])
@pytest.mark.parametrize("rows", range(1, 9))
def test_every_row_tile_of_every_target(target, rows, monkeypatch):
    if target not in FALLBACKS[architecture()] or missing_features(target):
        pytest.skip(f"this CPU cannot run {target}")
    monkeypatch.setenv("GQA_TVM_TARGET", target)
    for bits in (8, 4):
        codes, scale = random_codes(150, 40, bits)
        values = dequantize(codes, scale, bits, 40)
        query, weights = uniform(rows, 40), uniform(rows, 150)
        assert_product(qk_gemm(query, codes, scale, bits), query, values.T)
        assert_product(sv_gemm(weights, codes, scale, bits), weights, values)
        np.testing.assert_array_equal(kv_dequantize(codes, scale, bits), values)
        np.testing.assert_array_equal(kv_quantize(values, scale, bits), quantize(values, scale, bits))


def _inside_garbage(array):
    """The same rows as a part of a larger array whose other bytes are 0xFF."""
    outer = np.empty((array.shape[0] + 2, array.shape[1] + 9), array.dtype)
    outer.view(np.uint8).fill(0xFF)
    view = outer[1:-1, 4 : 4 + array.shape[1]]
    view[...] = array
    return view


def _misaligned(array):
    buffer = np.zeros(array.nbytes + 1, np.uint8)
    view = buffer[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def _odd_row_stride(array):
    buffer = np.zeros((array.shape[0], array.shape[1] * array.itemsize + 1), np.uint8)
    view = np.ndarray(array.shape, array.dtype, buffer, strides=(buffer.shape[1], array.itemsize))
    view[...] = array
    return view


def _read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


LAYOUTS = {
    "inside garbage": _inside_garbage,
    "misaligned": _misaligned,
    "odd row stride": _odd_row_stride,
    "read-only": _read_only,
    "column-major": np.asfortranarray,
    "reversed": lambda array: array[::-1, ::-1].copy()[::-1, ::-1],
    "every other row": lambda array: array.repeat(2, axis=0)[::2],
    "one column of many": lambda array: array.repeat(3, axis=1)[:, ::3],
}


@BOTH_BITS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows,keys,columns", [(3, 70, 64), pytest.param(1, 1, 2, marks=pytest.mark.slow)])
def test_layouts_of_inputs(bits, layout, rows, keys, columns):
    make = LAYOUTS[layout]
    codes, scale = random_codes(keys, columns, bits)
    query, weights = uniform(rows, columns), uniform(rows, keys)
    scales = make(np.stack([scale] * 2))[0]
    pairs = (
        (kv_quantize(query, scale, bits), kv_quantize(make(query), scales, bits)),
        (kv_dequantize(codes, scale, bits), kv_dequantize(make(codes), scales, bits)),
        (qk_gemm(query, codes, scale, bits), qk_gemm(make(query), make(codes), scales, bits)),
        (sv_gemm(weights, codes, scale, bits), sv_gemm(make(weights), make(codes), scales, bits)),
    )
    for wanted, got in pairs:
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("columns", [64, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["inside garbage", "odd row stride", "column-major", "one column of many"])
def test_layouts_of_out(layout, columns):
    codes, scale = random_codes(70, columns, 8)
    weights, old = uniform(3, 70), uniform(3, columns)
    wanted = sv_gemm(weights, codes, scale, 8, beta=0.5, out=old.copy())
    out = LAYOUTS[layout](old)
    assert sv_gemm(weights, codes, scale, 8, beta=0.5, out=out) is out
    np.testing.assert_array_equal(out, wanted)
    if layout == "inside garbage":
        assert (out.base.view(np.uint8) == 0xFF).sum() >= out.base.nbytes - out.nbytes


def test_out_may_overlap_an_input():
    codes, scale = random_codes(64, 64, 8)
    memory = uniform(19, 64)
    weights, out = memory[:-1], memory[1:]
    wanted = sv_gemm(weights, codes, scale, 8, beta=2.0, out=out.copy())
    np.testing.assert_array_equal(sv_gemm(weights, codes, scale, 8, beta=2.0, out=out), wanted)


X, CODES, SCALE = np.zeros((2, 8), np.float32), np.zeros((3, 8), np.int8), np.ones(1, np.float32)
WEIGHTS, OUT = np.zeros((2, 3), np.float32), np.zeros((2, 8), np.float32)
BAD_CALLS = [
    (lambda: kv_quantize(X, SCALE, 2), "bits must be 8 or 4, got 2"),
    (lambda: kv_quantize(X, SCALE, 8.0), r"bits must be 8 or 4, got 8\.0"),
    (lambda: kv_quantize(X.astype(np.float64), SCALE, 8), "x must be an array of float32, got float64"),
    (lambda: kv_quantize(None, SCALE, 8), "x must be an array of float32, got nothing"),
    (lambda: kv_quantize(X[0], SCALE, 8), r"x must have 2 axes, none of extent 0, got shape \(8,\)"),
    (lambda: kv_quantize(X[:0], SCALE, 8), r"got shape \(0, 8\)"),
    (lambda: kv_quantize(X, np.ones(7, np.float32), 8), "scale must have 1 element or 8, got 7"),
    (lambda: kv_quantize(X, np.ones(0, np.float32), 8), "scale must have 1 element or 8, got 0"),
    (lambda: kv_quantize(X, np.ones(1), 8), "scale must be an array of float32, got float64"),
    (lambda: kv_quantize(X, float("nan"), 8), "scale must be finite, got nan"),
    (lambda: kv_quantize(X, np.array([1] * 7 + [np.inf], np.float32), 8), "scale must be finite, got inf"),
    (lambda: kv_quantize(X, SCALE, 8, num_threads=0), "num_threads must be a positive integer or None, got 0"),
    (lambda: kv_dequantize(CODES, SCALE, 4), "codes must be an array of uint8, got int8"),
    (lambda: kv_dequantize(CODES, SCALE, 8, 9), "codes must have 9 elements a row for 9 columns, got 8"),
    (lambda: kv_dequantize(CODES.view(np.uint8), SCALE, 4, 14), "codes must have 7 elements a row for 14 columns"),
    (lambda: kv_dequantize(CODES, SCALE, 8, 0), "columns must be a positive integer or None, got 0"),
    (lambda: qk_gemm(X[:, :7], CODES, SCALE, 8), "keys must have 7 elements a row for 7 columns, got 8"),
    (lambda: qk_gemm(X, CODES, SCALE, 8, float("inf")), "alpha must be a finite float32, got inf"),
    (lambda: qk_gemm(X, CODES, SCALE, 8, "1"), "alpha must be a real number, got str"),
    (lambda: sv_gemm(X, CODES, SCALE, 8), r"values must have a row per column of probabilities \(8\), got 3"),
    (lambda: sv_gemm(WEIGHTS, CODES, SCALE, 8, beta=1.0), r"beta is 1\.0, but there is no out"),
    (lambda: sv_gemm(WEIGHTS, CODES, SCALE, 8, beta=1e39, out=OUT), "beta must be a finite float32, got 1e[+]39"),
    (lambda: sv_gemm(WEIGHTS, CODES, SCALE, 8, out=OUT[:1]), r"out must have shape \(2, 8\), got \(1, 8\)"),
    (lambda: sv_gemm(WEIGHTS, CODES, SCALE, 8, out=_read_only(OUT)), "out is read-only"),
]


@pytest.mark.parametrize("call,message", BAD_CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_arguments(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()
