"""docs/differences.md: each rule against live onnxruntime, what it does and what we do."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import INPUT_NAMES, OracleError, run_onnxruntime
from random_configurations import random_configuration

from gqa_tvm import GroupQueryAttention, InvalidArgument
from gqa_tvm.reference import group_query_attention

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "differences.md"
HEADS: dict[str, Any] = {"num_heads": 1, "kv_num_heads": 1}
INT8: dict[str, Any] = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
ROTARY = {"do_rotary": 1}
# onnxruntime has a flash and a naive path; an attribute beyond the plain ones takes the second.
NAIVE = {"softcap": 30.0}
SMALLEST = np.finfo(np.float32).min


def make_inputs(
    *, tokens: int = 1, total: int = 4, batch: int = 1, head_size: int = 16, query: str = "f4", cache: str | None = None
) -> dict[str, Any]:
    """One head over a cache of 8 rows; a first prompt, without past, where tokens == total."""
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((3, batch, tokens, head_size)).astype(query)
    inputs: dict[str, Any] = dict(zip(("query", "key", "value"), drawn, strict=True))
    if tokens != total:
        past = rng.standard_normal((2, batch, 1, 8, head_size)).astype(cache or query)
        inputs |= {"past_key": past[0], "past_value": past[1]}
    lengths = np.full(batch, total - 1, np.int32), np.array([total], np.int32)
    return inputs | dict(zip(("seqlens_k", "total_sequence_length"), lengths, strict=True))


def tables(query: str = "f4", columns: int = 8) -> dict[str, Any]:
    cos, sin = np.random.default_rng(1).uniform(-1, 1, (2, 12, columns)).astype(query)
    return {"cos_cache": cos, "sin_cache": sin}


def ours(attributes: dict[str, Any], inputs: dict[str, Any], **rest: Any) -> Any:
    return GroupQueryAttention(**attributes, **rest)(**inputs)


def reference(attributes: dict[str, Any], inputs: dict[str, Any]) -> Any:
    return group_query_attention(**(dict.fromkeys(INPUT_NAMES) | inputs), **attributes)


def assert_same(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(got.output.astype(np.float64), wanted.output, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("strategy", ["naive", "flash", "flash_decoding"])
def test_d1_rows_without_a_key(strategy: str) -> None:
    inputs = make_inputs() | {"attention_bias": np.full((1, 1, 1, 4), -np.inf, np.float32)}
    assert not run_onnxruntime(HEADS, inputs).output.any()
    assert np.isnan(run_onnxruntime(HEADS | NAIVE, inputs).output).all()
    for attributes in (HEADS, HEADS | NAIVE):
        assert not ours(attributes, inputs, strategy=strategy).output.any()


@pytest.mark.parametrize("strategy", ["naive", "flash", "flash_decoding"])
def test_d1_a_finite_mask_is_a_number(strategy: str) -> None:
    """A row of the smallest number alone is the mean of its values."""
    inputs = make_inputs() | {"attention_bias": np.full((1, 1, 1, 4), SMALLEST)}
    mean = run_onnxruntime(HEADS | NAIVE, inputs).output
    assert not run_onnxruntime(HEADS, inputs).output.any()
    for attributes in (HEADS, HEADS | NAIVE):
        np.testing.assert_allclose(ours(attributes, inputs, strategy=strategy).output, mean, atol=1e-6)


@pytest.mark.parametrize("attributes", [HEADS, HEADS | NAIVE], ids=["flash", "naive"])
def test_d2_unseen_values_do_not_matter(attributes: dict[str, Any]) -> None:
    inputs = make_inputs(tokens=4, total=4)
    right = ours(attributes, inputs).output
    inputs["value"][0, 3] = np.nan
    assert np.isnan(run_onnxruntime(attributes, inputs).output).all()
    np.testing.assert_array_equal(ours(attributes, inputs).output[0, :3], right[0, :3])


@pytest.mark.parametrize(
    ("attributes", "changes"),
    [
        pytest.param({}, {"seqlens_k": np.array([5], np.int32)}, id="seqlens_k beyond T"),
        pytest.param({"local_window_size": 0}, {}, id="window 0"),
        pytest.param({"local_window_size": -2}, {}, id="window -2"),
        pytest.param({"local_window_size": 2**31}, {}, id="window 2^31"),
        pytest.param({"num_heads": 2**32 + 1}, {}, id="num_heads 2^32 + 1"),
        pytest.param({"v_quant_type": "PER_TENSOR"}, {}, id="v_quant_type alone"),
        pytest.param(
            INT8,
            dict.fromkeys(("past_key", "past_value"), np.zeros((1, 1, 8, 16), np.int8))
            | dict.fromkeys(("k_scale", "v_scale"), np.array([np.nan], np.float32)),
            id="scale NaN",
        ),
    ],
)
def test_d3_calls_that_only_we_refuse(attributes: dict[str, Any], changes: dict[str, Any]) -> None:
    inputs = make_inputs() | changes
    run_onnxruntime(HEADS | attributes, inputs)
    with pytest.raises(InvalidArgument):
        ours(HEADS | attributes, inputs)


@pytest.mark.parametrize("shape", [(0, 1, 16), (1, 0, 16)])
def test_d3_empty_queries(shape: tuple[int, ...]) -> None:
    """Not shown to onnxruntime, which dies of a batch of 0."""
    inputs = make_inputs() | dict.fromkeys(("query", "key", "value"), np.zeros(shape, np.float32))
    with pytest.raises(InvalidArgument, match=r"batch_size|sequence_length"):
        ours(HEADS, inputs)


def test_d4_position_ids_wider_than_the_query() -> None:
    wide = make_inputs(batch=2) | tables() | {"position_ids": np.array([[7, 3], [7, 3]])}
    as_read = wide | {"position_ids": np.array([[7], [3]])}
    right = wide | {"position_ids": np.array([[7], [7]])}
    theirs = run_onnxruntime(HEADS | ROTARY, wide)
    np.testing.assert_array_equal(theirs.present_key, run_onnxruntime(HEADS | ROTARY, as_read).present_key)
    np.testing.assert_array_equal(
        ours(HEADS | ROTARY, wide).present_key, run_onnxruntime(HEADS | ROTARY, right).present_key
    )


def test_d4_query_padding_is_zeros() -> None:
    inputs = make_inputs(tokens=3, total=5, batch=2) | {"query_seqlens": np.array([2, 0], np.int32)}
    got = ours(HEADS, inputs).output
    assert got[0, :2].all() and not got[0, 2].any() and not got[1].any()


def test_d4_prompt_padding_has_one_meaning() -> None:
    """Row 5 of an entry of 3 keys and a window of 2 sees nothing; onnxruntime's naive path shows it the last 2 keys."""
    attributes = HEADS | {"local_window_size": 2}
    inputs = make_inputs(tokens=6, total=6) | {"seqlens_k": np.array([2], np.int32)}
    assert not run_onnxruntime(attributes, inputs).output[0, 5].any()
    assert run_onnxruntime(attributes | NAIVE, inputs).output[0, 5].any()
    for extra in ({}, NAIVE):
        assert not ours(attributes | extra, inputs).output[0, 5].any()


