"""Sets that are damaged in every way that disks, networks and people find.

A trial damages a copy of the newest of two real sets. It is as specified if verification finds a fault, the set
before it is taken instead, and whatever can still be read of the damaged one has the bits that were written.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

from hpcpipe.checkpoint.digest import KINDS
from hpcpipe.checkpoint.layout import COMMIT_NAME, set_name
from hpcpipe.checkpoint.sets import CheckpointSet, inspect, newest_valid, open_set
from hpcpipe.errors import EXIT_USAGE, CheckpointError

from .jobs import HPCPIPE
from .runs import LARGE, SMALL, Case, References, Setting
from .trials import Task, Trial

KIND = "corrupt"
COMMAND_EVERY = 10
"""One trial in so many asks the command as well, which takes longer."""
COMMAND_LIMIT_S = 120.0
BLOCK = 4096

FOREIGN = {SMALL: Case("vertical_sync", "adamw", (1, 1), epochs=1), LARGE: SMALL}
"""For each run whose sets are damaged another one, whose sets are mixed up with them."""

Tree = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Set:
    """A copy of a set that may be damaged, and real ones to mix it up with.

    `another` is a set of the same run at another step, `foreign` one at the same step of another run.
    """

    path: Path
    another: Path
    foreign: Path
    rng: random.Random

    def any_file(self) -> Path:
        """A rank file, or one time in four the commit record."""
        return self.path / COMMIT_NAME if self.rng.random() < 0.25 else self.rank_file()

    def rank_file(self) -> Path:
        return self.rng.choice(sorted(self.path.glob("rank-*")))


def _rewrite(change: Callable[[bytearray, random.Random], None]) -> Callable[[Set], str]:
    """Damage to the bytes of one file; drawn again until they do change."""

    def damage(victim: Set) -> str:
        path = victim.any_file()
        before = path.read_bytes()
        after = bytearray(before)
        while after == before:
            change(after, victim.rng)
        path.write_bytes(after)
        return path.name

    return damage


def _flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _flip_byte(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)


def _overwrite(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    length = min(rng.randrange(1, BLOCK), len(data) - start)
    data[start : start + length] = rng.randbytes(length)


def _zero_block(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(0, len(data), 512)
    end = min(start + rng.choice((512, BLOCK)), len(data))
    data[start:end] = bytes(end - start)


def _repeat_block(data: bytearray, rng: random.Random) -> None:
    length = min(512, len(data) // 2)
    source, target = (rng.randrange(len(data) - length) for _ in range(2))
    data[target : target + length] = data[source : source + length]


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _extend(data: bytearray, rng: random.Random) -> None:
    data += rng.choice((b"\n", bytes(512), rng.randbytes(rng.randrange(1, BLOCK))))


def _delete(victim: Set) -> str:
    path = victim.any_file()
    path.unlink()
    return path.name


def _swap_ranks(victim: Set) -> str:
    one, other = victim.rng.sample(sorted(victim.path.glob("rank-*")), 2)
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    return f"{one.name} and {other.name}"


def _take(source: str, name: str) -> Callable[[Set], str]:
    def damage(victim: Set) -> str:
        path = victim.rank_file() if name == "rank" else victim.path / COMMIT_NAME
        shutil.copyfile(getattr(victim, source) / path.name, path)
        return path.name

    return damage


DAMAGES: dict[str, tuple[int, Callable[[Set], str]]] = {
    "a flipped bit": (6, _rewrite(_flip_bit)),
    "a flipped byte": (4, _rewrite(_flip_byte)),
    "a stretch overwritten": (4, _rewrite(_overwrite)),
    "a block of zeros": (4, _rewrite(_zero_block)),
    "a block repeated elsewhere": (2, _rewrite(_repeat_block)),
    "cut off": (4, _rewrite(_truncate)),
    "extended": (3, _rewrite(_extend)),
    "deleted": (3, _delete),
    "two rank files swapped": (2, _swap_ranks),
    "a rank file of another step": (2, _take("another", "rank")),
    "the commit record of another step": (2, _take("another", "commit")),
    "a rank file of another run": (2, _take("foreign", "rank")),
    "the commit record of another run": (2, _take("foreign", "commit")),
}
"""Every kind of damage, how often it is drawn, and what does it: it returns the name of what it has hit."""


def tasks(count: int, setting: Setting) -> Iterator[Task]:
    """Tasks that together damage so many sets."""
    for number in range(count):
        yield _task(number, setting)


def _task(number: int, setting: Setting) -> Task:
    name, folder = f"{setting.seed}/{KIND}/{number}", setting.work / f"{KIND}-{number}"
    return lambda: [_trial(name, setting.references, folder, by_command=number % COMMAND_EVERY == 0)]


def _trial(name: str, references: References, folder: Path, *, by_command: bool) -> Trial:
    rng = random.Random(name)
    case = LARGE if rng.random() < 0.25 else SMALL
    unbroken, other = references.of(case), references.of(FOREIGN[case])
    last = min(case.steps, other.case.steps)
    steps = [step for step in range(case.every, last, case.every) if unbroken.set_of(step).exists()]
    place = rng.randrange(1, len(steps) - 1)
    older, newest, another = steps[place - 1], steps[place], rng.choice(steps[:place] + steps[place + 1 :])
    for step in (older, newest):
        shutil.copytree(unbroken.set_of(step), folder / set_name(step))
    victim = Set(folder / set_name(newest), unbroken.set_of(another), other.set_of(newest), rng)
    (damage,) = rng.choices(list(DAMAGES), [share for share, _ in DAMAGES.values()])
    hit = DAMAGES[damage][1](victim)
    what = f"{case.name}, step {newest}: {damage}: {hit}"
    trial = Trial(kind=KIND, name=name, what=what, folder=folder, about=(damage,))
    began = time.monotonic()
    try:
        _check(trial, victim.path, older, _written(unbroken.set_of(newest)))
    except Exception as error:
        trial.fail(f"{type(error).__name__} instead of a refusal: {error}")
    trial.seconds = time.monotonic() - began
    if by_command:
        _check_command(trial, victim.path)
    return trial


def _check(trial: Trial, path: Path, older: int, written: tuple[Tree, ...]) -> None:
    info = inspect(path)
    if info.fault is None and info.record is not None and not CheckpointSet(path, info.record).faults():
        trial.fail("not noticed: no fault was found")
    found, skipped = newest_valid(path.parent)
    if found is None or found.step != older:
        trial.fail(f"not the set of step {older} was taken instead, but {found and found.step}")
    elif not any(str(path) in line for line in skipped):
        trial.fail("nothing says why the newest set was passed over")
    for wrong in _wrong_loads(path, written):
        trial.fail(f"a wrong load: {wrong}", wrong=True)


def _wrong_loads(path: Path, written: tuple[Tree, ...]) -> Iterator[str]:
    """Each way of reading the set that returned, without an error, other bits than were written."""
    try:
        opened = open_set(path)
    except CheckpointError:
        return
    everything: Tree = {array_path: array for tree in written for array_path, array in tree.items()}
    reads: dict[str, Callable[[int], Tree]] = {
        "read_rank": lambda rank: open_set(path).read_rank(rank).tree,
        "read_paths": lambda rank: open_set(path).read_paths(lambda _: True, [rank]).tree,
    }
    for rank in range(opened.ranks):
        for how, read in reads.items():
            try:
                tree = read(rank)
            except CheckpointError:
                continue
            if rank >= len(written) or not _same(tree, written[rank]):
                yield f"{how} of rank {rank}"
    try:
        arrays = {array_path: array for array_path, _, array in open_set(path).layer_arrays(KINDS)}
    except CheckpointError:
        return
    if not _same(arrays, {array_path: everything.get(array_path) for array_path in arrays}):
        yield "layer_arrays"


def _same(found: Tree, written: dict[str, Any]) -> bool:
    return found.keys() == written.keys() and all(
        (other := written[path]) is not None
        and array.dtype == other.dtype
        and array.shape == other.shape
        and array.tobytes() == other.tobytes()
        for path, array in found.items()
    )


@cache
def _written(path: Path) -> tuple[Tree, ...]:
    opened = open_set(path)
    return tuple(opened.read_rank(rank).tree for rank in range(opened.ranks))


def _check_command(trial: Trial, path: Path) -> None:
    words = [sys.executable, *HPCPIPE, "checkpoint", "verify", str(path)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        trial.fail(str(error), hung=True)
        return
    if done.returncode != EXIT_USAGE:
        trial.fail(f"`hpcpipe checkpoint verify` ended with {done.returncode}, not with {EXIT_USAGE}")
    elif str(path) not in done.stderr:
        trial.fail("`hpcpipe checkpoint verify` does not name the set")
