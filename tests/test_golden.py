"""What the kernels are lowered to, kept as files: a change that alters code shows it, `--update-golden` accepts it.

tests/golden/<target>/<kernel>.tir is scheduled TensorIR for reading and digests.json has a digest of the lowered code
of more kernels. Sizes are those of the family, so files do not depend on the machine.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from pathlib import Path

import pytest

from gqa_tvm.kernels import KernelSpec
from gqa_tvm.targets import FALLBACKS
from gqa_tvm.variants import family_variant

pytest.importorskip("tvm")

GOLDEN = Path(__file__).parent / "golden"
# AArch64's generic target is missing: its code is that of arm64-neon, see the last test.
VARIANTS = {
    name: family_variant(name, architecture)
    for architecture, names in FALLBACKS.items()
    for name in names
    if (name, architecture) != ("generic", "aarch64")
}
# A target's file is there where its code is its own. One target of an architecture has what hardly differs, and none of
# generic is there, whose code is that of arm64-neon with other tiles.
READABLE = ("flash_prefill_f32_i8_h64", "flash_decode_f32_i8_h64_r1")
ALSO_READABLE = {
    "x86-avx2": ("append_f32_i8_h64", "naive_f32_i8_h64"),
    "arm64-neon": ("flash_decode_f32_f32_h64_r2",),
}
DIGESTED = (
    *(f"append_{formats}_h64" for formats in ("f16_f16", "f32_i8", "f32_i4")),
    *(f"flash_prefill_{formats}" for formats in ("f32_i8_h80", "f32_i8_h128", "f16_f16_h64")),
    *(
        f"flash_decode_{formats}"
        for formats in ("f32_f32_h80_r2", "f32_i8_h128_r1", "f32_i4_h128_r2", "f32_i4_h80_r2", "f16_f16_h64_r4")
    ),
    *("naive_f32_i8_h80", "qk_gemm_f32_i8_h64_r4", "sv_gemm_f32_i4_h64_r4"),
)
# Kernels over packed caches are one target's alone, what they append its base's.
ALSO_DIGESTED = {
    "x86-avx512": ("append_f32_i8_packed_h64",),
    "x86-avx512-vnni": (
        *("flash_decode_f32_i8_packed_h128_r2", "flash_decode_f32_i4_packed_h96_r1"),
        "flash_prefill_f32_i4_packed_h128",
    ),
}
_MOST_LINES = 60


def _owned(target: str, names: tuple[str, ...]) -> list[KernelSpec]:
    variant = VARIANTS[target]
    specs = [KernelSpec.parse(name) for name in names]
    return [spec for spec in specs if variant.owner(spec) is variant]


def _digested(target: str) -> list[KernelSpec]:
    return _owned(target, (*DIGESTED, *ALSO_DIGESTED.get(target, ())))


# The code of arm64-neon with other tiles; the schedules of x86-avx512-vnni on shorter vectors.
DIGESTS_ALONE = ("generic", "x86-avx-vnni")
FILES = [
    (target, spec)
    for target in VARIANTS
    if target not in DIGESTS_ALONE
    for spec in _owned(target, (*READABLE, *ALSO_READABLE.get(target, ())))
]


# Declarations, and regions that follow from the statements.
_NOISE = re.compile(r"\s*(T\.(reads|writes)\(|\w+ = TypeVar|#|buffer\w* = T\.alloc_buffer\(.*disable_lower_builtin)")


def _readable(module) -> str:
    lines = module.script(indent_spaces=1).split("\n")
    return "\n".join(line for line in lines if not _NOISE.match(line)).strip() + "\n"


def _digest(module) -> str:
    # The target names the compiling machine in places.
    bare = [function.without_attr("target").script() for _, function in sorted(module.functions_items())]
    return hashlib.sha256("\n".join(bare).encode()).hexdigest()[:12]


def _compare(path: Path, text: str, update: bool) -> None:
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    wanted = path.read_text() if path.exists() else ""
    diff = list(difflib.unified_diff(wanted.split("\n"), text.split("\n"), "golden", "now", n=1, lineterm=""))
    if diff:
        shown = "\n".join(line[:160] for line in diff[:_MOST_LINES])
        more = f"\n... {len(diff) - _MOST_LINES} more lines" if len(diff) > _MOST_LINES else ""
        pytest.fail(
            f"{path.relative_to(GOLDEN)} is not what the kernel is now; if it should be: pytest {Path(__file__).name} "
            f"--update-golden\n{shown}{more}",
            pytrace=False,
        )


@pytest.mark.parametrize("target,spec", FILES, ids=lambda value: value if isinstance(value, str) else value.name)
def test_scheduled_code(target, spec, update_golden):
    from gqa_tvm.lowering import scheduled_module

    text = _readable(scheduled_module(spec, VARIANTS[target]))
    _compare(GOLDEN / target / f"{spec.name}.tir", text, update_golden)


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in VARIANTS if _digested(target)])
def test_lowered_code(target, update_golden):
    from gqa_tvm.lowering import lowered_module

    digests = {spec.name: _digest(lowered_module(spec, VARIANTS[target])) for spec in _digested(target)}
    _compare(GOLDEN / target / "digests.json", json.dumps(digests, indent=1) + "\n", update_golden)


def test_there_are_no_other_files():
    wanted = {GOLDEN / target / f"{spec.name}.tir" for target, spec in FILES}
    wanted |= {GOLDEN / target / "digests.json" for target in VARIANTS if _digested(target)}
    found = {path for path in GOLDEN.rglob("*") if path.is_file()}
    assert found == wanted
    assert sum(path.stat().st_size for path in found) < 700_000


@pytest.mark.parametrize("name", READABLE)
def test_generic_aarch64_has_the_code_of_neon(name):
    from gqa_tvm.lowering import scheduled_module

    spec = KernelSpec.parse(name)
    generic, neon = family_variant("generic", "aarch64"), VARIANTS["arm64-neon"]
    text = _readable(scheduled_module(spec, generic)).replace(generic.symbol(spec), neon.symbol(spec))
    assert text == _readable(scheduled_module(spec, neon))
