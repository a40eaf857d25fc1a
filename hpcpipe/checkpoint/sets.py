"""Checkpoint sets as a whole: which there are, which is the newest that verifies, reading one by rank or layer.

It never writes and never deletes. A folder without a valid commit record is no set, whatever else it holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcpipe.checkpoint.layout import COMMIT_NAME, Array, Entry, FileReport, Index, parse_set_name, rank_name
from hpcpipe.checkpoint.origin import home_of, strangeness
from hpcpipe.checkpoint.reader import Part, RankFile, file_faults, read_index, read_part
from hpcpipe.checkpoint.record import Record, length_fault, read_record
from hpcpipe.checkpoint.stranger import stranger
from hpcpipe.errors import CheckpointError


def layer_kind(path: str) -> str | None:
    """`parameters`, `buffers`, `optimizer`, … for an array of a layer, None for what a stage has in flight."""
    parts = path.split("/")
    return parts[2] if len(parts) > 3 and parts[0] == "layers" else None


@dataclass(frozen=True, kw_only=True)
class SetInfo:
    """A set's folder by what its commit record and its files' lengths tell; `fault` says why it does not count.

    `committed` is whether there is a record at all: without one the write was cut off, or is still going on.
    """

    path: Path
    step: int
    attempt: int
    committed: bool
    record: Record | None
    fault: str | None

    @property
    def order(self) -> tuple[int, int]:
        """Greater is newer."""
        return self.step, self.attempt

    @property
    def length(self) -> int:
        """Bytes of all rank files together; 0 without a record."""
        return sum(report.length for report in self.record.files) if self.record else 0


class CheckpointSet:
    """One committed set. Opening reads only the commit record; every file is verified when it is first read."""

    def __init__(self, path: Path, record: Record) -> None:
        self.path = path
        self.step = record.step
        self.meta = record.meta
        self.record = record
        self._indexes: dict[int, Index] = {}
        self._verified: set[int] = set()

    @property
    def ranks(self) -> int:
        """How many ranks wrote it."""
        return len(self.record.files)

    @property
    def verified(self) -> bool:
        """Whether every byte of every file has been found right."""
        return len(self._verified) == self.ranks

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers that some rank holds, in order of rank and then as the rank gave them."""
        return tuple(self._layer_ranks())

    def index(self, rank: int) -> Index:
        """Meta and table of arrays of one rank, read without the arrays.

        Raises:
            CheckpointError: the set has no such rank, or the file's index does not verify.
        """
        self._check_rank(rank)
        if rank not in self._indexes:
            self._indexes[rank] = read_index(self.path / rank_name(rank), self.record.files[rank])
        return self._indexes[rank]

    def read_rank(self, rank: int) -> Part:
        """Everything that one rank wrote, bit for bit.

        Raises:
            CheckpointError: the set has no such rank, or its file does not verify; names file and dataset.
        """
        with self._open(rank) as file:
            return file.part()

    def read_paths(self, wanted: Callable[[str], bool], ranks: Iterable[int]) -> Part:
        """The arrays whose path is `wanted`, from whichever of these ranks' files has each; no rank's meta.

        Nothing else of the files is read. What is read is verified array by array.

        Raises:
            CheckpointError: the set has no such rank, or an index or an array does not verify.
        """
        tree: dict[str, Array] = {}
        bf16: set[str] = set()
        for rank in ranks:
            index = self.index(rank)
            paths = [path for path in index.entries if path not in tree and wanted(path)]
            if paths:
                part = read_part(self.path / rank_name(rank), self.record.files[rank], index, paths)
                tree |= part.tree
                bf16 |= part.bf16
        return Part(tree, {}, frozenset(bf16))

    def read_layer(self, name: str) -> Part:
        """One layer, whichever rank held it; paths relative to it (`optimizer/exp_avg/weight`).

        Raises:
            CheckpointError: no rank holds such a layer, or its file does not verify.
        """
        rank = self._layer_ranks().get(name)
        if rank is None:
            raise CheckpointError(f"{self.path}: holds no layer {name!r}; it is of another model")
        prefix = f"layers/{name}/"
        with self._open(rank) as file:
            part = file.part([path for path in file.index.entries if path.startswith(prefix)])
        tree = {path.removeprefix(prefix): array for path, array in part.tree.items()}
        return Part(tree, part.meta, frozenset(path.removeprefix(prefix) for path in part.bf16))

    def layer_arrays(self, kinds: Collection[str]) -> Iterator[tuple[str, Entry, Array]]:
        """Path, description, content of each array of these kinds (`parameters`, …) of all layers, one at a time.

        In order of rank; an array that several ranks hold (replicas of a stage) comes once.

        Raises:
            CheckpointError: a file does not verify, or two ranks hold different values of one array.
        """
        seen: dict[str, Entry] = {}
        for rank in range(self.ranks):
            with self._open(rank) as file:
                for path, entry in file.index.entries.items():
                    if layer_kind(path) not in kinds:
                        continue
                    if path not in seen:
                        seen[path] = entry
                        yield path, entry, file.read(path)
                    elif (seen[path].dtype, seen[path].shape, seen[path].crc) != (
                        entry.dtype,
                        entry.shape,
                        entry.crc,
                    ):
                        raise CheckpointError(f"{self.path}: rank {rank} and one before it differ in {path!r}")

    def faults(self) -> list[str]:
        """Everything that is wrong with the files, a line each; reads all of them.

        Raises:
            NoVerdictError: a file cannot be looked at.
        """
        found = []
        for report in self.record.files:
            path = self.path / rank_name(report.rank)
            if faults := file_faults(path, report):
                other = stranger(path, report, self.record)
                found += faults if other is None else [other]
            else:
                self._verified.add(report.rank)
        return found

    def _layer_ranks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for rank in range(self.ranks):
            for path in self.index(rank).entries:
                if layer_kind(path) is not None:
                    found.setdefault(path.split("/")[1], rank)
        return found

    def _open(self, rank: int) -> RankFile:
        self._check_rank(rank)
        path = self.path / rank_name(rank)
        file = RankFile(path, self.record.files[rank], trusted=rank in self._verified)
        self._verified.add(rank)
        return file

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise CheckpointError(f"{self.path}: was written by {self.ranks} ranks and has no rank {rank}")


