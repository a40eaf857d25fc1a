"""The flushing schedules on several stages of one process are plain SGD with accumulated gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpipe.engine.passes import Passes
from hpcpipe.engine.weights import WeightStore
from tests.oracle.cases import IMAGES, NETS, OPTIMIZERS, laid_over
from tests.oracle.plain import train_plainly
from tests.oracle.runs import Outcome, assert_close, configured, run_alone

ROUNDING = {"rtol": 2e-5, "atol": 2e-6}
"""A few float32 roundings a step over some ten steps."""


def assert_close_to_plain(directory: Path, sections: dict[str, dict[str, Any]]) -> Outcome:
    config = configured(directory / "run", **sections)
    found, expected = run_alone(config), train_plainly(config)
    assert_close(found.weights, expected.weights, **ROUNDING)
    assert_close(found.buffers, expected.buffers, **ROUNDING)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    return found


@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_microbatches_accumulate_as_in_plain_torch(
    tmp_path: Path, schedule: str, stages: int, microbatches: int
) -> None:
    pipeline = {"schedule": schedule, "stages": stages, "microbatches": microbatches}
    assert_close_to_plain(tmp_path, laid_over({"run": {"max_steps": 12}}, NETS["mlp"], {"pipeline": pipeline}))


@pytest.mark.parametrize(
    "net", ["batchnorm and dropout", "gpt", "several tensors", "in place", "parameters without gradient"]
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_kind_of_net_accumulates_as_in_plain_torch(tmp_path: Path, schedule: str, net: str) -> None:
    pipeline = {"schedule": schedule, "stages": 3, "microbatches": 2}
    sections = laid_over(
        {"run": {"max_steps": 8}}, NETS[net], {"pipeline": pipeline, "optimizer": OPTIMIZERS["sgd"]}
    )
    assert_close_to_plain(tmp_path, sections)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_microbatches_of_unequal_size_count_by_their_rows(tmp_path: Path, schedule: str) -> None:
    pipeline = {"schedule": schedule, "stages": 3, "microbatches": 3}
    data = {**IMAGES, "batch": 8}
    sections = laid_over(
        {"run": {"max_steps": 6}}, NETS["batchnorm and dropout"], {"data": data, "pipeline": pipeline}
    )
    assert_close_to_plain(tmp_path, sections)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_running_statistics_move_once_per_microbatch(tmp_path: Path, schedule: str) -> None:
    pipeline = {"schedule": schedule, "stages": 2, "microbatches": 4}
    sections = laid_over({"run": {"max_steps": 5}}, NETS["batchnorm and dropout"], {"pipeline": pipeline})
    outcome = run_alone(configured(tmp_path / "run", **sections))
    tracked = [int(b) for name, b in outcome.buffers.items() if name.endswith("num_batches_tracked")]
    assert tracked == [20] * 4


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_clipping_takes_the_norm_of_all_stages(tmp_path: Path, schedule: str, stages: int) -> None:
    pipeline = {"schedule": schedule, "stages": stages, "microbatches": 2}
    optimizer = {**OPTIMIZERS["sgd"], "clip_norm": 0.05}
    sections = laid_over({"run": {"max_steps": 10}}, NETS["mlp"], {"pipeline": pipeline, "optimizer": optimizer})
    clipped = assert_close_to_plain(tmp_path, sections)
    # The limit is felt: without it the run goes elsewhere.
    free = run_alone(configured(tmp_path / "free", **laid_over(sections, {"optimizer": OPTIMIZERS["sgd"]})))
    assert not math.isclose(clipped.losses[-1], free.losses[-1], rel_tol=1e-4)


def test_bfloat16_gradients_of_microbatches_are_summed_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[list[Tensor]] = []
    sums: list[list[Tensor]] = []
    backward, update = Passes.backward, WeightStore.update

    def noting_parts(passes: Passes, *given: Any) -> Any:
        found = backward(passes, *given)
        parts.append([gradient.float() for gradient in found[1] if gradient is not None])
        return found

    def noting_sums(store: WeightStore, minibatch: int, gradients: list[Tensor], *given: Any, **more: Any) -> None:
        sums.append([gradient.clone() for gradient in gradients])
        update(store, minibatch, gradients, *given, **more)

    monkeypatch.setattr(Passes, "backward", noting_parts)
    monkeypatch.setattr(WeightStore, "update", noting_sums)
    pipeline = {"schedule": "gpipe", "stages": 1, "microbatches": 4}
    sections = laid_over({"run": {"max_steps": 1, "dtype": "bfloat16"}}, NETS["mlp"], {"pipeline": pipeline})
    run_alone(configured(tmp_path / "run", **sections))

    assert len(parts) == 4
    for total, *each in zip(sums[0], *parts, strict=True):
        assert torch.equal(total, each[0] + each[1] + each[2] + each[3])
        assert not torch.equal(total, total.bfloat16().float())


def test_evaluation_and_epochs_leave_a_synchronous_run_as_it_is(tmp_path: Path) -> None:
    pipeline = {"schedule": "1f1b", "stages": 3, "microbatches": 2}
    sections = laid_over(
        {"run": {"epochs": 2}, "eval": {"every": 4, "at_end": True}},
        NETS["mlp"],
        {"data": {**NETS["mlp"]["data"], "rows": 44}, "pipeline": pipeline},
    )
    assert_close_to_plain(tmp_path, sections)
