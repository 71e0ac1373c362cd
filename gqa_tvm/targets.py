"""CPU families: what they offer, which this machine can run, which stands in for which."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from .errors import InvalidArgument

# target -> LLVM's view of it; variants are compiled for the family's baseline so that one library serves all its CPUs.
_LLVM = {
    "generic": {"x86-64": "x86-64"},
    "x86-avx2": {"x86-64": "haswell"},
    "x86-avx512": {"x86-64": "skylake-avx512"},
    "x86-avx512-vnni": {"x86-64": "cascadelake"},
}
# Best first. The fallback of a target is the next one its architecture lists.
FALLBACKS = {"x86-64": ("x86-avx512-vnni", "x86-avx512", "x86-avx2", "generic"), "aarch64": ("generic",)}
_FEATURES = {
    "generic": frozenset(),
    "x86-avx2": frozenset({"avx2", "fma", "f16c", "bmi2"}),
    "x86-avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}),
}
_FEATURES["x86-avx512-vnni"] = _FEATURES["x86-avx512"] | {"avx512_vnni"}
TARGETS = tuple(_LLVM)


@dataclass(frozen=True)
class TargetFacts:
    """What a schedule may ask of a target. vector_bytes: SIMD width; cache sizes in bytes."""

    name: str
    architecture: str
    vector_bytes: int
    vector_registers: int
    l2_bytes: int
    cores: int
    converts_float16: bool  # in hardware

    def lanes(self, element_bytes: int = 4) -> int:
        """Elements of a vector register."""
        return self.vector_bytes // element_bytes


def architecture() -> str:
    """This machine's architecture as the target table spells it."""
    machine = platform.machine().lower()
    return {"amd64": "x86-64", "x86_64": "x86-64", "arm64": "aarch64"}.get(machine, machine)


@lru_cache(maxsize=1)
def cpu_features() -> frozenset[str]:
    """Feature flags the kernel reports for this CPU; empty where it reports none."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def missing_features(target: str) -> frozenset[str]:
    """CPU features `target` needs and this machine lacks."""
    return _FEATURES[target] - cpu_features()


def best_target() -> str:
    """The first target of this architecture's chain that this CPU can run; GQA_TVM_TARGET forces one."""
    forced = os.environ.get("GQA_TVM_TARGET")
    if forced:
        require_runnable(forced)
        return forced
    chain = FALLBACKS.get(architecture(), ("generic",))
    return next(target for target in chain if not missing_features(target))


def require_runnable(target: str) -> None:
    """InvalidArgument that says why `target` cannot run here."""
    if target not in TARGETS:
        raise InvalidArgument(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    if target not in FALLBACKS.get(architecture(), ("generic",)):
        raise InvalidArgument(f"target {target} is not for {architecture()}")
    missing = missing_features(target)
    if missing:
        raise InvalidArgument(f"target {target} needs CPU features this machine lacks: {', '.join(sorted(missing))}")


def converts_float16(target: str) -> bool:
    """Whether the target has instructions between float16 and float32 (else integer arithmetic does it)."""
    return target != "generic" or architecture() == "aarch64"


@cache
def target_facts(target: str) -> TargetFacts:
    """Facts of `target`; cores and caches are this machine's."""
    vector_bytes, registers = {
        "x86-avx512-vnni": (64, 32),
        "x86-avx512": (64, 32),
        "x86-avx2": (32, 16),
        "generic": (16, 16),
    }[target]
    facts = TargetFacts(
        target, architecture(), vector_bytes, registers, _l2_bytes(), usable_cores(), converts_float16(target)
    )
    return replace(facts, vector_registers=32) if facts.architecture == "aarch64" else facts


_DEFAULT_L2_BYTES = 1 << 20


def _l2_bytes() -> int:
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index2/size", encoding="ascii") as file:
            text = file.read().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, KeyError, ValueError):
        return _DEFAULT_L2_BYTES


def llvm_target(target: str) -> dict[str, object]:
    """TVM's target description of `target` for this architecture."""
    if architecture() == "x86-64":
        return {"kind": "llvm", "mcpu": _LLVM[target]["x86-64"]}
    return {"kind": "llvm"}
