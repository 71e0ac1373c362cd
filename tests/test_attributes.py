"""Attributes: defaults, normalisation, and every rule against live onnxruntime."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ort_errors import WINDOW, ort_error, valid_call

from gqa_tvm.attributes import Attributes
from gqa_tvm.errors import InvalidArgument

PER_TENSOR = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}

# broken attributes -> words of our error; with True onnxruntime's error holds the same words
BROKEN: list[tuple[dict[str, Any], str, bool]] = [
    ({"num_heads": 0}, 'GetAttr("num_heads", &num_heads).IsOK() && num_heads > 0 was false.', True),
    (
        {"kv_num_heads": -1},
        'info.GetAttr("kv_num_heads", &kv_num_heads).IsOK() && kv_num_heads > 0 was false.',
        True,
    ),
    ({"causal": 2}, "causal must be 0 or 1.", True),
    (
        {"causal": 0, "local_window_size": 4},
        "GroupQueryAttention (CPU): local_window_size must be -1 when causal is 0.",
        True,
    ),
    (
        {"k_quant_type": "per_row"},
        "Invalid KV quantization type: 'PER_ROW'. Valid values are: NONE, PER_TENSOR, PER_CHANNEL.",
        True,
    ),
    ({"v_quant_type": ""}, "Invalid KV quantization type: ''. Valid values are: NONE", True),
    (
        {"sliding_window_cache": 1},
        "GroupQueryAttention (CPU): sliding_window_cache=1 requires local_window_size > 0.",
        True,
    ),
    (
        {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8},
        "CPU GroupQueryAttention requires k_quant_type == v_quant_type, got different types",
        True,
    ),
    (
        {"k_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8},
        "CPU GroupQueryAttention requires k_quant_type == v_quant_type, got different types",
        True,
    ),
    (
        {**PER_TENSOR, "kv_cache_bit_width": 2},
        "kv_cache_bit_width must be 4 or 8 when quantization is enabled, got 2",
        True,
    ),
    (PER_TENSOR, "kv_cache_bit_width must be 4 or 8 when quantization is enabled, got 0", True),
    (
        {"kv_cache_bit_width": 8},
        "kv_cache_bit_width must be 0 when quantization is disabled, got 8",
        True,
    ),
    (
        {"num_heads": 5, "kv_num_heads": 3},
        "num_heads must be a multiple of kv_num_heads. Got num_heads % kv_num_heads == 2",
        True,
    ),
    (
        {"num_heads": 1, "kv_num_heads": 2},
        "num_heads must be a multiple of kv_num_heads. Got num_heads % kv_num_heads == 1",
        True,
    ),
    ({"qk_output": 3}, "qk_output attribute received unsupported value 3", True),
    ({**WINDOW, "qk_output": 3}, "attribute received unsupported value 3", True),
    (
        {**WINDOW, "qk_output": 2},
        "GroupQueryAttention (CPU): qk_output is not implemented with sliding_window_cache=1.",
        True,
    ),
    # onnxruntime accepts, truncates or ignores these
    ({"local_window_size": 0}, "local_window_size must be -1 (off) or at least 1, got 0.", False),
    ({"local_window_size": -2}, "local_window_size must be -1 (off) or at least 1, got -2.", False),
    ({"v_quant_type": "PER_TENSOR"}, "v_quant_type needs the same k_quant_type", False),
    ({"qk_norm_epsilon": 0}, "'qk_norm_epsilon' must be finite and positive as a float32, got 0.", False),
    ({"q_norm_epsilon": 1e-50}, "'q_norm_epsilon' must be finite and positive as a float32, got 1e-50.", False),
    ({"scale": math.inf}, "Attribute 'scale' must be finite, got inf.", False),
    ({"scale": math.nan}, "Attribute 'scale' must be finite, got nan.", False),
    ({"softcap": math.inf}, "Attribute 'softcap' must be finite, got inf.", False),
    ({"k_norm_epsilon": math.inf}, "'k_norm_epsilon' must be finite and positive as a float32, got inf.", False),
    ({"qk_norm_epsilon": math.nan}, "must be finite and positive as a float32, got nan.", False),
    ({"k_norm_epsilon": -1e-6}, "must be finite and positive as a float32, got -1e-06.", False),
    ({"qk_norm_epsilon": None}, "'qk_norm_epsilon' must be a real number, got NoneType.", False),
    ({"num_heads": 2**32 + 2}, "'num_heads' must be in [-2147483648, 2147483647]", False),
    ({"local_window_size": 2**31}, "got 2147483648", False),
    ({"causal": 10**5000}, "bits", False),
    ({"num_heads": 2.0}, "'num_heads' must be an integer, got float.", False),
    ({"kv_num_heads": None}, "'kv_num_heads' must be an integer, got NoneType.", False),
    ({"do_rotary": "1"}, "'do_rotary' must be an integer, got str.", False),
    ({"qk_output": np.array([1, 2])}, "'qk_output' must be an integer, got ndarray.", False),
    ({"scale": "0.1"}, "'scale' must be a real number, got str.", False),
    ({"softcap": 1e39}, "'softcap' is outside the range of float32", False),
    ({"scale": 10**400}, "'scale' is outside the range of float32", False),
    ({"k_quant_type": b"NONE"}, "'k_quant_type' must be a string, got bytes.", False),
    ({"v_quant_type": 8}, "'v_quant_type' must be a string, got int.", False),
]

# in onnxruntime's order; of any two broken rules the earlier one is reported
ORDER: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 0}, "num_heads > 0 was false."),
    ({"kv_num_heads": 0}, "kv_num_heads > 0 was false."),
    ({"causal": 2}, "causal must be 0 or 1."),
    ({"k_quant_type": "X", "v_quant_type": "X"}, "Invalid KV quantization type"),
    ({"sliding_window_cache": 1}, "requires local_window_size > 0."),
    ({"v_quant_type": "PER_CHANNEL", "k_quant_type": "PER_TENSOR"}, "got different types"),
    ({"kv_cache_bit_width": 3}, "kv_cache_bit_width must be"),
    ({"num_heads": 3, "kv_num_heads": 2}, "num_heads must be a multiple of kv_num_heads."),
    ({"qk_output": 9}, "qk_output attribute received unsupported value"),
]


def error_of(**attributes: Any) -> str:
    """Our error text for two query heads, one KV head and these attributes."""
    with pytest.raises(InvalidArgument) as caught:
        Attributes(**{"num_heads": 2, "kv_num_heads": 1, **attributes})
    return str(caught.value)


@pytest.mark.parametrize(("broken", "words", "ort_says_it"), BROKEN, ids=[words for _, words, _ in BROKEN])
def test_a_broken_attribute_is_named_in_ort_words(broken: dict[str, Any], words: str, ort_says_it: bool) -> None:
    assert words in error_of(**broken)
    if ort_says_it:
        _, inputs = valid_call(bits=8 if "k_quant_type" in broken else 0)
        assert words in ort_error({"num_heads": 2, "kv_num_heads": 1, **broken}, inputs)


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_earlier_of_two_broken_attributes_is_reported(first: int) -> None:
    broken, words = ORDER[first]
    attributes, inputs = valid_call(bits=8)
    for later, _ in ORDER[first + 1 :]:
        if not broken.keys() & later.keys():
            assert words in error_of(**{**PER_TENSOR, "kv_cache_bit_width": 8, **broken, **later})
            assert words in ort_error(attributes | broken | later, inputs)


def test_defaults_are_those_of_ort() -> None:
    attributes = Attributes(num_heads=8, kv_num_heads=2)
    assert attributes.group_size == 4
    assert (attributes.scale, attributes.softcap) == (0.0, 0.0)
    assert (attributes.cache_bits, attributes.is_quantized) == (0, False)
    assert (attributes.window, attributes.causal, attributes.qk_output) == (-1, 1, 0)
    assert not attributes.use_rotary
    assert not attributes.is_rotary_interleaved
    assert not attributes.use_smooth_softmax
    assert not attributes.use_sliding_window
    assert attributes.q_norm_epsilon is attributes.k_norm_epsilon is None
    assert attributes.qk_norm_epsilon == float(np.float32(1e-6))


def test_an_epsilon_of_one_side_overrides_the_shared_one() -> None:
    shared = Attributes(2, 1, qk_norm_epsilon=0.5)
    assert (shared.query_norm_epsilon, shared.key_norm_epsilon) == (0.5, 0.5)
    query = Attributes(2, 1, qk_norm_epsilon=0.5, q_norm_epsilon=1e-5)
    assert (query.query_norm_epsilon, query.key_norm_epsilon) == (float(np.float32(1e-5)), 0.5)
    key = Attributes(2, 1, k_norm_epsilon=0.25)
    assert (key.query_norm_epsilon, key.key_norm_epsilon) == (float(np.float32(1e-6)), 0.25)


def test_quantization_types_ignore_case() -> None:
    attributes = Attributes(2, 1, k_quant_type="per_Channel", v_quant_type="PER_CHANNEL",
                            kv_cache_bit_width=4)  # fmt: skip
    assert (attributes.k_quant_type, attributes.cache_bits) == ("PER_CHANNEL", 4)
    assert attributes.is_quantized


def test_flags_are_on_only_when_exactly_one() -> None:
    on = Attributes(2, 1, do_rotary=1, rotary_interleaved=1, smooth_softmax=1, **WINDOW)
    off = Attributes(2, 1, do_rotary=2, rotary_interleaved=-1, smooth_softmax=2, sliding_window_cache=2)
    assert on.use_rotary and on.is_rotary_interleaved and on.use_smooth_softmax
    assert on.use_sliding_window and not off.use_sliding_window
    assert not (off.use_rotary or off.is_rotary_interleaved or off.use_smooth_softmax)


def test_numpy_numbers_become_python_numbers() -> None:
    attributes = Attributes(np.int64(4), np.int32(2), scale=np.float32(0.5))
    assert type(attributes.num_heads) is int
    assert type(attributes.scale) is float


def test_causal_off_negative_scale_and_odd_softcaps_are_accepted() -> None:
    attributes = Attributes(2, 1, causal=0, scale=-1, softcap=math.nan)
    assert (attributes.causal, attributes.scale) == (0, -1.0)
    assert Attributes(2, 1, softcap=-3.0).softcap == -3.0


ODD_VALUES = [2**31, -(2**63), 10**400, "NONE", "per_tensor", b"", np.float64(1), np.zeros(3)]
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text("aN_1", max_size=4),
    st.sampled_from(ODD_VALUES),
)


@given(st.dictionaries(st.sampled_from(list(Attributes.__dataclass_fields__)), ANYTHING))
def test_junk_gives_attributes_or_invalid_argument(junk: dict[str, Any]) -> None:
    try:
        Attributes(**{"num_heads": 4, "kv_num_heads": 2, **junk})
    except InvalidArgument as error:
        assert str(error)
