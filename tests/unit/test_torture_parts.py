"""The tool for torture sees what it is there to see: wrong bits, hangs, damage that goes unnoticed."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hpcpipe.checkpoint.layout import COMMIT_NAME, rank_name, set_name
from tests.unit.checkpoint_samples import layer_tree, uncommit, write_set
from tools.torture_parts import corrupt, jobs
from tools.torture_parts.jobs import HungError, Job
from tools.torture_parts.kills import SetWatch
from tools.torture_parts.runs import LARGE, SMALL, Case, Setting, Unbroken, started_at
from tools.torture_parts.trials import Trial, row, table

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run_of(case: Case, folder: Path, steps: int = 6) -> Unbroken:
    """A folder as a run of two ranks leaves it, with small sets that differ from step to step."""
    seed = 100 * len(case.name)
    for step in range(1, steps + 1):
        trees = [layer_tree([f"l{rank}"], seed=seed + step) for rank in range(2)]
        write_set(folder / "checkpoints", case.every * step, trees)
    lines = [{"step": step, "loss": 1 / (step + 2)} for step in range(1, case.every * steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Unbroken(case, folder, 1.0, 1.0)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = {
        case: run_of(case, tmp_path_factory.mktemp("unbroken"))
        for case in {SMALL, LARGE, *corrupt.FOREIGN.values()}
    }
    return SimpleNamespace(of=found.__getitem__)


def damaged(count: int, references: Any, work: Path) -> list[Trial]:
    setting = Setting(seed=1, ranks=range(2, 5), references=references, work=work, limit_s=60.0)
    return [trial for task in corrupt.tasks(count, setting) for trial in task()]


def test_every_kind_of_damage_is_done_and_noticed(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corrupt, "COMMAND_EVERY", 100)
    trials = damaged(150, references, tmp_path)

    assert [trial.faults for trial in trials if not trial.as_specified] == []
    assert {word for trial in trials for word in trial.about} == set(corrupt.DAMAGES)


def test_a_reader_that_checks_nothing_is_found_out(
    tmp_path: Path, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corrupt, "COMMAND_EVERY", 100)
    monkeypatch.setattr("hpcpipe.checkpoint.sets.file_faults", lambda *_: [])
    trials = damaged(60, references, tmp_path)

    faults = [fault for trial in trials for fault in trial.faults]
    assert "not noticed: no fault was found" in faults
    assert any("was taken instead" in fault for fault in faults)


def test_wrong_bits_from_a_damaged_set_are_a_wrong_load(
    references: Any,
) -> None:
    set_of = references.of(SMALL).set_of
    written = corrupt._written(set_of(SMALL.every))

    wrong = list(corrupt._wrong_loads(set_of(2 * SMALL.every), written))

    assert wrong == [
        "read_rank of rank 0",
        "read_paths of rank 0",
        "read_rank of rank 1",
        "read_paths of rank 1",
        "layer_arrays",
    ]
    assert list(corrupt._wrong_loads(set_of(SMALL.every), written)) == []


def test_a_loss_that_differs_in_its_last_bit_is_seen(tmp_path: Path) -> None:
    unbroken, other = run_of(SMALL, tmp_path / "a"), run_of(SMALL, tmp_path / "b")
    assert unbroken.differs(other.out) is None
    metrics = other.out / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("0.2}", "0.20000000000000004}"))

    assert unbroken.differs(other.out) == "its losses are not those of the unbroken run (first at step 3)"


def test_a_loss_that_is_missing_or_stands_twice_is_seen(tmp_path: Path) -> None:
    unbroken, other = run_of(SMALL, tmp_path / "a"), run_of(SMALL, tmp_path / "b")
    lines = (other.out / "metrics.jsonl").read_text().splitlines(keepends=True)
    for strange in (lines[:-1], lines[:5] + lines[4:]):
        (other.out / "metrics.jsonl").write_text("".join(strange))

        assert f"{len(strange)} lines for {len(lines)}" in str(unbroken.differs(other.out))


def test_other_bits_in_the_last_set_or_in_the_newest_are_seen(tmp_path: Path) -> None:
    unbroken, other = run_of(SMALL, tmp_path / "a"), run_of(SMALL, tmp_path / "b")
    newest = other.set_of(6 * SMALL.every)
    for file in newest.iterdir():
        file.unlink()
    write_set(newest.parent, 6 * SMALL.every, [layer_tree([f"l{rank}"], seed=rank) for rank in range(2)])

    assert unbroken.differs(other.out) == "its final digest is not that of the unbroken run"
    step, difference = unbroken.newest_differs(newest.parent)
    assert step == 6 * SMALL.every
    assert "its digest is not that of the unbroken run" in str(difference)
    uncommit(newest)
    assert unbroken.newest_differs(newest.parent) == (5 * SMALL.every, None)


@pytest.mark.parametrize(
    ("said", "step"),
    [
        ("hpcpipe: resuming from out/checkpoints/step-0000000040.1 (step 40); this run continues it", 40),
        ("hpcpipe: no checkpoint to resume from: starting at step 0", 0),
        ("hpcpipe: 3 ranks", None),
    ],
)
def test_where_a_run_starts_is_read_from_what_it_says(said: str, step: int | None) -> None:
    assert started_at(said) == step


def test_the_moments_of_a_checkpoint_are_told_apart(tmp_path: Path) -> None:
    watch = SetWatch(tmp_path)
    assert watch.left_behind() == "before the first set"
    older, newer = write_set(tmp_path, 1, [layer_tree("a")]), tmp_path / set_name(2)
    assert (watch.write(), watch.commit(), watch.commit(), watch.retention()) == (False, True, False, False)
    newer.mkdir()
    (newer / f"{rank_name(0)}.tmp").touch()
    assert watch.write()
    assert SetWatch(tmp_path).left_behind() == "in the middle of a file"
    (newer / f"{rank_name(0)}.tmp").unlink()
    assert SetWatch(tmp_path).left_behind() == "before a commit"
    write_set(tmp_path, 2, [layer_tree("a")])
    assert (watch.commit(), watch.retention()) == (True, False)
    assert SetWatch(tmp_path).left_behind() == "between two sets"
    (older / COMMIT_NAME).unlink()
    assert watch.retention()
    assert SetWatch(tmp_path).left_behind() == "in the middle of a deletion"


@pytest.fixture
def job_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Job]:
    """Makes a job out of a program that takes the place of launcher and ranks."""
    program = tmp_path / "program.py"

    def made(text: str) -> Job:
        program.write_text(text)
        monkeypatch.setattr(jobs, "launch_line", lambda ranks, arguments, python: [sys.executable, str(program)])
        return Job(1, log=tmp_path / "log")

    return made


LEAVES_A_CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("leaving", flush=True)
"""


