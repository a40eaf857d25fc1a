"""What several replicas of a stage store at a cut, who of them stores it, and how each finds it again.

Replicas are brought to a cut by hand, without messages: a forward or two, then an update from made-up gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpipe.checkpoint.layout import new_set_directory
from hpcpipe.checkpoint.record import commit
from hpcpipe.checkpoint.sets import CheckpointSet, open_set
from hpcpipe.checkpoint.writer import write_rank_file
from hpcpipe.config import RunConfig
from hpcpipe.datasets.build import build_dataset
from hpcpipe.engine import restore
from hpcpipe.engine.assemble import build_runners, lay_out
from hpcpipe.engine.plan import Plan
from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.snapshot import HostCopies, meta_name, named_state, stage_meta
from hpcpipe.engine.steering import Steering
from hpcpipe.schedule import Action, Op, Place, Schedule
from tests.oracle.runs import configured

NET = {"name": "mlp", "hidden": (7, 6, 5), "batchnorm": True}
BALANCE = {1: (4,), 2: (2, 2)}
EVERY = 8
MEAN = 0.25
"""What averaged buffers hold here, so that they can be told from a replica's own."""


class Job:
    """The runners of a replicated run, none of which is joined to another."""

    def __init__(self, *replicas: int, steps: int = 40, every: int = EVERY, **pipeline: Any) -> None:
        self.config: RunConfig = configured(
            run={"max_steps": steps},
            model=NET,
            pipeline={"policy": "stash", "replicas": replicas, "balance": BALANCE[len(replicas)], **pipeline},
        )
        data = build_dataset(self.config.data, self.config.run.seed)
        self.plan: Plan
        self.schedule: Schedule
        specs, self.plan, self.schedule = lay_out(self.config, data, sum(replicas))
        self.runners: dict[Place, StageRunner] = {}
        for place in self.schedule.places:
            made, _ = build_runners(
                self.config,
                plan=self.plan,
                specs=specs,
                places=[place],
                schedule=self.schedule,
                data=data,
                steering=Steering(self.schedule, every=every),
                device=torch.device("cpu"),
            )
            runner = self.runners[place] = made[place.stage]
            if replicas[place.stage] > 1:
                runner.averaged = averaged  # type: ignore[method-assign]

    def stage(self, stage: int) -> list[StageRunner]:
        return [runner for place, runner in self.runners.items() if place.stage == stage]

    def bring_to_cut(
        self, place: Place, before: int, updates: int, flights: Sequence[int], minibatch: int
    ) -> None:
        """From version `before`, made by so many updates: F of `flights`, then the update U(`minibatch`)."""
        runner = self.runners[place]
        generator = torch.Generator().manual_seed(place.stage)
        layout = runner.weights.layout
        runner.weights.start_from(
            before,
            {slot.name: torch.randn(slot.shape, generator=generator) for slot in layout.slots},
            updates=updates,
        )
        runner.next_update = before
        for j in flights:
            runner.forward(
                Action(op=Op.FORWARD, stage=place.stage, replica=place.replica, minibatch=j, version=before)
            )
        gradients = [torch.randn(slot.shape, generator=generator) for slot in layout.slots]
        runner.weights.update(minibatch, gradients, ())
        runner.next_update = minibatch + 1
        if not flights:
            runner.weights.release([before])

    def write(self, root: Path, step: int, ranks: Sequence[Sequence[int]] | None = None) -> CheckpointSet:
        """A committed set of all runners; `ranks` says which rank each replica is on."""
        ranks_of_stage = self.plan.ranks_of_stage if ranks is None else ranks
        directory = new_set_directory(root, step)
        reports = []
        for place, runner in self.runners.items():
            copies = HostCopies()
            for path, tensor in named_state(runner):
                copies.copy(path, tensor)
            meta = {"step": step, "stages": {meta_name(place): stage_meta(runner)}}
            rank = ranks_of_stage[place.stage][place.replica]
            reports.append(write_rank_file(directory, rank, copies.arrays, meta, copies.bf16))
        meta = {
            "fingerprint": self.plan.fingerprint,
            "first": 0,
            "identity": restore.identity(self.plan, self.schedule, self.config),
            "ranks": ranks_of_stage,
        }
        commit(directory, reports, meta)
        return open_set(directory)


def averaged(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(t, MEAN) if t.is_floating_point() else t.clone() for name, t in buffers.items()}


