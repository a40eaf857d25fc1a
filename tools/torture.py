#!/usr/bin/env python3
"""Torture for an installation of hpcpipe: kill its runs, damage its checkpoints, fill its disk, freeze its ranks.

    tools/torture.py --kills 200 --corrupt 500 --disk-full 20 --freeze 20

does each that often on small runs, tells what came of it in a table and ends with 0 only if everything was as
specified, with 1 otherwise and with 2 for wrong use. Moments, ranks and places are drawn from `--seed`. Whatever
failed is shown with its seed, and its folder is kept. Linux only; needs an mpirun.

kills      runs end to the bit as if nothing had happened, each start going on from the newest committed set
corrupt    every damaged set is noticed, the one before it is taken, and nothing wrong is ever read
disk-full  older sets stay valid, training goes on or ends as configured, and the run ends to the bit
freeze     a stopped rank ends the job within its limit, by name, and the run ends to the bit after a restart
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from torture_parts import corrupt, freeze, full_disk, kills
from torture_parts.jobs import HungError
from torture_parts.runs import References, Setting
from torture_parts.trials import Task, Trial, carry_out, met, row, table

from hpcpipe.transport.launcher import mpirun_path

WORDS = {
    kills.KIND: "{good} of {all} resumed to the bit, {hung} hangs",
    corrupt.KIND: "{good} of {all} noticed, {wrong} wrong loads",
    full_disk.KIND: "{good} of {all} ended as specified, {hung} hangs",
    freeze.KIND: "{good} of {all} ended as specified, {hung} hangs",
}
SECONDS_BETWEEN_LINES = 5.0

Command = Callable[..., Any]


class Ranks(click.ParamType):
    """A number of ranks or a span of numbers."""

    name = "N or N-N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> range:
        low, _, high = str(value).partition("-")
        if not (low.isdecimal() and (high or low).isdecimal() and 2 <= int(low) <= int(high or low)):
            self.fail(f"{value!r} is no number of ranks: write 2-4, or 3; at least 2", param, ctx)
        return range(int(low), int(high or low) + 1)


def how_often(option: str, name: str, words: str) -> Callable[[Command], Command]:
    return click.option(option, name, default=0, type=click.IntRange(0), metavar="N", help=words)


@click.command()
@how_often("--kills", "killed", "How often to kill a run.")
@how_often("--corrupt", "damaged", "How many sets to damage.")
@how_often("--disk-full", "filled", "How often to fill the disk of a run's checkpoints.")
@how_often("--freeze", "frozen", "How often to stop a rank for ever.")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), help="Decides everything but timing."
)
@click.option("--ranks", default="2-4", show_default=True, type=Ranks(), help="Numbers of ranks of the runs.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Runs at a time.")
@click.option(
    "--limit", default=120.0, show_default=True, type=click.FloatRange(1), help="Seconds; more is a hang."
)
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Where folders of failures go.")
@click.option("--no-mount", is_flag=True, help="Fill no disk but limit the length of files, as without root.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    killed: int,
    damaged: int,
    filled: int,
    frozen: int,
    seed: int,
    ranks: range,
    jobs: int,
    limit: float,
    keep: Path | None,
    no_mount: bool,
    as_json: bool,
) -> None:
    """Kill, damage, fill and freeze so many times, and tell whether everything was as specified."""
    if not any((killed, damaged, filled, frozen)):
        raise click.UsageError("nothing to do: give --kills, --corrupt, --disk-full or --freeze a number")
    if mpirun_path() is None:
        raise click.UsageError("no mpirun beside this Python nor on the PATH: install one, or load a module")
    # Ends as by Ctrl-C, so that no job is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work = work_folder(keep)
    setting = Setting(
        seed=seed,
        ranks=ranks,
        references=References(work / "unbroken", limit),
        work=work,
        limit_s=limit,
        mount=not no_mount,
    )
    plan = ((kills, killed), (corrupt, damaged), (full_disk, filled), (freeze, frozen))
    try:
        found = {
            part.KIND: tried(part.KIND, part.tasks(count, setting), count, jobs) for part, count in plan if count
        }
    except (HungError, RuntimeError) as error:
        # Nothing can be compared with a run that fails when nobody disturbs it.
        raise click.ClickException(str(error)) from error
    tell(found, as_json=as_json)
    failed = any(not trial.as_specified for trials in found.values() for trial in trials)
    shutil.rmtree(setting.references.folder if failed else work, ignore_errors=True)
    sys.exit(failed)


def work_folder(keep: Path | None) -> Path:
    """A fresh folder, below `keep` if that is given, which is made."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="torture-", dir=keep)).resolve()


def tried(kind: str, tasks: Iterable[Task], wanted: int, jobs: int) -> list[Trial]:
    """Carry out all trials of a kind, and say how it goes; folders of trials that went well are removed."""
    began, told = time.monotonic(), 0.0
    found: list[Trial] = []
    for trials in carry_out(tasks, jobs):
        found += trials
        for trial in trials:
            if not trial.as_specified:
                click.echo(f"{kind}: FAILED {trial.name}: {trial.what}: {'; '.join(trial.faults)}", err=True)
        for folder in {trial.folder for trial in trials}:
            if all(trial.as_specified for trial in trials if trial.folder == folder):
                shutil.rmtree(folder, ignore_errors=True)
        seconds = time.monotonic() - began
        if seconds - told >= SECONDS_BETWEEN_LINES or len(found) == wanted:
            told = seconds
            good = sum(trial.as_specified for trial in found)
            click.echo(f"{kind}: {len(found)} of {wanted}, {good} as specified, {seconds:.0f} s", err=True)
    return found


def tell(found: dict[str, list[Trial]], *, as_json: bool) -> None:
    """The table, a line a kind in words, and each failure with its seed and its folder; or all of it as JSON."""
    bad = [trial for trials in found.values() for trial in trials if not trial.as_specified]
    if as_json:
        rows = [row(kind, trials) | {"met": met(trials)} for kind, trials in found.items()]
        failures = [{**vars(trial), "folder": str(trial.folder)} for trial in bad]
        click.echo(json.dumps({"kinds": rows, "failures": failures}))
        return
    for line in table(found):
        click.echo(line)
    for kind, trials in found.items():
        good, hung, wrong = (sum(getattr(t, name) for t in trials) for name in ("as_specified", "hung", "wrong"))
        words = WORDS[kind].format(good=good, all=len(trials), hung=hung, wrong=wrong)
        click.echo(f"{kind}: {words} ({', '.join(f'{count} {word}' for word, count in met(trials).items())})")
    for trial in bad:
        click.echo(f"\nfailed: {trial.name}: {trial.what}\n  {trial.folder}")
        for fault in trial.faults:
            click.echo(f"  - {fault}")


if __name__ == "__main__":
    main()
