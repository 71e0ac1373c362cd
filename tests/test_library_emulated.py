"""A library of all targets on CPUs that lack what the better ones need, emulated: never an illegal instruction."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gqa_tvm.targets import architecture

QEMU = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(architecture() != "x86-64", reason="emulates CPUs of x86-64"),
    pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64 (package qemu-user-static)"),
]

CALLS = """
import json, os, sys
from library_calls import check_calls
from gqa_tvm import BuildError, load, targets
plan = check_calls(library=sys.argv[1]).last_plan
os.environ["GQA_TVM_TARGET"] = "x86-avx512"
try:
    refused = load(sys.argv[1]).target
except BuildError as error:
    refused = str(error)
listed = sorted(targets._listed_features() or ())
print(json.dumps({"target": plan.target, "reason": plan.target_reason, "refused": refused, "listed": listed}))
"""


@pytest.mark.parametrize(
    ("cpu", "target", "lacks"), [("Haswell", "x86-avx2", "avx512f"), ("Nehalem", "generic", "avx2")]
)
def test_a_lesser_cpu(cpu, target, lacks, small_library, tmp_path):  # B134, B139
    # NumPy's BLAS asks the CPU by other ways, some of which tell what is below the emulation.
    environment = {**os.environ, "PATH": "", "GQA_TVM_CACHE": str(tmp_path), "OPENBLAS_CORETYPE": cpu}
    environment.pop("GQA_TVM_TARGET", None)
    command = [QEMU, "-cpu", cpu, sys.executable, "-c", CALLS, str(small_library)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["target"] == target
    assert lacks in said["reason"] and "which it lacks" in said["reason"]
    assert "target x86-avx512 needs CPU features this machine lacks: avx512bw" in said["refused"]
