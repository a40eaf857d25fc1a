"""What a checkpoint set says of the run that wrote it: checked here, once, and believed nowhere else.

The checksums of a set vouch for its bytes, not for who made it. What is missing, of another type or out of range
is one line; the configuration that is kept in a set is for people to read, and nothing acts on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcpipe.checkpoint.sets import CheckpointSet
from hpcpipe.engine.snapshot import meta_name
from hpcpipe.errors import CheckpointError
from hpcpipe.schedule import Place
from hpcpipe.untrusted import one_line

LARGEST = 2**53


@dataclass(frozen=True, kw_only=True)
class Written:
    """The run as a whole: where its pipeline was filled, what it must share with a run that goes on to the bit.

    layers: names of the layers of each stage.
    files: for each stage, the numbers of the set's files that have its replicas, in the order of the replicas.
    """

    first: int
    identity: Mapping[str, Any]
    layers: tuple[tuple[str, ...], ...]
    files: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class StageState:
    """One replica of a stage at the cut: its layers, its updates, what is in flight.

    in_flight: for each minibatch, which of the stage's inputs want gradients.
    """

    layers: tuple[str, ...]
    updates: int
    in_flight: Mapping[int, tuple[bool, ...]]


def read_written(found: CheckpointSet) -> Written:
    """What the commit record of `found` says. Raises CheckpointError for a record that no run can have written."""
    meta = _Object(found.meta, str(found.path), "")
    identity = meta.object("identity")
    layers = tuple(identity.texts(stage, f"stages[{i}]") for i, stage in enumerate(identity.entries("stages")))
    replicas = identity.numbers(identity.entries("replicas"), "replicas")
    files = tuple(
        meta.numbers(meta.as_list(held, f"ranks[{i}]"), f"ranks[{i}]", below=found.ranks)
        for i, held in enumerate(meta.entries("ranks"))
    )
    if not layers or tuple(map(len, files)) != replicas or len(layers) != len(files):
        raise meta.wrong("ranks", "a list of the files of each replica of each stage", found.meta["ranks"])
    (first,) = meta.numbers([meta.get("first")], "first", below=found.step + 1)
    return Written(first=first, identity=identity.value, layers=layers, files=files)


def read_state(found: CheckpointSet, written: Written, place: Place) -> StageState:
    """What the file of one replica of a stage says of it.

    Raises CheckpointError for a file that does not verify, or that no run can have written.
    """
    if place.stage >= len(written.files) or place.replica >= len(written.files[place.stage]):
        raise CheckpointError(f"{found.path}: has no {place}; it is of another plan")
    file = written.files[place.stage][place.replica]
    stages = _Object(found.index(file).meta, f"{found.path}: file {file}", "").object("stages")
    state = stages.object(meta_name(place))
    in_flight = state.object("in_flight")
    wants = {}
    for minibatch, flags in in_flight.value.items():
        if not (minibatch.isascii() and minibatch.isdecimal() and len(minibatch) < 16):
            raise in_flight.wrong(minibatch, "the number of a minibatch", minibatch)
        if not isinstance(flags, list) or not all(isinstance(flag, bool) for flag in flags):
            raise in_flight.wrong(minibatch, "a list of true and false", flags)
        wants[int(minibatch)] = tuple(flags)
    (updates,) = state.numbers([state.get("updates")], "updates")
    return StageState(layers=state.texts(state.get("layers"), "layers"), updates=updates, in_flight=wants)


class _Object:
    """A JSON object of a set, and where it is, for messages."""

    def __init__(self, value: Mapping[str, Any], source: str, where: str) -> None:
        self.value = value
        self._source = source
        self._where = where

    def get(self, key: str) -> Any:
        if key not in self.value:
            raise self._fault(f"has no {self._where}{key}")
        return self.value[key]

    def object(self, key: str) -> _Object:
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object", value)
        return _Object(value, self._source, f"{self._where}{key}.")

    def entries(self, key: str) -> list[Any]:
        return self.as_list(self.get(key), key)

    def as_list(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong(key, "a list", value)
        return value

    def texts(self, value: Any, key: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.wrong(key, "a list of names", value)
        return tuple(value)

    def numbers(self, value: list[Any], key: str, *, below: int = LARGEST) -> tuple[int, ...]:
        if not all(type(number) is int and 0 <= number < below for number in value):
            raise self.wrong(key, f"whole numbers of 0 to {below - 1}", value)
        return tuple(value)

    def wrong(self, key: str, expected: str, value: Any) -> CheckpointError:
        return self._fault(f"says {self._where}{key} is {one_line(repr(value), 60)}, which must be {expected}")

    def _fault(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._source}: {one_line(what)}; no run of this hpcpipe wrote that: use another set"
        )
