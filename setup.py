"""What pyproject.toml cannot say: a wheel may carry a prebuilt library, and is then one for its platform.

GQA_TVM_WHEEL_LIBRARY is the path of that library, `libgqa-<architecture>.so`; `make wheel` builds it and sets this. An
installation without it compiles kernels when they are first needed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PLATFORMS = {"libgqa-x86-64.so": "linux_x86_64", "libgqa-aarch64.so": "linux_aarch64"}
LIBRARY = Path(os.environ["GQA_TVM_WHEEL_LIBRARY"]) if os.environ.get("GQA_TVM_WHEEL_LIBRARY") else None
if LIBRARY is not None and LIBRARY.name not in PLATFORMS:
    raise SystemExit(f"GQA_TVM_WHEEL_LIBRARY must be named {' or '.join(PLATFORMS)}, got {LIBRARY.name}")


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib) / "gqa_tvm" / "prebuilt"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build: this folder is used again
        if LIBRARY is not None and not self.editable_mode:
            folder.mkdir(parents=True)
            shutil.copy(LIBRARY, folder)


class WheelForPlatform(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return super().get_tag() if LIBRARY is None else ("py3", "none", PLATFORMS[LIBRARY.name])


class WithLibrary(Distribution):
    def has_ext_modules(self) -> bool:
        return LIBRARY is not None


setup(distclass=WithLibrary, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": WheelForPlatform})
