"""Kernels of a library called from C: the example compiles without a warning and is right."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from launcher_services import GCC
from tvm_ffi import libinfo

import gqa_tvm
from gqa_tvm import BuildError, build, load
from gqa_tvm.targets import architecture

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


ARM_GCC = shutil.which("aarch64-linux-gnu-gcc")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


@pytest.mark.slow
@pytest.mark.skipif(architecture() != "x86-64", reason="cross-compiles from x86-64")
@pytest.mark.skipif(ARM_GCC is None or QEMU is None, reason="needs aarch64-linux-gnu-gcc and qemu-aarch64")
def test_a_library_for_arm(tmp_path):  # B136
    library = tmp_path / "libgqa.so"
    build("arm64-neon", library, kernels=["append_f32_i8_h64", "flash_decode_f32_i8_h64_r2"])
    with pytest.raises(BuildError, match="another architecture: aarch64, wanted x86-64"):
        load(library)
    # There is no libtvm_ffi of that architecture here: only an error would call it.
    source = tmp_path / "decode.c"
    source.write_text(EXAMPLE.read_text().replace("RTLD_NOW", "RTLD_LAZY"))
    include = [f"-I{path}" for path in (HEADERS, libinfo.find_include_path(), libinfo.find_dlpack_include_path())]
    program = tmp_path / "decode"
    subprocess.run([ARM_GCC, "-O1", *include, str(source), "-o", str(program), "-lm", "-ldl"], check=True)
    done = run_example(QEMU, "-L", "/usr/aarch64-linux-gnu", program, library)
    assert (done.stdout, done.returncode) == ("ok: 10 tokens\n", 0)
