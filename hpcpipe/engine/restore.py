"""Starts a run from a checkpoint: to the bit on the same pipeline, equivalently on any other.

On the same pipeline each replica of a stage gets back every live version and re-runs, on the weights they ran on,
the forwards that it had in flight at the cut; what the next stage had not consumed is sent again. Parts are found
by stage and replica, so a replica may have moved to another rank. On another pipeline each stage takes weights and
optimizer state of its layers, and the pipeline is filled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hpcpipe.checkpoint.reader import Part
from hpcpipe.checkpoint.sets import CheckpointSet, choose, open_set
from hpcpipe.config import RunConfig
from hpcpipe.engine.assemble import learning_rate
from hpcpipe.engine.plan import Plan
from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.snapshot import own_buffers, to_tensor
from hpcpipe.errors import CheckpointError
from hpcpipe.schedule import Action, Op, Place, Schedule, cut_at

_Getter = Callable[[str, str], Tensor]
"""(layer, path within it) -> stored tensor."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Where a run goes on: the set, its step (minibatches applied), and what differs from the run that wrote it.

    `first` is the minibatch that filled the pipeline: the checkpoint's own if nothing differs, else `step`.
    """

    path: str
    step: int
    differs: tuple[str, ...]
    first: int

    @property
    def exact(self) -> bool:
        """Whether the run continues the old one to the bit."""
        return not self.differs


def identity(plan: Plan, schedule: Schedule, config: RunConfig) -> dict[str, Any]:
    """What must be the same for a continued run to equal the unbroken one to the bit, as JSON by subject."""
    sections = config.model_dump(mode="json", include={"model", "data", "loss", "optimizer"})
    return {
        "stages": [list(plan.layers_of(stage)) for stage in range(plan.stages)],
        "replicas": list(plan.replicas),
        "schedule": [schedule.name, schedule.microbatches, schedule.drain_every],
        "policy": [schedule.policy.value, schedule.target.value],
        "dtype": config.run.dtype,
        "seed": config.run.seed,
        "learning rate": repr(learning_rate(config, schedule.minibatches)),
        # MPI may add three gradients in another order in a bucket of another size; two have only one sum.
        "all-reduce buckets": config.transport.bucket_bytes if max(plan.replicas) > 2 else None,
        **sections,
    }


def decide(found: CheckpointSet, plan: Plan, schedule: Schedule, config: RunConfig) -> Resume:
    """How to go on from `found` with this plan. Raises CheckpointError for a set of another model."""
    meta = found.meta
    if meta.get("fingerprint") != plan.fingerprint:
        raise CheckpointError(
            f"{found.path} is of another model (its layers or their shapes differ): resume with the run file "
            "it was made with, or start another run with --out"
        )
    if found.step > schedule.minibatches:
        raise CheckpointError(
            f"{found.path} is at step {found.step}, but this run ends at {schedule.minibatches}: "
            "raise run.epochs or run.max_steps"
        )
    now = identity(plan, schedule, config)
    differs = [subject for subject in now if now[subject] != meta["identity"].get(subject)]
    if not differs and not _same_in_flight(found, replace(schedule, first=meta["first"])):
        differs = ["the end of the run"]
    return Resume(
        path=str(found.path),
        step=found.step,
        differs=tuple(differs),
        first=found.step if differs else meta["first"],
    )


def _same_in_flight(found: CheckpointSet, schedule: Schedule) -> bool:
    """Whether this schedule has a cut there, too, with the same minibatches in flight."""
    minibatch = found.step - 1
    if not schedule.is_boundary(minibatch):
        return False
    return all(
        [int(j) for j in _described(found, place)["in_flight"]]
        == list(cut_at(schedule, place.stage, minibatch, place.replica).in_flight)
        for place in schedule.places
    )


def _described(found: CheckpointSet, place: Place) -> dict[str, Any]:
    """What `stage_meta` said of one replica of a stage."""
    rank = found.meta["ranks"][place.stage][place.replica]
    described: dict[str, Any] = found.index(rank).meta["stages"][str(place.stage)]
    return described


def restore_exactly(runner: StageRunner, found: CheckpointSet, schedule: Schedule) -> list[Action]:
    """Bring `runner` to the state it had at the cut; returns the sends that are to be repeated."""
    weights, place = runner.weights, runner.place
    described = _described(found, place)
    part = _part_of_place(found, place, described)
    cut = cut_at(schedule, place.stage, found.step - 1, place.replica)
    _restore_layers(
        runner,
        found.step,
        lambda layer, path: _get(part, f"layers/{layer}/{path}", found),
        updates=described["updates"],
        buffers=None,
    )
    for version in cut.versions[:-1]:
        folder = f"stages/{place.stage}/versions/{version}"
        _fill(runner, weights.add_version(version).flat, part, folder, found)
    runner.next_update = found.step
    for j in cut.in_flight:
        _repeat_forward(runner, part, found, j, described["in_flight"][str(j)])
    if schedule.replicas_of(place.stage) > 1:
        _set_buffers(runner, lambda layer, own: _get(part, f"{own_buffers(place)}/{layer}/{own}", found))
    else:
        _set_buffers(runner, lambda layer, own: _get(part, f"layers/{layer}/buffers/{own}", found))
    return [
        Action(
            op=Op.SEND_ACTIVATION,
            stage=place.stage,
            replica=place.replica,
            minibatch=j,
            peer_replica=schedule.owner(place.stage + 1, j),
        )
        for j in cut.resend
    ]


def _part_of_place(found: CheckpointSet, place: Place, described: Mapping[str, Any]) -> Part:
    """What one replica of a stage needs of the files of all, over which layers and versions are dealt out."""
    layers, replica = set(described["layers"]), str(place.replica)

    def wanted(path: str) -> bool:
        top, name, kind, *rest = path.split("/")
        if top == "layers":
            return name in layers and kind != "buffers_next"
        if name != str(place.stage) or kind == "versions":
            return name == str(place.stage)
        return rest[0] == replica if kind == "replicas" else rest[0] in described["in_flight"]

    return found.read_paths(wanted, found.meta["ranks"][place.stage])


def _repeat_forward(
    runner: StageRunner, part: Part, found: CheckpointSet, minibatch: int, wants_grad: list[bool]
) -> None:
    """Run F(minibatch) again on the inputs, weights and buffers that it had, to have its graph back."""
    stage, replica = runner.place
    kept = f"stages/{stage}/predictions/{minibatch}"
    flight = f"stages/{stage}/inflight/{minibatch}"
    if any(path.startswith(kept + "/") for path in part.tree):
        _fill(runner, runner.weights.restore_forward_weights(minibatch).flat, part, kept, found)
    _set_buffers(runner, lambda layer, own: _get(part, f"{flight}/buffers/{layer}/{own}", found))
    inputs = tuple(
        _get(part, f"{flight}/inputs/{i}", found).to(runner.device).requires_grad_(wants)
        for i, wants in enumerate(wants_grad)
    )
    action = Action(
        op=Op.FORWARD,
        stage=stage,
        replica=replica,
        minibatch=minibatch,
        version=runner.program.forward_version(minibatch),
        distance=runner.program.forward_distance(minibatch),
    )
    runner.run_forward(action, inputs, None)


def restore_weights(runner: StageRunner, found: CheckpointSet) -> None:
    """Take over weights, buffers and optimizer state of the stage's layers, wherever they were trained."""
    layers = set(runner.stage.names)
    before = [stage for stage, held in enumerate(found.meta["identity"]["stages"]) if not layers.isdisjoint(held)]

    def wanted(path: str) -> bool:
        top, name, kind, *_ = path.split("/")
        return top == "layers" and name in layers and kind != "buffers"

    part = found.read_paths(wanted, [rank for stage in before for rank in found.meta["ranks"][stage]])
    _restore_layers(
        runner,
        found.step,
        lambda layer, path: _get(part, f"layers/{layer}/{path}", found),
        # Stages with more replicas have made fewer updates, and Adam corrects its young averages by one count for
        # all layers: too small a count makes the steps of some a little short, too large a one makes them long.
        updates=min(_described(found, Place(stage))["updates"] for stage in before),
        buffers="buffers_next",
    )
    runner.next_update = found.step


