from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpcpipe.checkpoint.background import BackgroundWriter
from hpcpipe.checkpoint.layout import FileReport
from hpcpipe.checkpoint.writer import RankFileWriter, write_rank_file
from tests.unit.checkpoint_samples import layer_tree


def _held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes wait for this event."""
    go = threading.Event()

    write = RankFileWriter.write

    def waiting(writer: RankFileWriter) -> FileReport:
        assert go.wait(30)
        return write(writer)

    monkeypatch.setattr(RankFileWriter, "write", waiting)
    return go


def test_the_report_comes_back_once_and_equals_a_write_in_the_foreground(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = _held_back(monkeypatch)
    writer = BackgroundWriter()
    assert not writer.busy
    assert writer.poll() is None

    writer.submit(tmp_path / "a", 1, layer_tree("a"), {"m": 1})
    assert writer.busy
    assert writer.poll() is None
    assert writer.wait(0.01) is None
    go.set()
    report = writer.wait()
    assert report == write_rank_file(tmp_path / "b", 1, layer_tree("a"), {"m": 1})
    assert not writer.busy
    assert writer.poll() is None
    assert writer.seconds > 0


def test_a_second_write_before_the_first_is_taken_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    writer.submit(tmp_path, 0, {}, {})
    with pytest.raises(RuntimeError, match="still in flight"):
        writer.submit(tmp_path, 0, {}, {})
    assert writer.wait() is not None
    writer.submit(tmp_path, 0, {}, {})
    assert writer.wait() is not None


def _until_done(writer: BackgroundWriter, take: Callable[[BackgroundWriter], FileReport | None]) -> FileReport:
    while (report := take(writer)) is None:
        time.sleep(0.001)
    return report


@pytest.mark.parametrize("take", [BackgroundWriter.wait, BackgroundWriter.poll], ids=["wait", "poll"])
def test_an_error_comes_back_once_as_what_it_was(
    tmp_path: Path, take: Callable[[BackgroundWriter], object]
) -> None:
    (tmp_path / "file").write_text("")
    writer = BackgroundWriter()
    writer.submit(tmp_path / "file" / "set", 0, {"a": np.zeros(1)}, {})
    with pytest.raises(FileExistsError, match=r"rank-00000\.h5"):
        _until_done(writer, take)
    assert not writer.busy
    writer.submit(tmp_path, 0, {}, {})
    assert writer.wait() is not None


def test_what_a_checkpoint_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    with pytest.raises(ValueError, match="dtype object"):
        writer.submit(tmp_path, 0, {"a": np.array([None])}, {})
    assert not writer.busy


def test_a_write_in_flight_does_not_hold_up_the_end_of_the_process(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np; from pathlib import Path;"
        "from hpcpipe.checkpoint.background import BackgroundWriter;"
        "w = BackgroundWriter();"
        "w.submit(Path(sys.argv[1]), 0, {f'l/{i}': np.ones(100_000, np.float32) for i in range(300)}, {});"
        "w.wait(float(sys.argv[2])); sys.exit(3)"
    )
    for delay in ("0.0", "0.01", "0.02", "0.05", "0.1"):
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path, delay], capture_output=True, text=True, timeout=30
        )
        assert (done.returncode, done.stderr) == (3, "")