def two_and_one() -> Job:
    """2-1 behind U(7): each replica of stage 0 has a minibatch in flight on version 6, the newest is 8."""
    job = Job(2, 1)
    job.bring_to_cut(Place(0, 0), 6, 3, [8], 7)
    job.bring_to_cut(Place(0, 1), 6, 3, [9], 7)
    job.bring_to_cut(Place(1), 7, 7, [], 7)
    return job


def paths_of(runner: StageRunner) -> set[str]:
    found = [path for path, _ in named_state(runner)]
    assert len(set(found)) == len(found)
    return set(found)


def test_layers_and_older_versions_are_dealt_out_over_the_replicas() -> None:
    first, second = two_and_one().stage(0)

    mine, others = (
        {path for path in paths_of(runner) if path.startswith(("layers/", "stages/0/versions/"))}
        for runner in (first, second)
    )

    assert {path.split("/")[1] for path in mine if path.startswith("layers/")} == {"hidden1"}
    assert {path.split("/")[1] for path in others if path.startswith("layers/")} == {"hidden2"}
    assert {tuple(path.split("/")[3:5]) for path in mine if "versions" in path} == {("6", "hidden1")}
    assert {tuple(path.split("/")[3:5]) for path in others if "versions" in path} == {("6", "hidden2")}


def test_every_array_of_a_replicated_stage_is_written_once() -> None:
    alone = Job(1, 1)
    alone.bring_to_cut(Place(0), 6, 3, [8], 7)
    (whole,) = alone.stage(0)
    first, second = (
        {path for path in paths_of(runner) if path.startswith(("layers/", "stages/0/versions/"))}
        for runner in two_and_one().stage(0)
    )

    assert first.isdisjoint(second)
    assert first | second == {
        path for path in paths_of(whole) if path.startswith(("layers/", "stages/0/versions/"))
    }


def test_each_replica_writes_what_it_has_in_flight_and_its_own_buffers() -> None:
    for replica, runner in enumerate(two_and_one().stage(0)):
        own = [path.split("/") for path in paths_of(runner) if path.startswith("stages/")]

        assert {parts[3] for parts in own if parts[2] == "inflight"} == {str(8 + replica)}
        assert {tuple(parts[3:5]) for parts in own if parts[2] == "replicas"} == {(str(replica), "buffers")}


def test_the_buffers_of_layers_are_averages_and_those_of_replicas_their_own() -> None:
    runner = two_and_one().stage(0)[1]
    stored = {path: tensor for path, tensor in named_state(runner) if path.endswith("running_mean")}

    for part in ("buffers", "buffers_next"):
        assert set(stored[f"layers/hidden2/{part}/norm.running_mean"].tolist()) == {MEAN}
    mean = next(tensor for name, tensor in runner.buffers.items() if name.endswith("running_mean"))
    assert torch.equal(stored["stages/0/replicas/1/buffers/hidden1/norm.running_mean"], mean)


def test_a_version_that_one_replica_alone_still_reads_is_written_by_it_whole() -> None:
    # 3-1, 10 minibatches: only minibatch 9, of the first replica, is in flight behind U(8), on version 6.
    job = Job(3, 1, steps=10, every=9)
    job.bring_to_cut(Place(0, 0), 6, 2, [9], 8)
    for replica in (1, 2):
        job.bring_to_cut(Place(0, replica), 6, 2, [], 8)

    layers = [
        {path.split("/")[4] for path in paths_of(runner) if "/versions/6/" in path} for runner in job.stage(0)
    ]

    assert layers == [{"hidden1", "hidden2"}, set(), set()]


def test_the_meta_counts_updates_and_names_replica_and_minibatches_in_flight() -> None:
    described = [stage_meta(runner) for runner in two_and_one().runners.values()]

    assert [(d["replica"], d["replicas"], d["updates"]) for d in described] == [(0, 2, 4), (1, 2, 4), (0, 1, 8)]
    assert [list(d["in_flight"]) for d in described] == [["8"], ["9"], []]
    assert [d["versions"] for d in described] == [[6, 8], [6, 8], [8]]


