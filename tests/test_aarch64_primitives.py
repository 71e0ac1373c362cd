"""The kernels behind `gqa_tvm.primitives` on AArch64: codes bit for bit, products against float64."""

from __future__ import annotations

import numpy as np
import pytest
from aarch64 import needs_aarch64

from gqa_tvm import primitives
from gqa_tvm.reference import dequantize, quantize

pytestmark = [needs_aarch64, pytest.mark.slow]


@pytest.fixture(autouse=True)
def kernels_of_arm(arm, monkeypatch):
    monkeypatch.setattr(primitives, "library_for", lambda target: arm)


def _random(*shape):
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def _assert_product(got, left, right):
    """got = left @ right but for float32 rounding, which grows with the sum of magnitudes."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    assert (np.abs(got - left @ right) <= 1e-6 * (np.abs(left) @ np.abs(right)) + 1e-12).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("columns", [64, 80, 128, 7])
def test_primitives(bits, columns):
    scale = np.linspace(0.5, 1.5, columns).astype(np.float32) / (127 if bits == 8 else 7)
    x = _random(130, columns) * 1.2
    x[0, : columns // 2] = np.nan
    codes = primitives.kv_quantize(x, scale, bits)
    np.testing.assert_array_equal(codes, quantize(x, scale, bits))
    decoded = primitives.kv_dequantize(codes, scale, bits, columns)
    np.testing.assert_array_equal(decoded, dequantize(codes, scale, bits, columns))
    query, weights, old = _random(3, columns), _random(3, 130), _random(3, columns)
    _assert_product(primitives.qk_gemm(query, codes, scale, bits), query, decoded.T)
    _assert_product(primitives.sv_gemm(weights, codes, scale, bits, columns), weights, decoded)
    got = primitives.sv_gemm(weights, codes, scale, bits, columns, beta=0.5, out=old.copy())
    _assert_product(got, np.hstack([weights, old]), np.vstack([decoded, 0.5 * np.eye(columns)]))
