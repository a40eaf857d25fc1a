#!/usr/bin/env python3
"""Spoils checkpoints and other files for as long as one likes, and sees that each is read or refused in one line.

    tools/fuzz_reader.py --minutes 10 --seed 1

Inputs are made from a seed and a number, and read in processes of their own with limits on time and memory, so a
crash, a hang or too much memory is a finding, too. Each is kept in --out, and `--case index:4711` repeats it. The
target "structure" gives files to the HDF5 library directly, which may crash; then the fence around it is tried
with the same file, and it is a finding only if that does not refuse it in one line.

`--guided TARGET` lets atheris, which must be installed, look for inputs that reach code that none has reached yet;
libFuzzer's options go behind `--`, such as `-- -max_total_time=600`.
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

SECONDS_PER_INPUT = 20
MEMORY = 2 << 30
"""Bytes beyond what is there when the first input is read."""
BATCH_S = 5.0
_FAILED = 3


@click.command()
@click.option("--minutes", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--only", multiple=True, metavar="TARGET", help="Leave the other targets out; may be repeated.")
@click.option("--case", metavar="TARGET:NUMBER", help="Repeat one input of this seed, in this process.")
@click.option("--guided", metavar="TARGET", help="Let atheris search.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("fuzz-findings"), show_default=True)
@click.argument("rest", nargs=-1)
def main(
    minutes: float,
    seed: int,
    only: tuple[str, ...],
    case: str | None,
    guided: str | None,
    out: Path,
    rest: tuple[str, ...],
) -> None:
    """Fuzz what hpcpipe reads; ends with 1 if there are findings."""
    with tempfile.TemporaryDirectory() as name:
        if guided is not None:
            _guide(guided, Path(name), rest)
        elif case is not None:
            _repeat(Path(name), seed, case)
        elif _search(Path(name), seed, only, 60 * minutes, out):
            sys.exit(1)


def _search(folder: Path, seed: int, only: tuple[str, ...], seconds: float, out: Path) -> int:
    """Read inputs for so long, each target for as long as the others; the number of findings."""
    from tests.fuzz.targets import agreeable_hdf5, make_targets

    done: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    contained: Counter[str] = Counter()
    findings: Counter[str] = Counter()
    with agreeable_hdf5():
        targets = make_targets(folder)
        chosen = list(only) or list(targets)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name = min(chosen, key=spent.__getitem__)
            began = time.monotonic()
            read, fault = _batch(targets[name], seed, done[name], min(began + BATCH_S, end), folder)
            done[name] += read
            spent[name] += time.monotonic() - began
            if fault is None:
                continue
            data = targets[name].make(_random(seed, name, done[name] - 1))
            fault = _fenced(targets[name], data, fault)
            if fault is None:
                contained[name] += 1
                continue
            findings[name] += 1
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}-{seed}-{done[name] - 1}").write_bytes(data)
            click.echo(f"{name}:{done[name] - 1} (seed {seed}): {fault}")
    for name in chosen:
        caught = f", {contained[name]} caught by the fence" if targets[name].fenced else ""
        click.echo(f"{name:20} {done[name]:8} inputs, {findings[name]} findings{caught}")
    return sum(findings.values())


def _batch(target: Target, seed: int, first: int, end: float, folder: Path) -> tuple[int, str | None]:
    """Read inputs from number `first` on in a process; how many there were, and how the last one went wrong."""
    counter = mmap.mmap(-1, 8)
    said = folder / "fault"
    pid = os.fork()
    if pid == 0:
        try:
            _read_inputs(target, seed, first, end, counter)
            os._exit(0)
        except BaseException:
            said.write_text(traceback.format_exc())
            os._exit(_FAILED)
    _, status = os.waitpid(pid, 0)
    count = int.from_bytes(counter[:8], "little")
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return count, None
    if code == _FAILED:
        return count, said.read_text()
    return count, f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def _read_inputs(target: Target, seed: int, first: int, end: float, counter: mmap.mmap) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = first
    while number == first or time.monotonic() < end:
        counter[:8] = (number - first + 1).to_bytes(8, "little")
        data = target.make(_random(seed, target.name, number))
        # Ends the process wherever it is.
        signal.alarm(SECONDS_PER_INPUT)
        target.read(data)
        signal.alarm(0)
        number += 1


def _fenced(target: Target, data: bytes, fault: str) -> str | None:
    """What is still wrong where the library is behind its fence."""
    if target.fenced is None:
        return fault
    try:
        target.fenced(data)
    except Exception:
        return traceback.format_exc()
    return None


def _repeat(folder: Path, seed: int, case: str) -> None:
    from tests.fuzz.targets import agreeable_hdf5, make_targets

    name, _, number = case.partition(":")
    with agreeable_hdf5():
        target = make_targets(folder)[name]
        target.read(target.make(_random(seed, name, int(number))))
    click.echo(f"{case}: is read, or refused in one line")


def _guide(name: str, folder: Path, rest: tuple[str, ...]) -> None:
    """Never returns."""
    import atheris

    with atheris.instrument_imports(include=["hpcpipe"]):
        from tests.fuzz.targets import agreeable_hdf5, make_targets
    with agreeable_hdf5():
        target = make_targets(folder)[name]
        corpus = folder / "corpus"
        corpus.mkdir()
        for number in range(50):
            (corpus / str(number)).write_bytes(target.make(_random(0, name, number)))
        atheris.Setup([sys.argv[0], *rest, str(corpus)], target.read)
        atheris.Fuzz()


def _random(seed: int, target: str, number: int) -> random.Random:
    return random.Random(f"{seed} {target} {number}")


if __name__ == "__main__":
    main()