def start_from_weights(runners: Mapping[int, StageRunner], path: Path) -> None:
    """Begin at step 0 with the weights and buffers in `path`: a safetensors file, or a checkpoint of any kind.

    Raises CheckpointError when a tensor is missing there or has another shape.
    """
    if path.suffix == ".safetensors":
        get = _from_safetensors(path)
    else:
        found, _ = choose(path, deep=True)
        parts: dict[str, Part] = {}

        def get(layer: str, stored: str) -> Tensor:
            if layer not in parts:
                parts[layer] = found.read_layer(layer)
            return _get(parts[layer], stored, found)

    for runner in runners.values():
        _restore_layers(runner, 0, get, updates=0, buffers="buffers", optimizer=False)


def _from_safetensors(path: Path) -> _Getter:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error

    def get(layer: str, stored: str) -> Tensor:
        name = f"{layer}.{stored.partition('/')[2]}"
        if name not in tensors:
            raise CheckpointError(f"{path}: holds no tensor {name!r}; it is of another model")
        return tensors[name]

    return get


def _restore_layers(
    runner: StageRunner, version: int, get: _Getter, *, updates: int, buffers: str | None, optimizer: bool = True
) -> None:
    """Weights, optimizer state and, from the part of that name, buffers of the stage's layers."""
    stage, weights = runner.stage, runner.weights
    named: dict[str, Tensor] = {}
    expected = {slot.name: torch.Size(slot.shape) for slot in weights.layout.slots}
    for name, parameter in stage.named_parameters():
        expected.setdefault(name, parameter.shape)
    for name, parameter in stage.named_parameters():
        layer, own = stage.split_name(name)
        named[name] = _fitting(get(layer, f"parameters/{own}"), expected[name], stage.public_name(name))
        if not parameter.requires_grad:
            parameter.data.copy_(named[name])
    weights.start_from(version, {slot.name: named[slot.name] for slot in weights.layout.slots}, updates=updates)
    for state, flat in weights.state.items() if optimizer else ():
        for name, view in weights.layout.views(flat).items():
            layer, own = stage.split_name(name)
            view.copy_(get(layer, f"optimizer/{state}/{own}"))
    if buffers is not None:
        _set_buffers(runner, lambda layer, own: get(layer, f"{buffers}/{own}"))