def test_d5_codes_without_past() -> None:
    inputs = make_inputs(tokens=3, total=3) | dict.fromkeys(("k_scale", "v_scale"), np.array([0.02], np.float32))
    with pytest.raises(OracleError):
        run_onnxruntime(HEADS | INT8, inputs)
    empty = inputs | dict.fromkeys(("past_key", "past_value"), np.zeros((1, 1, 0, 16), np.int8))
    got, wanted = ours(HEADS | INT8, inputs), run_onnxruntime(HEADS | INT8, empty)
    np.testing.assert_array_equal(got.present_key, wanted.present_key)
    np.testing.assert_allclose(got.output, wanted.output, atol=1e-5)


def test_d5_present_is_made_where_it_is_not_given() -> None:
    inputs = make_inputs()
    present = {name: np.empty((1, 1, 8, 16), np.float32) for name in ("present_key", "present_value")}
    without, given = ours(HEADS, inputs), GroupQueryAttention(**HEADS)(**inputs, **present)
    for field in ("output", "present_key", "present_value"):
        assert getattr(without, field).tobytes() == getattr(given, field).tobytes()


@pytest.mark.parametrize(("head_size", "columns"), [(7, 0), (8, 4), (16, 3)])
def test_d6_sizes_that_onnxruntime_refuses(head_size: int, columns: int) -> None:
    attributes, inputs = HEADS, make_inputs(tokens=3, total=3, head_size=head_size)
    if columns:
        attributes, inputs = attributes | ROTARY, inputs | tables(columns=columns)
    with pytest.raises(OracleError, match="multiple of"):
        run_onnxruntime(attributes, inputs)
    assert_same(ours(attributes, inputs), reference(attributes, inputs))


