"""Starts a run from a checkpoint: to the bit on the same pipeline, equivalently on any other.

On the same pipeline each replica of a stage gets back every live version and re-runs, on the weights they ran on,
the forwards that it had in flight at the cut; what the next stage had not consumed is sent again. Parts are found
by stage and replica, so a replica may have moved to another rank. On another pipeline each stage takes weights and
optimizer state of its layers, and the pipeline is filled anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from hpcpipe.engine.written import StageState, Written, read_state, read_written
from hpcpipe.errors import CheckpointError
from hpcpipe.schedule import Action, Op, Place, Schedule, cut_at
from hpcpipe.untrusted import one_line, open_plain

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
    if found.meta.get("fingerprint") != plan.fingerprint:
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
    written = read_written(found)
    differs = [subject for subject in now if now[subject] != written.identity.get(subject)]
    if not differs and not _same_in_flight(found, written, replace(schedule, first=written.first)):
        differs = ["the end of the run"]
    return Resume(
        path=str(found.path),
        step=found.step,
        differs=tuple(differs),
        first=found.step if differs else written.first,
    )


def _same_in_flight(found: CheckpointSet, written: Written, schedule: Schedule) -> bool:
    """Whether this schedule has a cut there, too, with the same minibatches in flight."""
    minibatch = found.step - 1
    if not schedule.is_boundary(minibatch):
        return False
    return all(
        tuple(read_state(found, written, place).in_flight)
        == cut_at(schedule, place.stage, minibatch, place.replica).in_flight
        for place in schedule.places
    )


def restore_exactly(runner: StageRunner, found: CheckpointSet, schedule: Schedule) -> list[Action]:
    """Bring `runner` to the state it had at the cut; returns the sends that are to be repeated."""
    weights, place = runner.weights, runner.place
    written = read_written(found)
    state = read_state(found, written, place)
    part = _part_of_place(found, written, place, state)
    cut = cut_at(schedule, place.stage, found.step - 1, place.replica)
    _restore_layers(
        runner,
        found.step,
        lambda layer, path: _get(part, f"layers/{layer}/{path}", found),
        updates=state.updates,
        buffers=None,
    )
    for version in cut.versions[:-1]:
        folder = f"stages/{place.stage}/versions/{version}"
        _fill(runner, weights.add_version(version).flat, part, folder, found)
    runner.next_update = found.step
    for j in cut.in_flight:
        _repeat_forward(runner, part, found, j, state.in_flight[j])
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


def _part_of_place(found: CheckpointSet, written: Written, place: Place, state: StageState) -> Part:
    """What one replica of a stage needs of the files of all, over which layers and versions are dealt out."""
    layers, replica, in_flight = set(state.layers), str(place.replica), set(map(str, state.in_flight))

    def wanted(path: str) -> bool:
        top, name, kind, number = (*path.split("/"), "", "", "")[:4]
        if top == "layers":
            return name in layers and kind != "buffers_next"
        if name != str(place.stage) or kind == "versions":
            return name == str(place.stage)
        return number == replica if kind == "replicas" else number in in_flight

    return found.read_paths(wanted, written.files[place.stage])


def _repeat_forward(
    runner: StageRunner, part: Part, found: CheckpointSet, minibatch: int, wants_grad: Sequence[bool]
) -> None:
    """Run F(minibatch) again on the inputs, weights and buffers that it had, to have its graph back."""
    stage, replica = runner.place
    kept = f"stages/{stage}/predictions/{minibatch}"
    flight = f"stages/{stage}/inflight/{minibatch}"
    if any(path.startswith(kept + "/") for path in part.tree):
        _fill(runner, runner.weights.restore_forward_weights(minibatch).flat, part, kept, found)
    _set_buffers(runner, lambda layer, own: _get(part, f"{flight}/buffers/{layer}/{own}", found))
    inputs = tuple(
        _wanting(_get(part, f"{flight}/inputs/{i}", found).to(runner.device), wants)
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
    try:
        runner.run_forward(action, inputs, None)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        # The same forward has been run before the cut, on what should be the same.
        shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in inputs)
        raise CheckpointError(
            f"{found.path}: stage {stage} cannot repeat the forward of minibatch {minibatch} on the inputs stored "
            f"for it ({one_line(shapes, 100)}): {one_line(error, 200)}"
        ) from error


def _wanting(tensor: Tensor, grad: bool) -> Tensor:
    # Of integers there is no gradient, and asking for one would be an error.
    return tensor.requires_grad_(grad and tensor.is_floating_point())


def restore_weights(runner: StageRunner, found: CheckpointSet) -> None:
    """Take over weights, buffers and optimizer state of the stage's layers, wherever they were trained."""
    layers = set(runner.stage.names)
    written = read_written(found)
    before = [stage for stage, held in enumerate(written.layers) if not layers.isdisjoint(held)]

    def wanted(path: str) -> bool:
        top, name, kind = (*path.split("/"), "", "")[:3]
        return top == "layers" and name in layers and kind != "buffers"

    part = found.read_paths(wanted, [file for stage in before for file in written.files[stage]])
    _restore_layers(
        runner,
        found.step,
        lambda layer, path: _get(part, f"layers/{layer}/{path}", found),
        # Stages with more replicas have made fewer updates, and Adam corrects its young averages by one count for
        # all layers: too small a count makes the steps of some a little short, too large a one makes them long.
        updates=min((read_state(found, written, Place(stage)).updates for stage in before), default=0),
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
        # Not what the library would wait for, or map into memory: a pipe, a device.
        os.close(open_plain(path))
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({one_line(error)})") from error

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
        what = f"parameter {stage.public_name(name)!r}"
        named[name] = _fitting(get(layer, f"parameters/{own}"), expected[name], parameter.dtype, what)
        if not parameter.requires_grad:
            parameter.data.copy_(named[name])
    weights.start_from(version, {slot.name: named[slot.name] for slot in weights.layout.slots}, updates=updates)
    for state, flat in weights.state.items() if optimizer else ():
        for name, view in weights.layout.views(flat).items():
            layer, own = stage.split_name(name)
            _copy(get(layer, f"optimizer/{state}/{own}"), view, f"{state} of {stage.public_name(name)!r}")
    if buffers is not None:
        _set_buffers(runner, lambda layer, own: get(layer, f"{buffers}/{own}"))


def _set_buffers(runner: StageRunner, get: _Getter) -> None:
    for name, tensor in runner.buffers.items():
        # Graphs of forwards in flight hold on to buffers without needing their values (BatchNorm's running
        # statistics); writing past autograd, as a forward itself does, does not upset them.
        _copy(get(*runner.stage.split_name(name)), tensor.data, f"buffer {runner.stage.public_name(name)!r}")


def _copy(stored: Tensor, to: Tensor, what: str) -> None:
    to.copy_(_fitting(stored, to.shape, to.dtype, what))


def _fitting(stored: Tensor, shape: torch.Size, dtype: torch.dtype, what: str) -> Tensor:
    """`stored`, which must have this shape, and this dtype unless both are floating-point numbers."""
    if stored.shape != shape:
        found, wanted = f"shape {list(stored.shape)}", f"{list(shape)}"
    elif stored.dtype != dtype and not (stored.dtype.is_floating_point and dtype.is_floating_point):
        found, wanted = str(stored.dtype), str(dtype)
    else:
        return stored
    raise CheckpointError(
        f"{what} is stored with {found}, but the model has {wanted}; use the checkpoint of this model"
    )


def _fill(runner: StageRunner, flat: Tensor, part: Part, folder: str, found: CheckpointSet) -> None:
    for name, view in runner.weights.layout.views(flat).items():
        layer, own = runner.stage.split_name(name)
        _copy(
            _get(part, f"{folder}/{layer}/{own}", found), view, f"{folder} of {runner.stage.public_name(name)!r}"
        )


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
