"""A wheel with a prebuilt library, installed where there is neither a compiler nor apache-tvm, runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from library_calls import SMALL_KERNELS

from gqa_tvm import build
from gqa_tvm.targets import architecture, best_target

ROOT = Path(__file__).parents[1]
KERNELS = [name.replace("_i8_", f"_{cache}_") for name in SMALL_KERNELS for cache in ("f32", "i8", "i4")]
SOURCES = ("gqa_tvm", "schedules", "tuning_logs", "pyproject.toml", "setup.py", "README.md")
UNREACHABLE = ("Could not find a version", "No matching distribution", "onnection", "timed out", "unreachable")

CALLS = """
import shutil, sys
import numpy as np
from gqa_tvm import BuildError, GroupQueryAttention
from gqa_tvm.reference import group_query_attention

assert shutil.which("gcc") is None and shutil.which("cc") is None
try:
    import tvm
    raise SystemExit("tvm can be imported")
except ImportError:
    pass

def call(bits, tokens, head_size=64, total=50):
    rng = np.random.default_rng(tokens)
    attributes = {"num_heads": 4, "kv_num_heads": 2}
    inputs = {
        name: rng.standard_normal((1, tokens, n * head_size)).astype(np.float32)
        for name, n in (("query", 4), ("key", 2), ("value", 2))
    }
    columns = head_size // 2 if bits == 4 else head_size
    dtype = {0: np.float32, 8: np.int8, 4: np.uint8}[bits]
    for name in ("past_key", "past_value"):
        inputs[name] = rng.integers(-3 if bits != 4 else 0, 4, (1, 2, total, columns)).astype(dtype)
    inputs.update(seqlens_k=np.array([total - 1], np.int32), total_sequence_length=np.array([total], np.int32))
    if bits:
        attributes.update(k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR", kv_cache_bit_width=bits)
        inputs.update(k_scale=np.array([0.1], np.float32), v_scale=np.array([0.2], np.float32))
    operator = GroupQueryAttention(**attributes)
    error = np.abs(operator(**inputs).output - group_query_attention(**inputs, **attributes).output).max()
    assert error <= 1e-5, (bits, tokens, error)
    return operator.last_plan

reasons = {call(bits, tokens).target_reason for bits in (0, 8, 4) for tokens in (1, 40)}
try:
    call(8, 1, head_size=72)
    raise SystemExit("a kernel that is not there was called")
except BuildError as error:
    print(error)
print(*reasons, sep="\\n")
assert "tvm" not in sys.modules
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel with a few kernels of this CPU's best target."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    (library,) = build(best_target(), folder / f"libgqa-{architecture()}.so", kernels=KERNELS)
    _pip("wheel", "--no-deps", "-w", str(folder), str(source), GQA_TVM_WHEEL_LIBRARY=str(library))
    (path,) = folder.glob("*.whl")
    return path


def _pip(*arguments, **environment):
    """Run pip; skip the test if it needs a package index that cannot be reached."""
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode != 0:
        if any(word in done.stderr for word in UNREACHABLE):
            pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
        raise AssertionError(done.stderr)


@pytest.mark.slow
def test_a_wheel_needs_no_compiler(wheel, tmp_path):
    assert wheel.name.endswith(f"-py3-none-linux_{architecture().replace('-', '_')}.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    _pip("--python", str(python), "install", str(wheel))
    environment = {"PATH": "", "HOME": str(tmp_path), "GQA_TVM_CACHE": str(tmp_path / "cache")}
    command = [str(python), "-I", "-c", CALLS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    missing, reason = done.stdout.splitlines()
    library = f"libgqa-{architecture()}.so"
    assert (
        f"{library} has no kernel append_f32_i8_h72 (head size 72) for {best_target()}; it has head sizes 64" in missing
    )
    assert "needs apache-tvm (pip install 'gqa-tvm[build]') and a C compiler (gcc or cc on PATH, or CC)" in missing
    assert reason == f"the best of 1 in {library} for this CPU"
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.slow
def test_a_plain_wheel_has_no_library(wheel, tmp_path):
    # The source tree still holds what was made for the wheel with the library.
    _pip("wheel", "--no-deps", "-w", str(tmp_path), str(wheel.parent / "source"))
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    names = ZipFile(path).namelist()
    assert not [name for name in names if name.endswith(".so")]
    sources = {"gqa_tvm/native/launcher.c", "gqa_tvm/native/library.c", "gqa_tvm/native/include/gqa_tvm.h"}
    assert sources <= set(names)