def test_d7_norm_only_runs_here() -> None:
    inputs = make_inputs(tokens=3, total=3)
    inputs |= dict.fromkeys(("q_norm_weight", "k_norm_weight"), np.linspace(0.5, 2, 16, dtype=np.float32))
    with pytest.raises(OracleError, match="not supported"):
        run_onnxruntime(HEADS, inputs)
    assert_same(ours(HEADS, inputs), reference(HEADS, inputs))


def test_d7_bfloat16_only_runs_here() -> None:
    inputs = make_inputs(tokens=3, total=3)
    inputs |= {name: inputs[name].astype(ml_dtypes.bfloat16) for name in ("query", "key", "value")}
    with pytest.raises(OracleError, match="Could not find an implementation"):
        run_onnxruntime(HEADS, inputs)
    got = ours(HEADS, inputs)
    assert got.output.dtype == got.present_key.dtype == ml_dtypes.bfloat16
    assert_same(got, reference(HEADS, inputs), 2.0**-8)


@pytest.mark.parametrize(
    "attributes", [NAIVE, {"smooth_softmax": 1}, {"causal": 0}], ids=lambda value: next(iter(value))
)
def test_d7_flash_runs_with_every_attribute(attributes: dict[str, Any]) -> None:
    inputs = make_inputs(tokens=3, total=3) | {"head_sink": np.array([0.5], np.float32)}
    assert_same(ours(HEADS | attributes, inputs, strategy="flash"), reference(HEADS | attributes, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(12))
def test_d8_threads_do_not_change_a_bit(index: int) -> None:
    configuration = random_configuration([1, index])
    call = configuration.draw()
    results = [
        ours(call.attributes, call.inputs, strategy=configuration.strategy, num_threads=threads)
        for threads in (1, 2, 5)
    ]
    for result in results[1:]:
        for array, wanted in zip(result, results[0], strict=True):
            assert (array is None and wanted is None) or array.tobytes() == wanted.tobytes()


def test_d9_rotated_keys_are_rounded_to_the_query_first() -> None:
    inputs = make_inputs(query="f2", cache="f4") | tables("f2")
    got, theirs = (call(HEADS | ROTARY, inputs).present_key[0, 0, 3] for call in (ours, run_onnxruntime))
    assert got.dtype == theirs.dtype == np.float32
    assert (theirs != theirs.astype(np.float16)).any()
    np.testing.assert_array_equal(got, theirs.astype(np.float16))


def test_d9_attention_reads_what_was_stored() -> None:
    inputs = make_inputs(query="f4", cache="f2")
    got, theirs = ours(HEADS, inputs), run_onnxruntime(HEADS, inputs)
    np.testing.assert_array_equal(got.present_key, theirs.present_key)
    assert_same(got, reference(HEADS, inputs))
    unrounded = inputs | {name: inputs[name].astype(np.float32) for name in ("past_key", "past_value")}
    np.testing.assert_allclose(theirs.output, run_onnxruntime(HEADS, unrounded).output, atol=1e-7)
    assert np.abs(got.output - theirs.output).max() > 1e-5


def test_the_document_names_tests_that_exist() -> None:
    text = DOCUMENT.read_text()
    rules = re.findall(r"^## (D\d)$", text, re.MULTILINE)
    assert rules == [f"D{number}" for number in range(1, 10)]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        named = re.findall(r"`(test_\w+)\.py::(test_\w+)`", section)
        assert named, section
        for file, test in named:
            tree = ast.parse((TESTS / f"{file}.py").read_text())
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, test)


def test_rules_named_in_the_code_exist() -> None:
    headings = set(re.findall(r"^## (D\d)$", DOCUMENT.read_text(), re.MULTILINE))
    named = {rule for path in TESTS.glob("*.py") for rule in re.findall(r"#(D\d)\b", path.read_text())}
    assert {"D1", "D2", "D4", "D5", "D6", "D7", "D9"} <= named <= headings
