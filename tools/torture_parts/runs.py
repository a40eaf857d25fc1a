"""The small runs that are put under torture, and what each comes to when nobody disturbs it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from hpcpipe.checkpoint.digest import digest
from hpcpipe.checkpoint.layout import set_name
from hpcpipe.checkpoint.sets import choose, newest_valid, open_set
from hpcpipe.errors import HpcpipeError

from .jobs import Job

RUN = """
[run]
epochs = {epochs}
log_every = 1
[model]
name = "mlp"
hidden = {hidden}
activation = "tanh"
dropout = 0.1
batchnorm = true
[data]
name = "digits"
batch = 32
[pipeline]
policy = "{policy}"
{split}
[optimizer]
name = "{optimizer}"
lr = {lr}
[lr_schedule]
name = "cosine"
[eval]
every = 50
[checkpoint]
every = {every}
"""
LR = {"sgd": 0.05, "adamw": 0.003}
STEPS_PER_EPOCH = 45
READY = "minibatches, schedule"
"""Part of the first line that a run prints when all its ranks are there."""
_START = re.compile(r"resuming from .* \(step (\d+)\)|no checkpoint to resume from: starting at step (0)")


@dataclass(frozen=True)
class Case:
    """One kind of run: the digits through an MLP of hidden layers of `width`, with dropout and batch norm.

    `replicas` are the ranks of each stage; a checkpoint comes every `every` minibatches.
    """

    policy: str
    optimizer: str
    replicas: tuple[int, ...]
    every: int = 4
    epochs: int = 10
    width: int = 32

    @property
    def ranks(self) -> int:
        return sum(self.replicas)

    @property
    def steps(self) -> int:
        """Minibatches of the whole run."""
        return STEPS_PER_EPOCH * self.epochs

    @property
    def name(self) -> str:
        shape = "-".join(map(str, self.replicas))
        return f"{self.policy}-{self.optimizer}-{shape}-every{self.every}-width{self.width}-epochs{self.epochs}"

    def write(self, folder: Path) -> Path:
        """The run file of this case, put into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        return write_run_file(
            folder,
            policy=self.policy,
            optimizer=self.optimizer,
            epochs=self.epochs,
            every=self.every,
            hidden=[self.width] * max(4, len(self.replicas) - 1),
            split=f"replicas = {list(self.replicas)}",
        )

    def job(self, folder: Path, name: str, *settings: str) -> Job:
        """This run in `folder`, begun or gone on with; `settings` are as `--set` takes them."""
        more = [word for setting in settings for word in ("--set", setting)]
        words = ["train", str(self.write(folder)), "--out", str(folder / "out"), "--resume", "auto", *more]
        return Job(self.ranks, *words, log=folder / f"{name}.log")


SMALL = Case("spectrain", "adamw", (1, 1))
REPLICATED = Case("stash", "sgd", (2, 1))
LARGE = Case("spectrain", "adamw", (1, 1), width=128)
"""With files of some hundred kilobytes."""


def write_run_file(
    folder: Path,
    *,
    policy: str,
    optimizer: str,
    epochs: int = 5,
    every: int = 8,
    hidden: Sequence[int] = (32, 32, 32, 32),
    split: str = "",
) -> Path:
    """A run file in `folder` of the digits through such an MLP; `split` is a line of [pipeline]."""
    path = folder / "run.toml"
    text = RUN.format(
        epochs=epochs,
        hidden=list(hidden),
        policy=policy,
        split=split,
        optimizer=optimizer,
        lr=LR[optimizer],
        every=every,
    )
    path.write_text(text)
    return path


def digest_of(out: Path) -> str:
    """The digest of the newest set of a run. Raises CheckpointError without one."""
    found, skipped = choose(out, deep=True)
    assert not skipped, skipped
    return digest(found).overall


def losses_of(out: Path) -> list[tuple[int, float]]:
    """Step and loss of every line of training in metrics.jsonl; a last line that is cut off does not count."""
    found = []
    for line in (out / "metrics.jsonl").read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "loss" in entry:
            found.append((entry["step"], entry["loss"]))
    return found


