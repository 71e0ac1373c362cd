"""The operator against live onnxruntime and the float64 reference on random configurations of all features."""

from __future__ import annotations

import numpy as np
import pytest
from operator_calls import assert_close
from oracle import comparable_rows, run_onnxruntime
from random_configurations import Configuration, random_configuration

from gqa_tvm import GroupQueryAttention
from gqa_tvm.reference import group_query_attention

CONFIGURATIONS = 320
CHUNK = 8


def _run(configuration: Configuration):
    inputs = {n: None if v is None else v.copy() for n, v in configuration.inputs.items()}
    present = {}
    if configuration.in_place:
        present = {"present_key": inputs["past_key"], "present_value": inputs["past_value"]}
    return GroupQueryAttention(**configuration.attributes)(**inputs, **present)


def _check(configuration: Configuration) -> None:
    attributes, inputs = configuration.attributes, configuration.inputs
    got = _run(configuration)
    wanted = group_query_attention(**inputs, **attributes, in_place=configuration.in_place)
    oracle = run_onnxruntime(attributes, inputs, in_place=configuration.in_place)
    for name in ("present_key", "present_value"):
        np.testing.assert_array_equal(getattr(got, name), getattr(oracle, name), err_msg=name)
    assert_close(got.output, wanted.output)
    rows = comparable_rows(attributes, inputs)
    assert_close(got.output[rows], oracle.output[rows])
    if wanted.output_qk is not None:
        finite = np.isfinite(wanted.output_qk)
        np.testing.assert_array_equal(np.isfinite(got.output_qk), finite)
        assert_close(got.output_qk[finite], wanted.output_qk[finite])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CONFIGURATIONS, CHUNK))
def test_random_configurations(first: int) -> None:
    for seed in range(first, first + CHUNK):
        configuration = random_configuration(seed)
        try:
            _check(configuration)
        except AssertionError as error:
            raise AssertionError(f"{configuration}\n{error}") from None