def open_set(path: Path) -> CheckpointSet:
    """The set in folder `path`.

    Raises:
        CheckpointError: it has no valid commit record.
    """
    return CheckpointSet(path, read_record(path))


def find_sets(root: Path) -> list[SetInfo]:
    """All set folders below `root` (`<run>/checkpoints`), newest first, also those that do not count.

    Judged by commit record, presence and length of the files; their content is not read. A root that does not
    exist has none.

    Raises:
        CheckpointError: `root` cannot be listed.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be listed ({error.strerror})") from error
    infos = [inspect(root / name) for name in names if parse_set_name(name)]
    return sorted(infos, key=lambda info: info.order, reverse=True)


def inspect(path: Path) -> SetInfo:
    """What record and lengths tell of a set's folder; under a user's own name it has the step of its record."""
    record = fault = None
    name = _set_named(path)
    try:
        record = read_record(path)
        fault = next((f for report in record.files if (f := _misfit(path, report, record))), None)
        if name is not None and record.step != name[0]:
            fault = f"{path}: its commit record is of step {record.step}; the folder was renamed or copied"
    except CheckpointError as error:
        fault = str(error)
    step, attempt = name or (record.step if record else 0, 0)
    # Also where it may not be looked at, or leads nowhere: something is there.
    committed = os.path.lexists(path / COMMIT_NAME)
    return SetInfo(path=path, step=step, attempt=attempt, committed=committed, record=record, fault=fault)


def _misfit(path: Path, report: FileReport, record: Record) -> str | None:
    """What the length of a rank file tells and, if that is wrong, the file itself."""
    fault = length_fault(path, report)
    return fault and (stranger(path / rank_name(report.rank), report, record) or fault)


def _set_named(path: Path) -> tuple[int, int] | None:
    """(step, attempt) by the name of the folder that `path` leads to."""
    return parse_set_name(os.path.basename(os.path.realpath(path)))


def newest_valid(
    root: Path, *, deep: bool = True, home: str | None = None
) -> tuple[CheckpointSet | None, list[str]]:
    """The newest set below `root` that verifies, and for each newer folder a line why it was passed over.

    `deep` reads every file of a candidate; without it only records and lengths count. Sets of another run than
    `home` (None: any will do) are passed over.

    Raises:
        NoVerdictError: a file cannot be looked at; to start from an older set, or from nothing, would be wrong.
    """
    skipped: list[str] = []
    for info in find_sets(root):
        if info.fault is None and info.record is not None:
            candidate = CheckpointSet(info.path, info.record)
            reason = strangeness(info.path, candidate.meta, home)
            if reason is None and deep:
                reason = next(iter(candidate.faults()), None)
            if reason is None:
                return candidate, skipped
            skipped.append(reason)
        else:
            skipped.append(str(info.fault))
    return None, skipped


def locate(path: Path) -> tuple[Path, bool]:
    """What a user's path means: (a set's folder, True) or (a folder of sets, False).

    Accepts one set, a folder of sets, or a run's folder with `checkpoints/` in it.

    Raises:
        CheckpointError: it is none of these.
    """
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: no such folder; give a run's folder, its checkpoints folder or one set")
    if os.path.lexists(path / COMMIT_NAME) or _set_named(path):
        return path, True
    for root in (path / "checkpoints", path):
        try:
            if os.path.isdir(root) and any(parse_set_name(name) for name in os.listdir(root)):
                return root, False
        except OSError as error:
            raise CheckpointError(f"{root}: cannot be listed ({error.strerror})") from error
    raise CheckpointError(f"{path}: holds no checkpoint (no folder step-… in it or in its checkpoints/)")


def choose(path: Path, *, deep: bool) -> tuple[CheckpointSet, list[str]]:
    """The set that a user's path names: itself, or the newest valid one of the run in the folder.

    With a line for each that was passed over.

    Raises:
        CheckpointError: there is none that verifies, or the folder's `run.json` does not say which run is in it.
    """
    where, is_set = locate(path)
    if is_set:
        return open_set(where), []
    found, skipped = newest_valid(where, deep=deep, home=home_of(where))
    if found is None:
        raise CheckpointError(
            f"{where}: none of its {len(skipped)} sets is valid; the newest: {''.join(skipped[:1])}"
        )
    return found, skipped
