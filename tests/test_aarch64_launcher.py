"""The launcher on AArch64, alone and under kernels."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from aarch64 import LAUNCHER, compile_program, emulate, needs_aarch64
from operator_calls import make_call

from gqa_tvm import GroupQueryAttention
from gqa_tvm.kernels import KernelSpec

pytestmark = needs_aarch64


def test_many_callers_at_once(tmp_path):
    program = compile_program(tmp_path / "stress", Path(__file__).parent / "launcher_stress.c", LAUNCHER)
    subprocess.run(emulate("arm64-neon", program), check=True, timeout=300)


def test_results_do_not_depend_on_threads(arm):
    attributes, inputs = make_call("i8", tokens=30, total=100, heads=8, kv_heads=4)
    op = GroupQueryAttention(**attributes, strategy="naive")
    op._library = arm
    outputs = []
    for threads in (1, 2, 5):
        arm.machine.threads = threads
        outputs.append(op(**inputs).output)
    arm.machine.threads = 2
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)


def test_errors_of_kernels_are_told(arm):
    _, inputs = make_call("i8")
    with pytest.raises(RuntimeError, match="argument"):
        arm.kernel(KernelSpec("append", "f32", "i8", 64))(*inputs.values())
