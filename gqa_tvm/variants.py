"""A variant: the kernels of one target with their block sizes, as they are built, cached and linked."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

from .errors import BuildError
from .kernels import KernelSpec
from .schedules.block_sizes import default_block_sizes, multiplies_digits
from .targets import Target, TargetFacts, family_facts, find_target, target_facts
from .tuned_sizes import SizesTable, TunedRecord


class Variant(NamedTuple):
    """base: the variant whose code serves wherever this one's is not better, None = there is none."""

    target: Target
    sizes: SizesTable
    base: Variant | None = None

    def owner(self, spec: KernelSpec) -> Variant:
        """The variant whose code a kernel is: the base's, unless this one has dot products or tuned sizes for it."""
        sizes = self.sizes.sizes(spec)
        if self.base is None or spec.tuned or multiplies_digits(spec, sizes):
            return self
        return self.base.owner(spec)

    def symbol(self, spec: KernelSpec) -> str:
        """The function's name in a library that holds several variants."""
        return f"{spec.name}__{self.owner(spec).target.name.replace('-', '_')}"


def machine_variant(name: str) -> Variant:
    """The variant of a target with sizes for this machine. Raises InvalidArgument, BuildError."""
    target = find_target(name)
    return _cached_variant(target, target_facts(target))


def family_variant(name: str, architecture: str | None = None) -> Variant:
    """The variant of a target that serves its whole family, the same wherever it is built."""
    target = find_target(name, architecture)
    return _cached_variant(target, family_facts(target))


@lru_cache(maxsize=64)
def _cached_variant(target: Target, facts: TargetFacts) -> Variant:
    base = None
    if target.base:
        base_target = find_target(target.base, target.architecture)
        shared = replace(facts, name=base_target.name, dot_bytes=base_target.dot_bytes)
        base = _cached_variant(base_target, shared)._replace(sizes=SizesTable(default_block_sizes(shared)))
    return Variant(target, SizesTable(default_block_sizes(facts), tuned_records(target)), base)


def tuned_records(target: Target) -> list[TunedRecord]:
    """The committed records of a target; none of another target are ever used. Raises BuildError for a broken file."""
    file = resources.files(f"{__package__}.tuning_logs") / target.name / "block_sizes.json"
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_text())
        if (content["target"], content["architecture"]) != (target.name, target.architecture):
            return []
        return [TunedRecord(**record) for record in content["records"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{file}: not a table of tuned block sizes: {error!r}") from error
