"""precision and approximate_qk on AArch64 with 8-bit dot products: only when asked for, within their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from aarch64 import needs_aarch64, run_on
from operator_calls import expected, make_call
from test_precision import BOUNDS, SHAPES, options_of

pytestmark = [needs_aarch64, pytest.mark.slow]


def _call(cache="i8", tokens=1, total=300, **options):
    options = {"heads": 4, "kv_heads": 2, "head_size": 64, "capacity": total, **options}
    return make_call(cache, tokens=tokens, total=total, **options)


def _error(library, attributes, inputs, **options):
    """(largest error relative to the largest output, precision that ran)."""
    result, plan = run_on(library, attributes, inputs, **options)
    exact = expected(attributes, inputs).output
    return np.abs(result.output - exact).max() / np.abs(exact).max(), plan.precision


@pytest.mark.parametrize(("tokens", "total"), SHAPES)
@pytest.mark.parametrize("cache", ["i8", "i8-channel", "i4"])
@pytest.mark.parametrize("precision", BOUNDS)
def test_errors_stay_within_the_bound(dot, precision, cache, tokens, total):
    for seed in range(3):
        attributes, inputs = _call(cache, tokens, total, seed=seed)
        found, ran = _error(dot, attributes, inputs, **options_of(precision))
        # ONNX Runtime's option is about INT8 alone.
        assert ran == ("exact" if (precision, cache) == ("approximate", "i4") else precision)
        assert found <= BOUNDS[precision]
        # It is another computation than the exact one, and less exact.
        assert (found > _error(dot, attributes, inputs)[0]) == (ran != "exact")


@pytest.mark.parametrize(("precision", "bound"), [("balanced", 1e-4), ("fast", 2e-3)])
@pytest.mark.parametrize(("tokens", "total"), SHAPES[1:])
def test_sharp_attention(dot, tokens, total, precision, bound):
    """Scores of deviation 18: nearly all weight is on one key, and 16-bit query rows are what errs."""
    attributes, inputs = _call(tokens=tokens, total=total)
    keys = inputs["past_key"] * inputs["k_scale"].flat[0]
    inputs["query"] *= np.float32(18 * 8 / (keys.std() * 64**0.5 * inputs["query"].std()))
    assert _error(dot, attributes, inputs, precision=precision)[0] <= bound


@pytest.mark.parametrize(
    ("precision", "group"), [("balanced", 1), ("balanced", 8), ("fast", 3), ("fast", 8), ("approximate", 4)]
)
def test_row_tiles(dot, precision, group):
    attributes, inputs = _call(total=130, heads=group, kv_heads=1, head_size=80)
    found, ran = _error(dot, attributes, inputs, **options_of(precision))
    assert ran == precision and found <= BOUNDS[precision]


@pytest.mark.parametrize("options", [{"precision": "fast"}, {"approximate_qk": True}], ids=str)
@pytest.mark.parametrize(
    ("cache", "tokens", "head_size", "extra"),
    [("f32", 1, 64, {}), ("i8", 1, 72, {}), ("i8", 40, 72, {}), ("i8", 40, 64, {"strategy": "naive"})],
)
def test_what_has_no_such_kernel_is_exact(dot, cache, tokens, head_size, extra, options):
    attributes, inputs = _call(cache, tokens, total=90, head_size=head_size)
    found, ran = _error(dot, attributes, inputs, **extra, **options)
    assert ran == "exact" and found <= 1e-5
