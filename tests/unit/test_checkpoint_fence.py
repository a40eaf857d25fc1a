"""The process that looks at foreign files: what it is given, and what happens when a file does it harm.

Programs in the place of the real one do what a file might make the HDF5 library do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import h5py
import pytest

from hpcpipe.checkpoint import fence
from hpcpipe.checkpoint.layout import rank_name
from hpcpipe.checkpoint.sets import newest_valid, open_set
from hpcpipe.checkpoint.structure import NoVerdictError
from hpcpipe.errors import CheckpointError
from tests.unit.checkpoint_samples import another_hdf5, layer_tree, same_tree, write_set

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A set that is right in all, but was laid out otherwise; an older one of the usual layout beside it."""
    write_set(tmp_path, 1, [layer_tree("a")])
    with another_hdf5():
        return write_set(tmp_path, 2, [layer_tree("a"), {}])


def _instead(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program))
    monkeypatch.setattr(fence, "PROGRAM", path)


def _with_check(body: str) -> str:
    """The real program, but this is what happens when it looks at the file."""
    return (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import hpcpipe.checkpoint.structure as structure\n"
        f"def check_structure(*_):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        "structure.check_structure = check_structure\n"
        "from hpcpipe.checkpoint import inspector\ninspector.main()\n"
    )


def _refusal(directory: Path, why: str) -> str:
    with pytest.raises(CheckpointError, match=why) as caught:
        open_set(directory).read_rank(0)
    assert not isinstance(caught.value, NoVerdictError)
    assert "\n" not in str(caught.value)
    assert rank_name(0) in str(caught.value)
    return str(caught.value)


def test_a_file_of_another_hdf5_version_is_as_good_as_any(foreign: Path) -> None:
    found = open_set(foreign)
    assert same_tree(found.read_rank(0).tree, layer_tree("a"))
    assert open_set(foreign).faults() == []
    assert newest_valid(foreign.parent)[0].step == 2  # type: ignore[union-attr]


def test_hdf5_reads_no_file_in_the_process_of_the_reader(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("HDF5 saw it"))
    monkeypatch.setattr(h5py.h5f, "open", lambda *_, **__: pytest.fail("HDF5 saw it"))
    assert open_set(foreign).faults() == []


def test_a_file_is_looked_at_once_however_many_layers_are_read(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    real = fence.inspect_apart
    monkeypatch.setattr(
        "hpcpipe.checkpoint.reader.inspect_apart", lambda *given: looked.append(given) or real(*given)
    )
    found = open_set(foreign)
    for _ in range(3):
        found.read_layer("a")
    assert len(looked) == 1


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import os; os.abort()", "crashed on it .SIGABRT"),
        ("import ctypes; ctypes.string_at(8)", "crashed on it .SIGSEGV"),
        ("return bytearray(4 << 30)", "needs more than 512 MiB"),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass",
            "not come to an end",
        ),
        ("while True: pass", "not done with it after 2 s|not come to an end"),
        ("import time; time.sleep(60)", "not done with it after 2 s"),
    ],
    ids=["abort", "crash", "memory", "processor", "circle", "sleep"],
)
def test_a_file_that_does_harm_is_refused_in_one_line(
    tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    if "not done" in why:
        monkeypatch.setattr(fence, "SECONDS", 2.0)
    _instead(monkeypatch, tmp_path, _with_check(body))

    refusal = _refusal(foreign, why)

    chosen, skipped = newest_valid(foreign.parent)
    assert chosen is not None
    assert chosen.step == 1
    assert skipped == [refusal]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "ended by signal 15"),
        ("raise SystemExit(3)", "exit code 3 and said nothing"),
        ("print('fine')", "exit code 0 and said nothing"),
        ("print('[\"fine\"]')", "exit code 0 and said nothing"),
        ("print('[' * 50_000)", "exit code 0 and said nothing"),
        ("while True: print('fine' * 1000)", "ended by signal 9"),
        ('print(\'["failed", "ModuleNotFoundError: h5py"]\')', "ModuleNotFoundError: h5py"),
    ],
)
def test_a_process_that_ends_otherwise_says_nothing_about_the_file(
    tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    _instead(monkeypatch, tmp_path, program)

    for attempt in (lambda: open_set(foreign).read_rank(0), lambda: newest_valid(foreign.parent)):
        with pytest.raises(NoVerdictError, match=why) as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert "says nothing about the file" in str(caught.value)


def test_no_process_at_all_says_nothing_about_the_file(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(NoVerdictError, match="no process to do so can be started"):
        open_set(foreign).read_rank(0)


def test_the_process_knows_nothing_of_launcher_terminal_and_working_directory(
    tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LD_PRELOAD_OF_MINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "FALSE")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h5py.py").write_text("raise SystemExit('the working directory is no place for modules')")
    _instead(
        monkeypatch,
        tmp_path,
        f"""
        import json, os, sys
        seen = {{"environment": dict(os.environ), "session": os.getsid(0) == os.getpid(), "path": sys.path,
                "files": sorted(os.listdir("/proc/self/fd"))}}
        open({str(tmp_path / "seen.json")!r}, "w").write(json.dumps(seen))
        print('["fine", ""]')
        """,
    )

    with open(os.devnull) as _, open(tmp_path / "kept open", "w") as _:
        open_set(foreign).read_rank(0)

    seen = json.loads((tmp_path / "seen.json").read_text())
    assert not [name for name in seen["environment"] if name.startswith(("PMI", "OMPI", "SLURM", "LD_PRELOAD"))]
    assert seen["environment"]["HDF5_USE_FILE_LOCKING"] == "FALSE"
    assert seen["session"]
    assert str(tmp_path) not in seen["path"]
    # The three of every process, and the one that lists.
    assert len(seen["files"]) == 4


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_signals_that_mean_the_ranks_do_not_end_it(
    tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    _instead(monkeypatch, tmp_path, _with_check(f"import os\nos.kill(os.getpid(), {int(number)})"))
    assert same_tree(open_set(foreign).read_rank(0).tree, layer_tree("a"))