@pytest.mark.parametrize("ranks", [((0, 1), (2,)), ((2, 0), (1,))])
def test_every_replica_comes_back_to_its_state_from_whatever_ranks_files(
    tmp_path: Path, ranks: Sequence[Sequence[int]]
) -> None:
    job = two_and_one()
    found = job.write(tmp_path, 8, ranks)
    again = Job(2, 1)

    for place, runner in again.runners.items():
        sends = restore.restore_exactly(runner, found, again.schedule)

        before = job.runners[place]
        assert runner.weights.updates == before.weights.updates
        assert runner.weights.versions.keys() == before.weights.versions.keys()
        for version, buffer in before.weights.versions.items():
            assert torch.equal(runner.weights.versions[version].flat, buffer.flat)
        for name, state in before.weights.state.items():
            assert torch.equal(runner.weights.state[name], state)
        for name, tensor in before.buffers.items():
            assert torch.equal(runner.buffers[name], tensor)
        for key, flight in before.in_flight.items():
            for ours, theirs in zip(runner.in_flight[key].forward.outputs, flight.forward.outputs, strict=True):
                assert torch.equal(ours, theirs)
        # Stage 1 has consumed nothing behind its own cut.
        assert [(send.op, send.minibatch, send.replica, send.peer_replica) for send in sends] == [
            (Op.SEND_ACTIVATION, minibatch, place.replica, 0) for minibatch, _ in before.in_flight
        ]


def test_a_replica_reads_nothing_that_only_others_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = two_and_one().write(tmp_path, 8)
    read: list[str] = []
    original = CheckpointSet.read_paths

    def noting(checkpoint: CheckpointSet, *given: Any) -> Any:
        part = original(checkpoint, *given)
        read.extend(part.tree)
        return part

    monkeypatch.setattr(CheckpointSet, "read_paths", noting)
    again = Job(2, 1)
    restore.restore_exactly(again.runners[Place(0, 1)], found, again.schedule)

    layers = {path.split("/")[1] for path in read if path.startswith("layers/")}
    own = {tuple(path.split("/")[2:4]) for path in read if path.startswith("stages/")}
    assert layers == {"hidden1", "hidden2"}
    assert own == {("versions", "6"), ("inflight", "9"), ("replicas", "1")}
    assert not any("/buffers_next/" in path for path in read)


def test_another_plan_goes_on_with_the_averages_and_the_smallest_count_of_updates(tmp_path: Path) -> None:
    job = two_and_one()
    found = job.write(tmp_path, 8)
    whole = Job(1)
    (runner,) = whole.stage(0)

    restore.restore_weights(runner, found)

    assert (runner.weights.newest, runner.weights.updates, runner.next_update) == (8, 4, 8)
    means = {
        runner.stage.split_name(name)[0]: set(t.tolist())
        for name, t in runner.buffers.items()
        if name.endswith("running_mean")
    }
    # Stage 1 has run no forward, so its buffers are as they were made.
    assert means == {"hidden1": {MEAN}, "hidden2": {MEAN}, "hidden3": {0.0}}
    views = {
        runner.stage.public_name(name): view
        for name, view in runner.weights.layout.views(runner.weights.master).items()
    }
    for stage in (0, 1):
        before = job.stage(stage)[0]
        for name, view in before.weights.layout.views(before.weights.master).items():
            assert torch.equal(views[before.stage.public_name(name)], view)


def decided(job: Job, found: CheckpointSet) -> tuple[str, ...]:
    return restore.decide(found, job.plan, job.schedule, job.config).differs


def test_the_same_replicas_continue_to_the_bit_and_others_do_not(tmp_path: Path) -> None:
    found = two_and_one().write(tmp_path, 8)

    assert decided(Job(2, 1), found) == ()
    assert decided(Job(1, 2), found) == ("replicas",)
    assert decided(Job(1, 1), found) == ("replicas",)


def test_the_size_of_buckets_matters_where_more_than_two_gradients_are_added() -> None:
    subjects = []
    for replicas in ((2, 1), (3, 1)):
        job = Job(*replicas)
        other = job.config.model_copy(
            update={"transport": job.config.transport.model_copy(update={"bucket_bytes": 99})}
        )
        now, then = (restore.identity(job.plan, job.schedule, config) for config in (job.config, other))
        subjects.append([subject for subject in now if now[subject] != then[subject]])

    assert subjects == [[], ["all-reduce buckets"]]


def test_the_short_last_round_of_a_run_is_no_cut_of_a_longer_one(tmp_path: Path) -> None:
    job = Job(2, 1, steps=9)
    for place, updates in ((Place(0, 0), 4), (Place(0, 1), 4), (Place(1), 8)):
        job.bring_to_cut(place, 8, updates, [], 8)
    found = job.write(tmp_path, 9)

    assert decided(job, found) == ()
    assert decided(Job(2, 1, steps=19), found) == ("the end of the run",)
