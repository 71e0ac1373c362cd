"""Imports go one way; read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from inspect import isfunction
from pathlib import Path

import pytest
from gqa_tvm.schedules import generic
from operator_calls import make_call

from gqa_tvm import GroupQueryAttention
from gqa_tvm.targets import TARGETS

ROOT = Path(__file__).parents[1]
COMPILER_SIDE = {"tvm", "gqa_tvm.lowering", "gqa_tvm.loops", "gqa_tvm.definitions", "gqa_tvm.tuning"}


def _imports(path: Path, package: str, top_level_only: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, node.module or ""]).strip(".")
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def _touches(imports: set[str], modules: set[str]) -> set[str]:
    return {i for i in imports for m in modules if i == m or i.startswith(m + ".")}


@pytest.mark.parametrize(
    "name",
    [
        "operator",
        "runtime",
        "kernel_calls",
        "prepared_call",
        "remembered_calls",
        "cache_buffers",
        "primitives",
        "kv_cache",
        "strategy",
        "arrays",
        "kernels",
        "targets",
        "build",
        "launcher",
        "library_file",
        "object_cache",
        "toolchain",
    ],
)
def test_inference_does_not_import_the_compiler(name):
    imports = _imports(ROOT / "gqa_tvm" / f"{name}.py", "gqa_tvm", top_level_only=True)
    assert not _touches(imports, COMPILER_SIDE)


@pytest.mark.parametrize("path", sorted((ROOT / "gqa_tvm" / "reference").glob("*.py")), ids=lambda p: p.stem)
def test_reference_imports_numpy_and_itself_only(path):
    imports = _imports(path, "gqa_tvm.reference", top_level_only=False)
    own = _touches(imports, {"gqa_tvm.reference"})
    roots = {name.split(".")[0] for name in imports - own}
    assert roots <= sys.stdlib_module_names | {"numpy"}


@pytest.mark.parametrize("path", sorted((ROOT / "gqa_tvm" / "definitions").glob("*.py")), ids=lambda p: p.stem)
def test_definitions_know_no_target_and_no_schedule(path):
    imports = _imports(path, "gqa_tvm.definitions", top_level_only=False)
    ours = {i for i in imports if i.startswith("gqa_tvm") and not i.startswith("gqa_tvm.definitions")}
    assert not ours and not _touches(imports, {"tvm.script", "tvm.s_tir", "tvm.target"})


@pytest.mark.parametrize("path", sorted((ROOT / "schedules").glob("*.py")), ids=lambda p: p.stem)
def test_schedules_know_no_math(path):
    imports = _imports(path, "gqa_tvm.schedules", top_level_only=False)
    assert not _touches(imports, {"gqa_tvm.definitions", "gqa_tvm.loops", "tvm.te"})


def test_block_sizes_need_no_compiler():
    imports = _imports(ROOT / "schedules" / "block_sizes.py", "gqa_tvm.schedules", top_level_only=False)
    assert not _touches(imports, {"tvm"})


@pytest.mark.parametrize("target", TARGETS)
def test_target_files_have_the_same_functions(target):
    module = import_module(f"gqa_tvm.schedules.{target.replace('-', '_')}")
    public = {name for name, value in vars(module).items() if isfunction(value) and name.startswith("schedule_")}
    assert public == set(generic.__all__)


def test_a_call_of_built_kernels_loads_no_compiler():
    attributes, inputs = make_call("i8")
    GroupQueryAttention(**attributes)(**inputs)  # builds what is missing
    code = (
        "import sys; from operator_calls import make_call; from gqa_tvm import GroupQueryAttention\n"
        "attributes, inputs = make_call('i8'); GroupQueryAttention(**attributes)(**inputs)\n"
        "assert 'tvm' not in sys.modules, 'tvm was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_tune_is_found_without_the_compiler():
    code = "import sys, gqa_tvm; assert callable(gqa_tvm.tune); assert 'tvm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
