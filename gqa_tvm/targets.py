"""CPU families: what they offer, which this machine can run, which stands in for which."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from .errors import InvalidArgument


@dataclass(frozen=True)
class Target:
    """A family of CPUs that runs one variant of the kernels.

    mcpu, mattr: LLVM's words for the least of the family, so that one library serves all its CPUs. features: what
    /proc/cpuinfo must list. vector_bytes, vector_registers: of the SIMD unit. fused_multiply_add, converts_float16:
    has instructions for them. dot_bytes: bytes that an 8-bit dot product instruction takes at once, 0 = none.
    l2_bytes: second-level cache of the least of the family. base: target whose code serves wherever this one has no
    better, "" = none. on_request: a library of the architecture's targets has it only where it is named.
    """

    name: str
    architecture: str
    mcpu: str
    features: frozenset[str]
    vector_bytes: int
    vector_registers: int
    l2_bytes: int
    mattr: tuple[str, ...] = ()
    fused_multiply_add: bool = True
    converts_float16: bool = True
    dot_bytes: int = 0
    base: str = ""
    on_request: bool = False


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"})
_NEON = frozenset({"asimd"})
_KIB = 1 << 10

# A new CPU family is a line here, best first within its architecture, and a file of its name in schedules/.
FAMILIES = (
    Target(
        "x86-avx512-vnni",
        "x86-64",
        "cascadelake",
        _AVX512 | {"avx512_vnni"},
        *(64, 32, 512 * _KIB),
        dot_bytes=64,
        base="x86-avx512",
    ),
    Target("x86-avx512", "x86-64", "skylake-avx512", _AVX512, 64, 32, 512 * _KIB),
    Target(
        "x86-avx-vnni",
        "x86-64",
        "haswell",
        _AVX2 | {"avx_vnni"},
        *(32, 16, 256 * _KIB),
        mattr=("+avxvnni",),
        dot_bytes=32,
        base="x86-avx2",
        on_request=True,
    ),
    Target("x86-avx2", "x86-64", "haswell", _AVX2, 32, 16, 256 * _KIB),
    Target(
        "generic",
        "x86-64",
        "x86-64",
        frozenset(),
        *(16, 16, 256 * _KIB),
        fused_multiply_add=False,
        converts_float16=False,
    ),
    Target(
        "arm64-neon-dotprod",
        "aarch64",
        "generic",
        _NEON | {"asimddp"},
        *(16, 32, 256 * _KIB),
        mattr=("+neon", "+dotprod"),
        dot_bytes=16,
        base="arm64-neon",
    ),
    Target("arm64-neon", "aarch64", "generic", _NEON, 16, 32, 256 * _KIB, mattr=("+neon",)),
    Target("generic", "aarch64", "generic", frozenset(), 16, 32, 256 * _KIB),
)
TARGETS = tuple(dict.fromkeys(family.name for family in FAMILIES))
ARCHITECTURES = tuple(dict.fromkeys(family.architecture for family in FAMILIES))
# Best first. The fallback of a target is the next one its architecture lists.
FALLBACKS = {name: tuple(f.name for f in FAMILIES if f.architecture == name) for name in ARCHITECTURES}
# What a library has where an architecture is asked for.
LIBRARY_TARGETS = {
    name: tuple(f.name for f in FAMILIES if f.architecture == name and not f.on_request) for name in ARCHITECTURES
}


@dataclass(frozen=True)
class TargetFacts:
    """What block sizes and schedules may ask of a target. Sizes in bytes; cores: those this process may use."""

    name: str
    architecture: str
    vector_bytes: int
    vector_registers: int
    fused_multiply_add: bool
    converts_float16: bool
    dot_bytes: int
    l1_bytes: int
    l2_bytes: int
    cores: int

    def lanes(self, element_bytes: int = 4) -> int:
        """Elements of a vector register."""
        return self.vector_bytes // element_bytes


def architecture() -> str:
    """This machine's architecture as the target table spells it."""
    machine = platform.machine().lower()
    return {"amd64": "x86-64", "x86_64": "x86-64", "arm64": "aarch64"}.get(machine, machine)


def find_target(name: str, wanted_architecture: str | None = None) -> Target:
    """The family of this name: of an architecture, else of this machine's, else of the only one that has the name.

    Raises InvalidArgument for a name that there is not.
    """
    named = [family for family in FAMILIES if family.name == name]
    if not named:
        known = dict.fromkeys(family.name for family in FAMILIES)
        raise InvalidArgument(f"unknown target {name!r}; known: {', '.join(known)}")
    wanted = wanted_architecture or architecture()
    found = next((family for family in named if family.architecture == wanted), None)
    if found is None and (wanted_architecture is not None or len(named) > 1):
        raise InvalidArgument(f"target {name} is not for {wanted}")
    return found or named[0]


@lru_cache(maxsize=1)
def _listed_features() -> frozenset[str] | None:
    """Features that the system lists for CPUs of this architecture; None where it lists none."""
    heading = "Features" if architecture() == "aarch64" else "flags"
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(heading):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return None