def steps_of(out: Path) -> int:
    """The step of the last line of training in metrics.jsonl, 0 before the first."""
    try:
        return max((step for step, _ in losses_of(out)), default=0)
    except FileNotFoundError:
        return 0


def started_at(said: str) -> int | None:
    """The step at which a run said that it starts; None if it came to an end before it could say so."""
    found = _START.search(said)
    return None if found is None else int(found[1] or found[2])


@dataclass(frozen=True)
class Unbroken:
    """A case that was let run to its end in `out`, with all its sets kept.

    `start_s` are the seconds until all its ranks were there, `train_s` those from there to the end.
    """

    case: Case
    out: Path
    start_s: float
    train_s: float

    @cached_property
    def digest(self) -> str:
        return digest_of(self.out)

    @cached_property
    def losses(self) -> list[tuple[int, float]]:
        return losses_of(self.out)

    def set_of(self, step: int) -> Path:
        """The folder of its set at `step`, which may not exist."""
        return self.out / "checkpoints" / set_name(step)

    def differs(self, out: Path) -> str | None:
        """How a run that has ended differs from this one, None if it does not in a single bit."""
        try:
            found, reached = losses_of(out), digest_of(out)
        except (HpcpipeError, OSError, AssertionError) as error:
            return f"what it came to cannot be read: {error}"
        if found != self.losses:
            wanted = dict(self.losses)
            strange = [step for step, loss in found if wanted.get(step) != loss]
            where = f"first at step {strange[0]}" if strange else f"{len(found)} lines for {len(wanted)}"
            return f"its losses are not those of the unbroken run ({where})"
        return None if reached == self.digest else "its final digest is not that of the unbroken run"

    def newest_differs(self, checkpoints: Path) -> tuple[int, str | None]:
        """The step of the newest valid set in a folder (0 without one), and how it differs from this run's."""
        try:
            found, _ = newest_valid(checkpoints)
        except HpcpipeError as error:
            return 0, f"its sets cannot be read: {error}"
        if found is None:
            return 0, None
        whole = self.set_of(found.step)
        if not whole.exists():
            return found.step, f"{found.path}: the unbroken run has no set at that step"
        same = digest(found).overall == digest(open_set(whole)).overall
        return found.step, None if same else f"{found.path}: its digest is not that of the unbroken run"


@dataclass
class References:
    """The unbroken runs, each made once when it is first asked for; several threads may ask."""

    folder: Path
    limit_s: float
    _locks: dict[Case, threading.Lock] = field(default_factory=dict)
    _found: dict[Case, Unbroken] = field(default_factory=dict)

    def of(self, case: Case) -> Unbroken:
        """Raises HungError or RuntimeError where even the unbroken run does not come to its end."""
        with self._locks.setdefault(case, threading.Lock()):
            if case not in self._found:
                self._found[case] = self._run(case)
            return self._found[case]

    def _run(self, case: Case) -> Unbroken:
        folder = self.folder / case.name
        began = time.monotonic()
        with case.job(folder, "run", f"checkpoint.keep_last={case.steps}") as job:
            job.until(lambda: READY in job.said(), limit_s=self.limit_s)
            started = time.monotonic()
            code = job.end(limit_s=self.limit_s)
        if code:
            raise RuntimeError(
                f"{folder}: the run that nobody disturbed ended with exit code {code}; see its run.log"
            )
        return Unbroken(case, folder / "out", started - began, time.monotonic() - started)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all trials of one call have in common.

    ranks: numbers of ranks that runs may have. work: where folders of trials go. limit_s: longer is a hang.
    mount: whether disks may be mounted.
    """

    seed: int
    ranks: range
    references: References
    work: Path
    limit_s: float
    mount: bool = True

    def among(self, cases: Sequence[Case], otherwise: Case) -> list[Case]:
        """Those of the cases that have one of these numbers of ranks, else one in the manner of `otherwise`."""
        found = [case for case in cases if case.ranks in self.ranks]
        return found or [replace(otherwise, replicas=(1,) * self.ranks[0])]
