"""A checkpoint moves between CPU and GPU: state lies on the host, whatever computed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpipe.checkpoint.sets import open_set
from hpcpipe.config import RunConfig
from hpcpipe.engine.train import TrainOptions, train
from tests.oracle.lone_world import LoneWorld
from tests.oracle.moving import CUT, SPECTRAIN, STEPS, cut_of, moving
from tests.oracle.runs import Outcome, assert_close, outcome_of, write_run_file


def _run(config: RunConfig, resume: Path | None = None) -> Outcome:
    options = TrainOptions(run_file=str(write_run_file(config)), resume=None if resume is None else str(resume))
    assert train(LoneWorld(), options) == 0
    return outcome_of(Path(config.run.out))


@pytest.mark.parametrize("policy", ["stash", "spectrain"])
def test_a_run_moves_from_the_cpu_to_a_gpu_and_back(tmp_path: Path, policy: str) -> None:
    # Dropout is drawn by the device's own generator.
    net = {"name": "mlp", "hidden": (12, 11, 10, 9), "activation": "tanh", "batchnorm": True}
    pipeline = {**SPECTRAIN, "policy": policy}
    out = {name: tmp_path / name for name in ("cpu", "cuda", "back")}

    unbroken = _run(moving(out["cpu"], pipeline, model=net))
    there = _run(moving(out["cuda"], pipeline, model=net, run={"device": "cuda"}), cut_of(out["cpu"]))
    back = _run(moving(out["back"], pipeline, model=net), cut_of(out["cuda"], 2 * CUT))

    assert there.losses == pytest.approx(unbroken.losses[CUT:], rel=1e-4)
    assert back.losses == pytest.approx(unbroken.losses[2 * CUT :], rel=1e-4)
    assert_close(back.weights, unbroken.weights, rtol=1e-3, atol=1e-5)
    # The same arrays in the same place, so that neither can tell who wrote them.
    for step in (2 * CUT, STEPS):
        indexes = [open_set(cut_of(out[name], step)).index(0) for name in ("cpu", "cuda")]
        kinds = [{path: (e.dtype, e.shape, e.offset) for path, e in index.entries.items()} for index in indexes]
        assert kinds[0] == kinds[1]
