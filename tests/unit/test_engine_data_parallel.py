"""A single stage with several replicas as the engine runs it: rounds, losses, clipping and evaluations.

Each replica is a thread, so the nets draw no random numbers. The serial replay is what they are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcpipe.config import RunConfig
from hpcpipe.datasets.build import build_dataset
from hpcpipe.engine.assemble import build_runners, lay_out
from hpcpipe.engine.loop import Engine, NoCheckpoints
from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.steering import Steering
from hpcpipe.errors import NonFiniteError
from hpcpipe.observe.activity import Activity
from hpcpipe.schedule import Place, rank_actions
from tests.oracle.cases import case, laid_over
from tests.oracle.parts import parts_of
from tests.oracle.plain import train_plainly
from tests.oracle.replay import replay
from tests.oracle.runs import assert_close, assert_equal, configured
from tests.unit.engine_cases import CPU
from tests.unit.replica_cases import FakeGroup, together

MLP = {"name": "mlp", "hidden": (9, 8), "activation": "tanh"}
NUMBERED = {"name": "tests.oracle.data:build_numbered", "batch": 8}
SETS = {"model": MLP, "data": NUMBERED}


class Record:
    """What is told of a run, in order."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []

    def minibatch_done(self, minibatch: int, loss: float) -> None:
        self.losses.append((minibatch, loss))

    def evaluated(self, minibatch: int, figures: Mapping[str, float]) -> None:
        self.evaluations.append((minibatch, dict(figures)))


