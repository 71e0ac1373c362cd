"""Kernels of a library called from C: the example compiles without a warning and is right."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launcher_services import GCC
from tvm_ffi import libinfo

import gqa_tvm

EXAMPLE = Path(__file__).parents[1] / "examples" / "c" / "decode.c"
HEADERS = Path(gqa_tvm.__file__).parent / "native" / "include"


def compile_example(source, program):
    libraries = Path(libinfo.find_libtvm_ffi()).parent
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]
    include = [f"-I{path}" for path in (HEADERS, libinfo.find_include_path(), libinfo.find_dlpack_include_path())]
    link = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed", "-ltvm_ffi", "-lm", "-ldl"]
    subprocess.run([GCC, *flags, *include, str(source), "-o", str(program), *link], check=True)


def run_example(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True)


@pytest.mark.slow
def test_the_example(small_library, tmp_path):
    compile_example(EXAMPLE, tmp_path / "decode")
    done = run_example(tmp_path / "decode", small_library)
    assert (done.stdout, done.stderr, done.returncode) == ("ok: 10 tokens\n", "", 0)
    assert "usage" in run_example(tmp_path / "decode").stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [("* V_SCALE", "* 1.001f * V_SCALE", "the output is wrong"), ("attend, 23", "attend, 22", "a call failed")],
)
def test_the_example_notices(right, wrong, said, small_library, tmp_path):
    source = EXAMPLE.read_text()
    assert right in source
    (tmp_path / "decode.c").write_text(source.replace(right, wrong))
    compile_example(tmp_path / "decode.c", tmp_path / "decode")
    done = run_example(tmp_path / "decode", small_library)
    assert said in done.stderr and done.returncode == 1
