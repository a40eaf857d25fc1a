"""Resuming from sets of a colleague whose checksums are right, while what they say is not what any run wrote."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcpipe.checkpoint.layout import COMMIT_NAME
from hpcpipe.checkpoint.record import commit
from hpcpipe.checkpoint.sets import open_set
from hpcpipe.checkpoint.writer import write_rank_file
from hpcpipe.config import RunConfig
from hpcpipe.engine.train import TrainOptions, train
from hpcpipe.errors import CheckpointError, UserError
from tests.fuzz.mutations import spoiled
from tests.oracle.lone_world import LoneWorld
from tests.oracle.runs import configured, write_run_file
from tests.unit.checkpoint_samples import Array

STEP = 4
Tree = dict[str, Array]
Meta = dict[str, Any]


def _config(out: Path, policy: str = "stash", stages: int = 2) -> RunConfig:
    return configured(
        out,
        run={"max_steps": 6},
        model={"name": "mlp", "hidden": (8, 8), "activation": "tanh", "batchnorm": True},
        pipeline={"stages": stages, "policy": policy},
        checkpoint={"every": STEP, "keep_last": 99},
    )


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set that a run of two stages wrote, with a minibatch in flight."""
    config = _config(tmp_path_factory.mktemp("genuine") / "run")
    assert train(LoneWorld(), TrainOptions(run_file=str(write_run_file(config)))) == 0
    return Path(config.run.out) / "checkpoints" / f"step-{STEP:010d}"


def _rewritten(genuine: Path, folder: Path, change: Callable[[Tree, Meta, Meta], None]) -> Path:
    """The set with other arrays, another meta of its file and another meta of its record, and right checksums."""
    found = open_set(genuine)
    part = found.read_rank(0)
    tree, meta, record = dict(part.tree), dict(part.meta), dict(found.meta)
    change(tree, meta, record)
    directory = folder / genuine.name
    commit(directory, [write_rank_file(directory, 0, tree, meta)], record)
    return directory


def _resume(directory: Path, out: Path, **changes: Any) -> None:
    config = _config(out, **changes)
    train(LoneWorld(), TrainOptions(run_file=str(write_run_file(config)), resume=str(directory)))


def _set(*keys: str, to: Any) -> Callable[[Tree, Meta, Meta], None]:
    """Another value at `keys` of the file's meta, or of the record's behind "record"."""

    def change(_: Tree, meta: Meta, record: Meta) -> None:
        holder: Any = record if keys[0] == "record" else meta
        path = [key for key in keys if key != "record"]
        for key in path[:-1]:
            holder[key] = dict(holder[key])
            holder = holder[key]
        if to is KeyError:
            del holder[path[-1]]
        else:
            holder[path[-1]] = to

    return change


def _reshape(part: str, array: Array) -> Callable[[Tree, Meta, Meta], None]:
    """Another array in the place of the first whose path holds `part`."""

    def change(tree: Tree, *_: Meta) -> None:
        tree[next(path for path in tree if part in path)] = array

    return change