class Replica:
    """One replica when its run is over."""

    def __init__(self, config: RunConfig, replica: int, replicas: int) -> None:
        data = build_dataset(config.data, config.run.seed)
        specs, plan, self.schedule = lay_out(config, data, replicas)
        self.record = Record()
        self.steering = Steering(self.schedule, every=0)
        runners, _ = build_runners(
            config,
            plan=plan,
            specs=specs,
            places=[Place(0, replica)],
            schedule=self.schedule,
            data=data,
            steering=self.steering,
            device=CPU,
        )
        self.runner: StageRunner = runners[0]
        self._config = config

    def train(self, group: FakeGroup) -> Replica:
        def sum_over_ranks(value: float) -> float:
            return float(sum(row[0] for row in group.gather(torch.tensor([value]).double().numpy(), "the norm")))

        self.runner.join(group, 256)
        Engine(
            schedule=self.schedule,
            runners={0: self.runner},
            steering=self.steering,
            checkpoints=NoCheckpoints(),
            record=self.record,
            activity=Activity(rank=group.index, origin=0.0, trace=False),
            progress=lambda: None,
            clip_norm=self._config.optimizer.clip_norm,
            norm_squared=sum_over_ranks,
            stop_on_nonfinite=self._config.optimizer.on_nonfinite == "stop",
        ).run(rank_actions(self.schedule, [self.runner.place]))
        return self

    @property
    def weights(self) -> dict[str, Tensor]:
        views = self.runner.weights.layout.views(self.runner.weights.master)
        return {self.runner.stage.public_name(name): view for name, view in views.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {self.runner.stage.public_name(name): buffer for name, buffer in self.runner.buffers.items()}


def config_of(replicas: int, *parts: Any, steps: int = 7) -> RunConfig:
    sections = laid_over(SETS, *parts, {"pipeline": {"replicas": (replicas,)}})
    return configured(**case("stash", None, sections, steps=steps))


def train(config: RunConfig, replicas: int) -> list[Replica]:
    built = [Replica(config, index, replicas) for index in range(replicas)]
    return together(replicas, lambda group: built[group.index].train(group))


@pytest.mark.parametrize("steps", [1, 6, 7])
@pytest.mark.parametrize(
    "optimizer", [{"name": "sgd", "lr": 0.05, "momentum": 0.9}, {"name": "adamw", "lr": 0.01}]
)
def test_two_replicas_train_on_the_mean_gradients_of_their_rounds(optimizer: dict[str, Any], steps: int) -> None:
    """The last round may be short, and one replica has no minibatch in it."""
    config = config_of(
        2, {"optimizer": optimizer, "lr_schedule": {"name": "linear", "end_factor": 0.2}}, steps=steps
    )

    found = train(config, 2)

    expected = replay(config, (2,))
    for replica in found:
        assert_equal(replica.weights, expected.weights)
        assert replica.runner.weights.updates == math.ceil(steps / 2)
        assert replica.runner.weights.newest == steps
    assert found[0].record.losses == list(enumerate(expected.losses))


def test_the_first_replica_alone_tells_the_losses_of_all_minibatches_in_order() -> None:
    found = train(config_of(3), 3)

    assert [minibatch for minibatch, _ in found[0].record.losses] == list(range(7))
    assert found[1].record.losses == found[2].record.losses == []


@pytest.mark.parametrize("poisoned", [3, 4, 6])
def test_a_loss_that_is_not_a_number_ends_the_run_by_name_whichever_replica_has_it(poisoned: int) -> None:
    config = config_of(3, {"data": {**NUMBERED, "poisoned": poisoned}})

    with pytest.raises(NonFiniteError, match=f"the loss of minibatch {poisoned} is nan"):
        train(config, 3)


def test_clipping_takes_the_norm_of_the_mean_gradient() -> None:
    config = config_of(2, {"optimizer": {"clip_norm": 0.05}})

    found = train(config, 2)

    assert_close(found[1].weights, replay(config, (2,)).weights, rtol=1e-5, atol=1e-7)
    assert_equal(found[0].weights, found[1].weights)


@pytest.mark.parametrize(("replicas", "microbatches"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_replicas_that_share_the_microbatches_of_a_minibatch_are_plain_sgd(
    schedule: str, replicas: int, microbatches: int
) -> None:
    """Also with the global norm, which counts each stage once, and with a replica that has no microbatch."""
    pipeline = {"schedule": schedule, "microbatches": microbatches}
    config = config_of(replicas, {"pipeline": pipeline, "optimizer": {"clip_norm": 0.3}})

    found = train(config, replicas)

    expected = train_plainly(config)
    for replica in found:
        assert_close(replica.weights, expected.weights, rtol=2e-5, atol=2e-6)
    assert [loss for _, loss in found[0].record.losses] == pytest.approx(expected.losses, rel=1e-5)


NORMALISED = {"model": {**MLP, "batchnorm": True}, "eval": {"every": 4, "at_end": True}}


@pytest.mark.parametrize("replicas", [2, 3])
def test_evaluations_use_the_mean_of_the_replicas_buffers_on_all_batches(replicas: int) -> None:
    """With three replicas, one of them has no batch to evaluate."""
    config = config_of(replicas, NORMALISED)

    found = train(config, replicas)

    net = parts_of(config, 1).slices[0]
    for name, parameter in net.parameters().items():
        parameter.data.copy_(found[0].weights[name])
    for name, buffer in net.buffers().items():
        all_of_it = torch.stack([replica.buffers[name].double() for replica in found])
        buffer.copy_(all_of_it.mean(0) if buffer.is_floating_point() else all_of_it[0])
    whole, data = nn.Sequential(*net.layers).eval(), build_dataset(config.data, config.run.seed)
    with torch.no_grad():
        scores = torch.cat([whole(*data.eval_inputs(i)) for i in range(data.eval_batches)])
    targets = torch.cat([data.eval_targets(i) for i in range(data.eval_batches)])
    minibatch, figures = found[0].record.evaluations[-1]
    assert minibatch == 6
    assert figures["loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, targets)), rel=1e-5)
    assert figures["accuracy"] == float((scores.argmax(-1) == targets).double().mean())


def test_an_evaluation_is_told_once_and_leaves_training_and_buffers_as_they_are() -> None:
    found = train(config_of(2, NORMALISED), 2)
    without = train(config_of(2, {"model": NORMALISED["model"]}), 2)

    assert [minibatch for minibatch, _ in found[0].record.evaluations] == [3, 6]
    assert found[1].record.evaluations == []
    for one, other in zip(found, without, strict=True):
        assert_equal(one.weights, other.weights)
        assert_equal(one.buffers, other.buffers)
    means = [name for name in found[0].buffers if name.endswith("running_mean")]
    assert any(not torch.equal(found[0].buffers[name], found[1].buffers[name]) for name in means)