def test_a_process_that_outlives_its_launcher_is_a_hang_and_is_killed(job_of: Callable[[str], Job]) -> None:
    with job_of(LEAVES_A_CHILD) as job:
        with pytest.raises(HungError, match=r"still there after 1 s: \d+ \(.*; it last said: leaving") as caught:
            job.end(limit_s=1.0)
        left = int(str(caught.value).split("s: ")[1].split()[0])
        os.kill(left, 0)
    time.sleep(0.1)

    state = Path(f"/proc/{left}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_job_that_comes_to_nothing_is_a_hang_and_one_that_ends_is_not(job_of: Callable[[str], Job]) -> None:
    with job_of("import time; time.sleep(600)") as job, pytest.raises(HungError, match="it said nothing"):
        job.until(lambda: False, limit_s=0.3)
    with job_of("raise SystemExit(3)") as job:
        assert not job.until(lambda: False, limit_s=30)
        assert not job.runs_for(30)
        assert job.end(limit_s=30) == 3


def test_a_row_counts_what_was_as_specified_and_what_was_not() -> None:
    trials = [Trial(kind="kills", name="0/kills/0", what="", folder=Path(), seconds=float(i)) for i in range(4)]
    trials[1].fail("hung", hung=True)
    trials[3].fail("other bits", wrong=True)

    assert list(row("kills", trials).values()) == ["kills", 4, 2, 1, 1, 0.0, 1.5, 3.0]
    title, line = table({"kills": trials})
    assert len(title) == len(line)


def invoke(monkeypatch: pytest.MonkeyPatch, *words: str, fault: str | None = None) -> Any:
    """The tool, with one trial of each kind that only says how it went."""
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = runpy.run_path(str(TOOLS / "torture.py"))

    def one(folder: Path) -> list[Trial]:
        folder.mkdir()
        trial = Trial(kind="corrupt", name="7/corrupt/0", what="a flipped bit", folder=folder)
        if fault:
            trial.fail(fault)
        return [trial]

    monkeypatch.setattr(tool["corrupt"], "tasks", lambda _, setting: [lambda: one(setting.work / "corrupt-0")])
    main = tool["main"]
    assert isinstance(main, click.Command)
    return CliRunner().invoke(main, words)


def test_the_tool_ends_with_0_and_leaves_nothing_if_all_was_as_specified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = invoke(monkeypatch, "--corrupt", "1", "--keep", str(tmp_path))

    assert done.exit_code == 0, done.output
    assert "corrupt: 1 of 1 noticed, 0 wrong loads" in done.output
    assert list(tmp_path.iterdir()) == []


def test_the_tool_ends_with_1_and_keeps_the_folder_of_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = invoke(monkeypatch, "--corrupt", "1", "--keep", str(tmp_path), fault="not noticed")

    assert done.exit_code == 1, done.output
    assert "failed: 7/corrupt/0: a flipped bit" in done.output
    (kept,) = tmp_path.glob("torture-*/corrupt-0")
    assert str(kept) in done.output
    shown = invoke(monkeypatch, "--corrupt", "1", "--keep", str(tmp_path), "--json", fault="not noticed")
    assert json.loads(shown.stdout)["failures"][0]["faults"] == ["not noticed"]


@pytest.mark.parametrize(
    "words",
    [[], ["--kills", "-1"], ["--kills", "1", "--ranks", "1-2"], ["--kills", "1", "--ranks", "x"]],
    ids=" ".join,
)
def test_wrong_use_of_the_tool_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    done = invoke(monkeypatch, *words)

    assert done.exit_code == 2
    assert "Error: " in done.output
