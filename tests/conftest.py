"""Memory a kernel must write before it reads is filled with NaN in all tests, so that a slip shows."""

from __future__ import annotations

import os

# Scratch memory: the launcher reads this when it is loaded.
os.environ.setdefault("GQA_TVM_POISON_SCRATCH", "1")

import numpy as np
import pytest

from gqa_tvm import arrays, kernel_calls, operator, primitives


def _poisoned(shape, dtype):
    array = arrays.aligned_empty(shape, dtype)
    # All bits set: NaN in every float format.
    array.view(np.uint8).fill(0xFF)
    return array


@pytest.fixture(autouse=True)
def poison_outputs(monkeypatch):
    """Outputs and the partial states of flash decoding start as NaN."""
    for module in (operator, kernel_calls, primitives):
        monkeypatch.setattr(module, "aligned_empty", _poisoned)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the tests of the launcher put what they compile."""
    return tmp_path_factory.mktemp("launcher")


@pytest.fixture(scope="module")
def library(folder):
    """Small kernels linked with the launcher."""
    from launcher_services import LAUNCHER, compile_kernels, link

    return link(folder, "kernels.so", compile_kernels(folder), LAUNCHER)


@pytest.fixture(scope="session")
def small_library(tmp_path_factory):
    """A library of a few int8 kernels for all targets of this machine's architecture."""
    from library_calls import SMALL_KERNELS

    from gqa_tvm import build

    (path,) = build(output=tmp_path_factory.mktemp("library") / "libgqa.so", kernels=SMALL_KERNELS)
    return path


@pytest.fixture
def services(library):
    """The launcher's C functions, set to two threads."""
    from launcher_services import Services

    services = Services(library)
    services.set_num_threads(2)
    return services


@pytest.fixture(scope="session")
def aarch64_server(tmp_path_factory):
    """The program that runs kernels under qemu."""
    from aarch64 import LAUNCHER, NATIVE, compile_program

    return compile_program(tmp_path_factory.mktemp("aarch64") / "server", NATIVE / "kernel_server.c", LAUNCHER)


@pytest.fixture(scope="module")
def arm(aarch64_server):
    """The kernels of arm64-neon on an emulated CPU."""
    from aarch64 import AArch64Library

    with AArch64Library("arm64-neon", aarch64_server) as library:
        yield library


@pytest.fixture(scope="module")
def dot(aarch64_server):
    """The kernels of arm64-neon-dotprod on an emulated CPU."""
    from aarch64 import AArch64Library

    with AArch64Library("arm64-neon-dotprod", aarch64_server) as library:
        yield library


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")


@pytest.fixture
def update_golden(request):
    """Whether golden files are written instead of compared."""
    return request.config.getoption("--update-golden")
