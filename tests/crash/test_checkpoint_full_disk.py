"""A disk that fills up at any point of a save: a clear error, no debris, and the set before still good."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcpipe.checkpoint.background import BackgroundWriter
from hpcpipe.checkpoint.layout import COMMIT_NAME, new_set_directory, rank_name
from hpcpipe.checkpoint.record import commit
from hpcpipe.checkpoint.sets import newest_valid
from hpcpipe.checkpoint.writer import write_rank_file
from tests.unit.checkpoint_samples import Array, layer_tree, random_array, same_tree, write_set

_PAGE = 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where we may mount one; a plain folder elsewhere."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    permitted = os.geteuid() == 0 and shutil.which("mount") is not None
    mounted = permitted and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield tmp_path
    finally:
        if mounted:
            subprocess.run(["umount", str(tmp_path)], check=True)


def _leave(disk: Path, free: int) -> None:
    """Fill the disk up to `free` bytes. Where it is no disk of our own, limit the length of files instead."""
    (disk / "ballast").write_bytes(b"")
    status = os.statvfs(disk)
    if status.f_blocks * status.f_frsize <= 1 << 20:
        (disk / "ballast").write_bytes(bytes(status.f_bavail * status.f_frsize - free))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (free, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture(autouse=True)
def _file_size_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _save(directory: Path, tree: dict[str, Array]) -> OSError | None:
    try:
        report = write_rank_file(directory, 0, tree, {"padding": "x" * 3000})
        commit(directory, [report], {"padding": "x" * 9000})
    except OSError as error:
        return error
    return None


def test_a_disk_that_fills_up_at_any_point_leaves_the_set_before(small_disk: Path) -> None:
    root = small_disk / "checkpoints"
    before = layer_tree("a")
    good = write_set(root, 1, [before])
    tree = {f"layers/l{i}/parameters/w": random_array((2500,), "float32", i) for i in range(10)}
    directory = new_set_directory(root, 2)
    failed = set()
    free = 2 * _PAGE
    _leave(small_disk, free)
    while (error := _save(directory, tree)) is not None:
        assert error.errno in (errno.ENOSPC, errno.EFBIG)
        failed.add(Path(str(error.filename)).name)
        assert not list(root.glob("*/*.tmp"))
        found, _ = newest_valid(root)
        assert found is not None
        assert found.path == good
        assert same_tree(found.read_rank(0).tree, before)
        (directory / rank_name(0)).unlink(missing_ok=True)
        free += _PAGE
        _leave(small_disk, free)
    assert rank_name(0) in failed
    found, _ = newest_valid(root)
    assert found is not None
    assert same_tree(found.read_rank(0).tree, tree)


def test_a_full_disk_under_the_commit_record_leaves_the_set_uncommitted(small_disk: Path) -> None:
    directory = new_set_directory(small_disk, 1)
    report = write_rank_file(directory, 0, layer_tree("a"), {})
    _leave(small_disk, _PAGE)
    with pytest.raises(OSError, match=COMMIT_NAME):
        commit(directory, [report], {"padding": "x" * 50_000})
    assert newest_valid(small_disk)[0] is None


def test_a_full_disk_in_the_background_comes_back_with_errno_and_file(small_disk: Path) -> None:
    _leave(small_disk, 10 * _PAGE)
    writer = BackgroundWriter()
    writer.submit(small_disk / "step-0000000001", 3, {"a": random_array((50_000,), "float32", 1)}, {})
    with pytest.raises(OSError, match=r"rank-00003\.h5") as caught:
        writer.wait()
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert not writer.busy
