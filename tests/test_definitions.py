"""Tensor expressions alone, compiled without a schedule, against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import te

from gqa_tvm.definitions.exponential import exp2_nonpositive, in_bits
from gqa_tvm.definitions.half import float16_to_float32, float32_to_float16, narrow, widen
from gqa_tvm.definitions.kv_quantize import CACHE_DTYPES, CACHE_PLANES, encode, inverse_scale, kv_dequantize
from gqa_tvm.definitions.qk_gemm import qk_gemm_rows_first, qk_gemm_rows_last
from gqa_tvm.definitions.rms_norm import inverse_rms, square
from gqa_tvm.definitions.scores import softcap
from gqa_tvm.definitions.softmax import shifted_exp
from gqa_tvm.definitions.sv_gemm import sv_gemm
from gqa_tvm.reference import quantize


def _run(arguments, arrays):
    """Compile the TE function and call it; TE parameters assume 64-byte alignment, so arrays are moved."""
    aligned = []
    for array in arrays:
        buffer = np.zeros(array.nbytes + 64, np.uint8)
        start = -buffer.ctypes.data % 64
        view = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        aligned.append(view)
    function = te.create_prim_func(arguments).with_attr("global_symbol", "f")
    tvm.compile(function, target={"kind": "llvm"})["f"](*aligned)
    return aligned[-1]


def _elementwise(expression, x, dtype="float32"):
    a = te.placeholder(x.shape, x.dtype.name, name="a")
    b = te.compute(x.shape, lambda i: expression(a[i]), name="b")
    return _run([a, b], [x, np.full(x.shape, 77, dtype)])


def test_exp2_is_within_two_ulp():
    x = -np.concatenate([np.geomspace(1e-7, 126, 20000), np.linspace(0, 126, 200000)]).astype(np.float32)
    got, wanted = _elementwise(exp2_nonpositive, x), np.exp2(x.astype(np.float64))
    # 0.94 with fused multiply-adds, which this compiler need not use.
    assert (np.abs(got - wanted) <= 1.25 * np.spacing(wanted.astype(np.float32)).astype(np.float64)).all()


def test_exp2_of_subnormal_results():
    x = np.linspace(-127.5, -126.3, 10000, dtype=np.float32)
    got, wanted = _elementwise(exp2_nonpositive, x), np.exp2(x.astype(np.float64))
    flushed = x < -126.5
    assert (got[flushed] == 0).all()
    np.testing.assert_allclose(got[~flushed], wanted[~flushed], rtol=1e-6)
    assert (got[~flushed] > 0).all()


def test_exp2_of_special_values():
    x = np.array([0.0, -0.0, -127.5, -1e30, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(_elementwise(exp2_nonpositive, x), np.array([1, 1, 0, 0, 0, np.nan], np.float32))


def test_softmax_weights_of_scores_in_nats():
    x = -np.concatenate([np.geomspace(1e-7, 20, 20000), np.linspace(0, 20, 20000)]).astype(np.float32)
    zero = tvm.tirx.const(0.0, "float32")
    got = _elementwise(lambda v: shifted_exp(v, zero, bits=False), x)
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=2e-6)


def test_bits_of_a_score():
    largest = np.finfo(np.float32).max
    x = np.array(
        [0.0, 1.0, -1.0, 100.0, 2.3e38, -2.4e38, -3e38, largest, -largest, np.inf, -np.inf, np.nan], np.float32
    )
    finite = np.clip(x * np.log2(np.e), -float(largest), float(largest))
    wanted = np.where(np.isfinite(x), finite, x)
    np.testing.assert_allclose(_elementwise(in_bits, x), wanted, rtol=2e-7)


def test_softcap_is_cap_times_tanh():
    x = np.concatenate([np.linspace(-60, 60, 1001), [-np.inf, np.inf, np.nan, 0.0]]).astype(np.float32)
    got = _elementwise(lambda v: softcap(v, tvm.tirx.const(5.0, "float32")), x)
    np.testing.assert_allclose(got, 5 * np.tanh(x.astype(np.float64) / 5), atol=2e-6)


def test_softcap_keeps_the_digits_of_small_scores():
    x = np.concatenate([np.geomspace(1e-6, 300, 2000), -np.geomspace(1e-6, 300, 2000)]).astype(np.float32)
    got = _elementwise(lambda v: softcap(v, tvm.tirx.const(100.0, "float32")), x)
    np.testing.assert_allclose(got, 100 * np.tanh(x.astype(np.float64) / 100), rtol=5e-7)


def _float32_samples():
    """Every exponent, halfway cases and their neighbours, subnormals, infinities, NaN, both signs."""
    rng = np.random.default_rng(4)
    bits = rng.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] + np.array([0x7FFF, 0x8000, 0x8001], np.uint32)
    with np.errstate(invalid="ignore"):
        every_half = np.arange(1 << 16).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    between = every_half[:, None] + np.array([0, 0xFFF, 0x1000, 0x1001], np.uint32)
    return np.concatenate([bits, halves.ravel(), between.ravel()]).view(np.float32)


def test_float16_by_integers_is_numpy_s():  # B130
    bits = np.arange(1 << 16).astype(np.uint16)
    got = _elementwise(float16_to_float32, bits)
    np.testing.assert_array_equal(got, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got), bits >= 0x8000)
    x = _float32_samples()
    with np.errstate(all="ignore"):
        wanted = x.astype(np.float16)
    got = _elementwise(float32_to_float16, x, "uint16").view(np.float16)
    np.testing.assert_array_equal(got, wanted)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(x[numbers]))


def test_bfloat16_is_ml_dtypes():
    x = _float32_samples()
    with np.errstate(all="ignore"):
        wanted = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    stored = _elementwise(lambda v: narrow(v, "bf16"), x, "uint16")
    np.testing.assert_array_equal(_elementwise(lambda v: widen(v, "bf16"), stored), wanted)


@pytest.mark.parametrize("head_size", [1, 8, 100])
def test_rms_norm_pieces(head_size):
    x = np.random.default_rng(5).standard_normal(head_size).astype(np.float32)
    a, total = te.placeholder(x.shape, name="a"), te.placeholder((1,), dtype="float64", name="total")
    squares = te.compute(x.shape, lambda i: square(a[i]), name="squares")
    wanted = x.astype(np.float64) ** 2
    np.testing.assert_array_equal(_run([a, squares], [x, np.zeros(x.shape)]), wanted)
    epsilon = np.float32(1e-5)
    inverse = te.compute((1,), lambda i: inverse_rms(total[i], head_size, tvm.tirx.const(epsilon, "float32")))
    got = _run([total, inverse], [wanted.sum(keepdims=True), np.zeros(1, np.float32)])
    assert got[0] == np.float32(1 / np.sqrt(wanted.sum() / head_size + np.float64(epsilon)))


@pytest.mark.parametrize("cache,bits", [("i8", 8), ("i4", 4)])
@pytest.mark.parametrize("scale", [0.1, -0.1, 0.0, 1.0, 1e-45])
def test_encode_matches_the_reference(cache, bits, scale):  # B56, B58
    rng = np.random.default_rng(1)
    edges = [0.0, 0.05, 0.15, -0.25, 0.5, 1.5, -2.5, 12.75, -12.85, 100, -100, np.inf, -np.inf, np.nan]
    x = np.concatenate([edges, rng.standard_normal(200) * 3]).astype(np.float32)
    scale = np.float32(scale)
    a, unit = te.placeholder(x.shape, name="a"), te.placeholder((1,), name="scale")
    code = te.compute(x.shape, lambda i: encode(a[i], inverse_scale(unit[0]), cache), name="code")
    got = _run([a, unit, code], [x, scale.reshape(1), np.full(x.shape, 77, np.int32)])
    codes = quantize(x.reshape(1, 1, 1, -1), scale.reshape(1), bits).reshape(-1)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1).astype(np.int32) - 8
    np.testing.assert_array_equal(got, codes)


@pytest.mark.parametrize("cache", CACHE_DTYPES)
def test_dequantize_repeats_the_last_row_and_pads_with_zeros(cache):
    rng = np.random.default_rng(2)
    stored = rng.integers(0, 100, (6, 5)).astype(CACHE_DTYPES[cache])
    values = stored
    if cache == "bf16":
        stored = (stored.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    rows = te.placeholder(stored.shape, stored.dtype.name, name="rows")
    decoded = kv_dequantize(rows, tvm.tirx.const(3, "int32"), 8, cache, "decoded")
    got = _run([rows, decoded], [stored, np.full((6, CACHE_PLANES[cache], 8), np.nan, np.float32)])
    source = values[np.minimum(np.arange(6), 3)]
    planes = [source & 15, source >> 4] if cache == "i4" else [source]
    wanted = np.stack([plane.astype(np.float32) - (8 if cache == "i4" else 0) for plane in planes], axis=1)
    np.testing.assert_array_equal(got[:, :, :5], wanted)
    assert not got[:, :, 5:].any()


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_gemms(beta):
    rng = np.random.default_rng(3)
    keys, query = (rng.standard_normal(s).astype(np.float32) for s in ((7, 2, 16), (3, 2, 16)))
    k, q = te.placeholder(keys.shape, name="k"), te.placeholder((2, 16, 3), name="q")
    scores = np.einsum("tec,mec->tm", keys.astype(np.float64), query)
    empty = np.full((7, 3), np.nan, np.float32)
    got = _run([k, q, qk_gemm_rows_last(q, k)], [keys, np.ascontiguousarray(query.transpose(1, 2, 0)), empty])
    np.testing.assert_allclose(got, scores, atol=1e-5)
    q = te.placeholder(query.shape, name="q")
    got = _run([k, q, qk_gemm_rows_first(q, k, 8)[1]], [keys, query, empty.T.copy()])
    np.testing.assert_allclose(got, scores.T, atol=1e-5)

    p, old = rng.random((3, 7)).astype(np.float32), rng.standard_normal((3, 2, 16)).astype(np.float32)
    tp, acc, row_beta = te.placeholder(p.shape, name="p"), te.placeholder(old.shape, name="o"), te.placeholder((3,))
    result = sv_gemm(lambda m, t: tp[m, t], k, acc, row_beta)
    arrays = [p, keys, old, np.full(3, beta, np.float32), np.full(old.shape, np.nan, np.float32)]
    wanted = beta * old + np.einsum("mt,tec->mec", p.astype(np.float64), keys)
    np.testing.assert_allclose(_run([tp, k, acc, row_beta, result], arrays), wanted, atol=1e-5)
