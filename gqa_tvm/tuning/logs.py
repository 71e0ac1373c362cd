"""What tuning leaves behind: block_sizes.json, and the MetaSchedule records of accepted sizes beside it."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BuildError
from ..schedules.block_sizes import BlockSizes
from ..targets import Target
from ..tuned_sizes import SizesTable, TunedRecord

SIZES_FILE = "block_sizes.json"
# MetaSchedule's pair of files, compressed: a workload is a megabyte of indented JSON in base64.
WORKLOADS_FILE = "database_workload.json"
RECORDS_FILE = "database_tuning_record.json"

Header = dict[str, Any]


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file as a whole: a reader, or a run that is interrupted, never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(made, 0o644)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise


class SizesLog:
    """block_sizes.json of a target in a folder of logs."""

    def __init__(self, folder: Path, target: Target, default: BlockSizes) -> None:
        """Raises BuildError for a file that is there and not a log of this target."""
        self.folder = folder / target.name
        self.target, self.default = target, default
        self.records = self._read()

    @property
    def path(self) -> Path:
        return self.folder / SIZES_FILE

    def _read(self) -> list[TunedRecord]:
        if not self.path.exists():
            return []
        try:
            content = json.loads(self.path.read_text())
            records = [TunedRecord(**record) for record in content["records"]]
            found = content["target"], content["architecture"]
        except (ValueError, KeyError, TypeError) as error:
            raise BuildError(f"{self.path}: not a table of tuned block sizes: {error!r}") from error
        if found != (self.target.name, self.target.architecture):
            raise BuildError(f"{self.path} is of {' on '.join(found)}; nothing of another target is used or replaced")
        return records

    def merge(self, records: Sequence[TunedRecord], header: Header) -> None:
        """Take records of one kernel and group size, in place of older ones that they contradict, and write."""
        kept = [record for record in self.records if not any(_same_cell(record, new) for new in records)]
        merged = _without_contradictions(self.default, records, kept)
        content = {
            "target": self.target.name,
            "architecture": self.target.architecture,
            **header,
            "records": [asdict(record) for record in sorted(merged, key=_key)],
        }
        write_atomically(self.path, (json.dumps(content, indent=1) + "\n").encode())
        self.records = merged


def _key(record: TunedRecord) -> tuple[Any, ...]:
    return record.kernel, record.group_size, record.total, record.threads


def _same_cell(record: TunedRecord, other: TunedRecord) -> bool:
    return _key(record) == _key(other)


def _without_contradictions(
    default: BlockSizes, records: Sequence[TunedRecord], older: Sequence[TunedRecord]
) -> list[TunedRecord]:
    """`records` and those older ones that may stand beside them."""
    merged = list(records)
    for record in older:
        try:
            SizesTable(default, [*merged, record])
        except ValueError:
            continue
        merged.append(record)
    return merged


def merge_database(folder: Path, chosen: Iterable[tuple[Path, tuple[int, ...]]]) -> None:
    """Add the workload and the record of each (database folder of one workload, decisions) to the pair in `folder`.

    Records of a workload that the pair has already take the place of the old ones.
    """
    workloads, records = _read_pair(folder)
    for source, decisions in chosen:
        workload = (source / WORKLOADS_FILE).read_text().splitlines()[0]
        record = _record_of(source, decisions)
        if record is None:
            continue
        if workload not in workloads:
            workloads.append(workload)
        index = workloads.index(workload)
        records = [old for old in records if old[0] != index] + [[index, record]]
    write_atomically(folder / f"{WORKLOADS_FILE}.gz", _packed(workloads))
    write_atomically(folder / f"{RECORDS_FILE}.gz", _packed([json.dumps(record) for record in records]))


def _read_pair(folder: Path) -> tuple[list[str], list[list[Any]]]:
    files = [folder / f"{name}.gz" for name in (WORKLOADS_FILE, RECORDS_FILE)]
    if not all(file.exists() for file in files):
        return [], []
    workloads, records = (gzip.decompress(file.read_bytes()).decode().splitlines() for file in files)
    return workloads, [json.loads(record) for record in records]


def _packed(lines: Sequence[str]) -> bytes:
    # Without a time stamp the same records are the same bytes.
    return gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)


class LoggedRecord(NamedTuple):
    """A line of a database's records. decisions: of the samplings of its trace, in order; content: all of it."""

    decisions: tuple[int, ...]
    seconds: float
    content: Any


def read_records(file: Path) -> list[LoggedRecord]:
    """The records of a database of one workload; a last line that was cut off is left out."""
    found = []
    for line in file.read_text().splitlines():
        try:
            _, content = json.loads(line)
        except ValueError:
            continue
        (_, made), seconds, *_ = content
        found.append(LoggedRecord(tuple(decision for _, decision in made), float(seconds[0]), content))
    return found


def _record_of(source: Path, decisions: tuple[int, ...]) -> Any:
    """The newest record of these decisions in a database of one workload."""
    found = [record.content for record in read_records(source / RECORDS_FILE) if record.decisions == decisions]
    return found[-1] if found else None


def unpack_database(folder: Path, into: Path) -> None:
    """The pair in `folder` as the plain files that MetaSchedule's JSONDatabase opens.

    Its traces use tensor intrinsics of the schedules, which must be registered before it is opened.
    """
    for name in (WORKLOADS_FILE, RECORDS_FILE):
        (into / name).write_bytes(gzip.decompress((folder / f"{name}.gz").read_bytes()))
