"""Block sizes by kernel and shape: the target's defaults, overridden by what tuning has found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .kernels import KernelSpec
from .schedules.block_sizes import BlockSizes

# Fields that decide in which order numbers are added. A result must depend neither on the longest entry of a batch nor
# on the number of threads, so records of one kernel that differ in these alone cannot stand side by side.
# The rows of a task are among them: the last key that any of a tile sees decides how many zeros a sum takes.
ORDER_FIELDS = (
    *("q_block", "kv_block", "lanes"),
    *("decode_rows", "decode_kv_block", "kv_chunk"),
    *("split_integers", "split_prefill", "split_q_block", "split_kv_block"),
)


@dataclass(frozen=True)
class TunedRecord:
    """What tuning found for one kernel and shape.

    kernel: name without tuned sizes. group_size: G. total: keys T that it was measured at, a power of two; it stands
    for T in (total / 2, total]. threads: that it was measured with. sizes: fields of BlockSizes that take the place of
    the default's. default_us, median_us: before and after; trials: candidates measured.
    """

    kernel: str
    group_size: int
    total: int
    threads: int
    sizes: dict[str, Any]
    default_us: float
    median_us: float
    trials: int

    @property
    def digest(self) -> str:
        """Six hexadecimal digits of the sizes, "" if they are the default."""
        text = json.dumps(self.sizes, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:6] if self.sizes else ""


@dataclass(frozen=True)
class TunedKernel:
    """A kernel with the sizes to run it with, and which record they come from."""

    spec: KernelSpec
    sizes: BlockSizes
    origin: str


def total_bucket(total: int) -> int:
    """The power of two that stands for so many keys."""
    return 1 << max(total - 1, 0).bit_length()


class SizesTable:
    """The sizes of one target's kernels. Raises ValueError for records that contradict each other."""

    def __init__(self, default: BlockSizes, records: Sequence[TunedRecord] = ()) -> None:
        self.default = default
        self.records = tuple(records)
        self._by_digest = {record.digest: replace(default, **_fields(record.sizes)) for record in self.records}
        self._by_digest[""] = default
        self._by_shape: dict[tuple[str, int], list[TunedRecord]] = {}
        for record in self.records:
            self._by_shape.setdefault((record.kernel, record.group_size), []).append(record)
        for shape, found in self._by_shape.items():
            orders = {tuple(getattr(self._by_digest[r.digest], field) for field in ORDER_FIELDS) for r in found}
            if len(orders) > 1:
                raise ValueError(
                    f"tuned sizes of {shape[0]}, G={shape[1]}: records differ in {', '.join(ORDER_FIELDS)}"
                )

    def sizes(self, spec: KernelSpec) -> BlockSizes:
        """The sizes that a kernel is compiled with. KeyError for tuned sizes that the table does not have."""
        return self._by_digest[spec.tuned]

    def choose(self, spec: KernelSpec, group_size: int, total: int, threads: int) -> TunedKernel:
        """The kernel for T = `total` keys: of the exact record, of the nearest one, or with default sizes."""
        found = self._by_shape.get((spec.name, group_size)) or self._of_any_group(spec)
        if not found:
            return TunedKernel(spec, self.default, "default")
        bucket = total_bucket(total)
        distance = lambda r: (abs(r.total.bit_length() - bucket.bit_length()), abs(r.threads - threads), r.total)  # noqa: E731
        record = min(found, key=distance)
        exact = (record.total, record.threads) == (bucket, threads)
        origin = f"tuned at T={record.total}, {record.threads} threads ({'exact' if exact else 'nearest'})"
        return TunedKernel(replace(spec, tuned=self._tuned(record)), self._by_digest[record.digest], origin)

    def _of_any_group(self, spec: KernelSpec) -> list[TunedRecord]:
        """Records of flash_prefill, whose rows are the same to it whatever their group, of the least G that has any."""
        if spec.operation != "flash_prefill":
            return []
        groups = [group for kernel, group in self._by_shape if kernel == spec.name]
        return self._by_shape[spec.name, min(groups)] if groups else []

    def tuned_specs(self) -> set[KernelSpec]:
        """Every kernel that `choose` may return besides those with default sizes."""
        return {spec for spec in map(self.kernel_of, self.records) if spec.tuned}

    def kernel_of(self, record: TunedRecord) -> KernelSpec:
        """The kernel that `choose` returns for a record of this table."""
        return replace(KernelSpec.parse(record.kernel), tuned=self._tuned(record))

    def _tuned(self, record: TunedRecord) -> str:
        """The digest that a record's kernel is built under: "" where its sizes are what this machine has anyway."""
        spec, sizes = KernelSpec.parse(record.kernel), self._by_digest[record.digest]
        prefills = spec.operation == "flash_prefill" and spec.row_tile
        default = self.default.with_q_block(spec.row_tile) if prefills else self.default
        return "" if sizes == default else record.digest

    def origins(self) -> str:
        """Which kernels have records, in words."""
        if not self.records:
            return "none, the defaults serve"
        kernels = sorted({f"{record.kernel} G={record.group_size}" for record in self.records})
        return f"{len(self.records)} records of {', '.join(kernels)}; the defaults serve all others"

    def as_dict(self) -> dict[str, Any]:
        return {"default": self.default.as_dict(), "records": [asdict(record) for record in self.records]}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> SizesTable:
        """The inverse of `as_dict` after JSON. Raises ValueError, KeyError or TypeError for anything else."""
        default = BlockSizes(**_fields(content["default"]))
        return SizesTable(default, [TunedRecord(**record) for record in content["records"]])


def _fields(sizes: dict[str, Any]) -> dict[str, Any]:
    """BlockSizes fields from JSON, where tuples have become lists."""
    return {name: _tuple(value) for name, value in sizes.items()}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(item) for item in value) if isinstance(value, (list, tuple)) else value