_confirmed: frozenset[str] | None = None


def confirm_features(has: Callable[[str], bool]) -> None:
    """Ask the CPU itself, of which `has` knows a feature by its name, for all that the targets need."""
    global _confirmed
    _confirmed = frozenset(name for family in FAMILIES for name in family.features if has(name))


def cpu_features() -> frozenset[str]:
    """Features of this CPU by their names in /proc/cpuinfo.

    An emulator or a sandbox may show that file of another machine, and a system may hide features that the CPU has:
    once `confirm_features` has asked the CPU, both must agree.
    """
    listed = _listed_features()
    if listed is None or _confirmed is None:
        return listed or _confirmed or frozenset()
    return listed & _confirmed


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def missing_features(target: str) -> frozenset[str]:
    """CPU features `target` needs and this machine lacks."""
    return find_target(target).features - cpu_features()


def own_chain() -> tuple[str, ...]:
    """The targets of this machine's architecture, best first."""
    here = architecture()
    return tuple(family.name for family in FAMILIES if family.architecture == here) or ("generic",)


def best_target(among: Iterable[str] | None = None) -> str:
    """The first target of this architecture's chain that this CPU can run; GQA_TVM_TARGET forces one.

    among: those to choose from, None = all. Raises InvalidArgument if none of them runs here.
    """
    forced = os.environ.get("GQA_TVM_TARGET")
    if forced:
        require_runnable(forced)
        return forced
    chain = own_chain()
    offered = set(chain if among is None else among)
    for target in chain:
        if target in offered and not missing_features(target):
            return target
    raise InvalidArgument(f"none of the targets {', '.join(sorted(offered))} runs on this CPU ({architecture()})")


def require_runnable(target: str) -> None:
    """InvalidArgument that says why `target` cannot run here."""
    if find_target(target).architecture != architecture():
        raise InvalidArgument(f"target {target} is not for {architecture()}")
    missing = missing_features(target)
    if missing:
        raise InvalidArgument(f"target {target} needs CPU features this machine lacks: {', '.join(sorted(missing))}")


def target_facts(target: Target) -> TargetFacts:
    """Facts of a target: caches and cores of this machine if it is of that architecture, else the family's least.

    GQA_TVM_FACTS, such as "l2_bytes=262144,cores=4", overrides numbers. Raises InvalidArgument if it is malformed.
    """
    here = target.architecture == architecture()
    numbers = {
        "vector_bytes": target.vector_bytes,
        "vector_registers": target.vector_registers,
        "dot_bytes": target.dot_bytes,
        "l1_bytes": (_cache_bytes(0) if here else 0) or 32 * _KIB,
        "l2_bytes": (_cache_bytes(2) if here else 0) or target.l2_bytes,
        "cores": usable_cores() if here else 1,
    }
    return replace(family_facts(target), **{**numbers, **_overrides(target, numbers)})  # type: ignore[arg-type]


def family_facts(target: Target) -> TargetFacts:
    """Facts that hold for every CPU of the family, whatever this machine is."""
    return TargetFacts(
        target.name,
        target.architecture,
        target.vector_bytes,
        target.vector_registers,
        target.fused_multiply_add,
        target.converts_float16,
        target.dot_bytes,
        32 * _KIB,
        target.l2_bytes,
        1,
    )


def _overrides(target: Target, known: dict[str, int]) -> dict[str, int]:
    """What GQA_TVM_FACTS says of the numbers that facts have for this machine."""
    text = os.environ.get("GQA_TVM_FACTS", "")
    try:
        pairs = [item.split("=") for item in text.split(",") if item]
        overrides = {name.strip(): int(value) for name, value in pairs}
    except ValueError:
        raise InvalidArgument(f"GQA_TVM_FACTS must look like l2_bytes=262144,cores=4, got {text!r}") from None
    choices = {"vector_bytes": (16, 32, 64), "dot_bytes": (0, target.dot_bytes)}
    for name, value in overrides.items():
        if name not in known or value < 0 or (value == 0 and name not in choices):
            raise InvalidArgument(f"GQA_TVM_FACTS: {name}={value}; known: {', '.join(known)}, positive")
        if value not in choices.get(name, (value,)):
            raise InvalidArgument(f"GQA_TVM_FACTS: {name} must be one of {choices[name]}, got {value}")
    return overrides


def _cache_bytes(index: int) -> int:
    """Size of a cache of this CPU as Linux numbers them (0: level 1 data, 2: level 2); 0 = it does not say."""
    try:
        with open(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size", encoding="ascii") as file:
            text = file.read().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, KeyError, ValueError):
        return 0


def llvm_target(target: Target) -> dict[str, object]:
    """TVM's target description."""
    description: dict[str, object] = {"kind": "llvm", "mcpu": target.mcpu}
    if target.mattr:
        description["mattr"] = list(target.mattr)
    if target.architecture != architecture():
        description["mtriple"] = {"x86-64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}[target.architecture]
    return description