def _set_buffers(runner: StageRunner, get: _Getter) -> None:
    for name, tensor in runner.buffers.items():
        # Graphs of forwards in flight hold on to buffers without needing their values (BatchNorm's running
        # statistics); writing past autograd, as a forward itself does, does not upset them.
        tensor.data.copy_(get(*runner.stage.split_name(name)))


def _fitting(tensor: Tensor, shape: torch.Size, name: str) -> Tensor:
    if tensor.shape != shape:
        raise CheckpointError(
            f"parameter {name!r} is stored with shape {list(tensor.shape)}, but the model has {list(shape)}; "
            "use the checkpoint of this model"
        )
    return tensor


def _fill(runner: StageRunner, flat: Tensor, part: Part, folder: str, found: CheckpointSet) -> None:
    for name, view in runner.weights.layout.views(flat).items():
        layer, own = runner.stage.split_name(name)
        view.copy_(_get(part, f"{folder}/{layer}/{own}", found))


def _get(part: Part, path: str, found: CheckpointSet) -> Tensor:
    array = part.tree.get(path)
    if array is None:
        raise CheckpointError(
            f"{found.path}: holds no {path!r}: it was written with another optimizer or another model; "
            "start from its weights alone with run.init_from"
        )
    return to_tensor(array, path in part.bf16)


def as_json(resume: Resume | None) -> dict[str, Any] | None:
    """For the broadcast from rank 0."""
    return None if resume is None else asdict(resume)


def open_resume(resume: Resume) -> CheckpointSet:
    """The set that rank 0 has chosen."""
    return open_set(Path(resume.path))