HOSTILE = {
    "no fingerprint": (_set("record", "fingerprint", to=KeyError), "of another model"),
    "no identity": (_set("record", "identity", to=KeyError), "has no identity"),
    "identity a list": (_set("record", "identity", to=[1]), "says identity is .*must be an object"),
    "stages a number": (_set("record", "identity", "stages", to=3), "must be a list"),
    "layers numbers": (_set("record", "identity", "stages", to=[[1], [2]]), "must be a list of names"),
    "replicas a text": (_set("record", "identity", "replicas", to=["1", "1"]), "must be whole numbers"),
    "no ranks": (_set("record", "ranks", to=KeyError), "has no ranks"),
    "ranks beyond the files": (_set("record", "ranks", to=[[0], [1]]), "must be whole numbers of 0 to 0"),
    "negative ranks": (_set("record", "ranks", to=[[0], [-1]]), "must be whole numbers of 0 to 0"),
    "ranks a boolean": (_set("record", "ranks", to=[[0], [False]]), "must be whole numbers of 0 to 0"),
    "ranks of other stages": (_set("record", "ranks", to=[[0]]), "must be a list of the files"),
    "first behind the step": (_set("record", "first", to=STEP + 1), f"must be whole numbers of 0 to {STEP}"),
    "first a float": (_set("record", "first", to=0.0), "must be whole numbers"),
    "first huge": (_set("record", "first", to=10**4000), "must be whole numbers"),
    "no stages": (_set("stages", to=KeyError), "has no stages"),
    "stages a list": (_set("stages", to=[]), "must be an object"),
    "a stage missing": (_set("stages", "1", to=KeyError), "has no stages.1"),
    "in_flight a list": (_set("stages", "0", "in_flight", to=[4]), "must be an object"),
    "in flight: no number": (_set("stages", "0", "in_flight", to={"x": [True]}), "the number of a minibatch"),
    "in flight: another number": (_set("stages", "0", "in_flight", to={"²": [True]}), "the number of a minibatch"),
    "in flight: no list": (_set("stages", "0", "in_flight", to={"4": 1}), "a list of true and false"),
    "in flight: more inputs": (_set("stages", "0", "in_flight", to={"4": [False] * 9}), "holds no .*inputs/1"),
    "updates negative": (_set("stages", "0", "updates", to=-1), "must be whole numbers"),
    "updates none": (_set("stages", "0", "updates", to=None), "must be whole numbers"),
    "layers missing": (_set("stages", "0", "layers", to=[]), "holds no .*parameters"),
    "weight of another shape": (_reshape("/parameters/", np.zeros((1,), np.float32)), "stored with shape"),
    "weight of complex numbers": (_reshape("/parameters/", np.zeros((8, 64), np.complex64)), "stored with"),
    "optimizer of another shape": (_reshape("/optimizer/", np.zeros((1,), np.float32)), "stored with shape"),
    "buffer of another shape": (_reshape("/buffers/", np.zeros((1,), np.float32)), "stored with shape"),
    "buffer of another kind": (_reshape("/buffers/", np.zeros((8,), np.int64)), "stored with torch.int64"),
    "old version of another shape": (_reshape("/versions/", np.zeros((2, 2), np.float32)), "stored with shape"),
    "input of another shape": (_reshape("/inputs/", np.zeros((3, 3), np.float32)), "cannot repeat the forward"),
    "input of another kind": (_reshape("/inputs/", np.zeros((16, 64), bool)), "cannot repeat the forward"),
}


@pytest.mark.parametrize(("change", "why"), HOSTILE.values(), ids=HOSTILE)
def test_a_set_that_no_run_wrote_is_refused_in_one_line(
    tmp_path: Path, genuine: Path, change: Callable[[Tree, Meta, Meta], None], why: str
) -> None:
    directory = _rewritten(genuine, tmp_path, change)
    with pytest.raises(CheckpointError, match=why) as caught:
        _resume(directory, tmp_path / "out")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_the_set_itself_rewritten_is_as_good_as_before(tmp_path: Path, genuine: Path) -> None:
    _resume(_rewritten(genuine, tmp_path, lambda *_: None), tmp_path / "out")


@pytest.mark.parametrize("seed", range(16))
def test_a_set_spoiled_at_random_is_taken_or_refused_in_one_line(tmp_path: Path, genuine: Path, seed: int) -> None:
    rng = random.Random(seed)

    def change(_: Tree, meta: Meta, record: Meta) -> None:
        for document in (meta, record):
            changed = spoiled(document, rng)
            document.clear()
            document.update(changed if isinstance(changed, dict) else {})

    directory = _rewritten(genuine, tmp_path, change)
    # On the same stages, and on others, what is read differs.
    for stages in (2, 1):
        try:
            _resume(directory, tmp_path / f"out{stages}", stages=stages)
        except UserError as error:
            line = str(error)
        else:
            continue
        assert line.isprintable()


def test_nothing_acts_on_the_configuration_in_a_set(
    tmp_path: Path, genuine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_attacker.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    evil = "of_the_attacker:build"

    def change(_: Tree, meta: Meta, record: Meta) -> None:
        config = '[model]\nname = "' + evil + '"\n[data]\nname = "' + evil + '"\n'
        record["config"] = meta["config"] = config
        record["model"] = record["data"] = record["loss"] = {"name": evil}
        record["identity"] = {**record["identity"], "loss": {"name": evil}}

    _resume(_rewritten(genuine, tmp_path, change), tmp_path / "out")
    assert "of_the_attacker" not in sys.modules


def test_weights_to_begin_with_that_are_no_file_are_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    for make in (os.mkfifo, os.mkdir):
        make(path)
        config = configured(tmp_path / "out", run={"max_steps": 2, "init_from": str(path)})
        with pytest.raises(CheckpointError, match=r"cannot be read as safetensors .*not a regular file"):
            train(LoneWorld(), TrainOptions(run_file=str(write_run_file(config))))
        path.rename(tmp_path / make.__name__)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_record_that_is_no_file_is_refused_without_waiting(
    tmp_path: Path, genuine: Path, make: Callable[[Path], None]
) -> None:
    directory = _rewritten(genuine, tmp_path, lambda *_: None)
    (directory / COMMIT_NAME).unlink()
    make(directory / COMMIT_NAME)
    with pytest.raises(CheckpointError, match="not a regular file"):
        _resume(directory, tmp_path / "out")
