"""The subcommands build and info of the command line."""

from __future__ import annotations

import pytest

from gqa_tvm import cli, runtime
from gqa_tvm.library_file import read_manifest
from gqa_tvm.targets import FALLBACKS, architecture, best_target


def test_build_a_library_and_describe_it(tmp_path, capsys):
    path = tmp_path / "libgqa.so"
    assert cli.main(["build", "--targets", "generic", "--kernels", "append_f32_i4_h2", "-o", str(path)]) == 0
    built = capsys.readouterr()
    assert "100 %" in built.err and f"{path}: 0." in built.out
    assert cli.main(["info", str(path)]) == 0
    told = capsys.readouterr().out
    assert read_manifest(path).stamp in told
    assert "generic            1 kernels (1 of its own) for head sizes 2" in told


def test_build_into_the_cache(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path))
    assert cli.main(["build", "--targets", "generic", "--kernels", "append_f32_i4_h2"]) == 0
    (kernel,) = tmp_path.glob("kernels/*/*/generic-*/append_f32_i4_h2.so")
    assert f"1 kernels in {kernel.parent}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets", "x86-avx2,arm64-neon"], "must be of one architecture"),
        (["--targets", "x86-sse9"], "unknown target 'x86-sse9'"),
        (["--kernels", "flash"], "'flash' is not a kernel name"),
        (["--formats", "f32:f8"], "must look like f32:i8,f16:i4"),
        (["--head-sizes", "64,0"], "must be at least 1, got 0"),
    ],
)
def test_what_build_refuses(arguments, message, tmp_path, capsys):
    try:
        code = cli.main(["build", "-o", str(tmp_path / "libgqa.so"), *arguments])
    except SystemExit as exit:
        code = exit.code
    assert code != 0 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_info_of_this_machine(capsys, monkeypatch, tmp_path):
    assert cli.main(["info"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in FALLBACKS[architecture()])
    assert f"chosen: {best_target()} (" in told
    # Without a launcher and a compiler for it.
    monkeypatch.setattr(runtime, "_libraries", {})
    monkeypatch.setattr("gqa_tvm.launcher._launcher", None)
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert cli.main(["info"]) == 0
    assert "no kernels: linking kernels for" in capsys.readouterr().out
