"""The state of a stage at a cut as a tree of host arrays, and back.

Owns the names under which a stage's state is stored (per layer, not per rank, so that another plan can read it)
and which parts of it there are. Copies into buffers that are reused from cut to cut; never touches a disk.

    layers/<layer>/parameters/<p>, /optimizer/<state>/<p>, /buffers/<b>, /buffers_next/<b> (before F(k+1))
    stages/<s>/versions/<v>/<layer>/<p>         live versions older than the newest
    stages/<s>/predictions/<j>/<layer>/<p>      weights that F(j) of a minibatch in flight ran on
    stages/<s>/inflight/<j>/inputs/<i>, /buffers/<layer>/<b>
    stages/<s>/replicas/<q>/buffers/<layer>/<b> the own buffers of one of several replicas

What replicas of a stage hold alike is dealt out to them by layer, so that each array is written once: layers and
older versions. Buffers differ between replicas: those under `layers` are averages. Each replica writes what it has
in flight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.stage import Stage
from hpcpipe.schedule import Place, Role, cut_at

Array = npt.NDArray[Any]


def named_state(runner: StageRunner) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of everything that `runner` must store at the cut that its stage has just reached.

    All replicas of a stage call it at the same cut, because it averages their buffers.
    """
    weights, stage = runner.weights, runner.stage
    place, replicas = f"stages/{stage.index}", _replicas(runner)
    share = stage.names[runner.place.replica :: replicas]
    yield from _of_layers(stage, weights.layout.views(weights.master), "parameters", share)
    trained = {slot.name for slot in weights.layout.slots}
    fixed = {name: parameter for name, parameter in stage.named_parameters() if name not in trained}
    yield from _of_layers(stage, fixed, "parameters", share)
    for state, flat in weights.state.items():
        yield from _of_layers(stage, weights.layout.views(flat), f"optimizer/{state}", share)
    yield from _of_layers(stage, runner.averaged(runner.buffers), "buffers", share)
    yield from _of_layers(stage, runner.averaged(_buffers_next(runner)), "buffers_next", share)
    if replicas > 1:
        yield from _below(stage, own_buffers(runner.place), runner.buffers)
    for version, buffer in weights.versions.items():
        if version != weights.newest:
            views = weights.layout.views(buffer.flat)
            yield from _below(stage, f"{place}/versions/{version}", views, _share_of_version(runner, version))
    for (minibatch, _), flight in runner.in_flight.items():
        kept = weights.apart(Role.FORWARD, minibatch)
        if kept is not None:
            yield from _below(stage, f"{place}/predictions/{minibatch}", weights.layout.views(kept.flat))
        for i, tensor in enumerate(flight.forward.inputs):
            yield f"{place}/inflight/{minibatch}/inputs/{i}", tensor
        yield from _below(stage, f"{place}/inflight/{minibatch}/buffers", flight.buffers_before or {})


def own_buffers(place: Place) -> str:
    """The folder of a replica's own buffers."""
    return f"stages/{place.stage}/replicas/{place.replica}/buffers"


def _replicas(runner: StageRunner) -> int:
    return runner.program.schedule.replicas_of(runner.stage.index)


def _share_of_version(runner: StageRunner, version: int) -> Collection[str]:
    """The layers of an older version that this replica writes."""
    schedule, (stage, replica), replicas = runner.program.schedule, runner.place, _replicas(runner)
    cut = runner.weights.newest - 1
    # A replica without a minibatch in a short last round lets go of a version that others still read.
    holders = [q for q in range(replicas) if replicas == 1 or version in cut_at(schedule, stage, cut, q).versions]
    return runner.stage.names[holders.index(replica) :: len(holders)]


def _buffers_next(runner: StageRunner) -> Mapping[str, Tensor]:
    """The buffers without what the minibatches in flight did to them: another plan runs those forwards again."""
    oldest = min(runner.in_flight, default=None)
    before = None if oldest is None else runner.in_flight[oldest].buffers_before
    return runner.buffers if before is None else before


def meta_name(place: Place) -> str:
    """What the meta of a stage's replica is kept under; apart for each, as one file may hold several."""
    return f"{place.stage}.{place.replica}" if place.replica else str(place.stage)


def stage_meta(runner: StageRunner) -> dict[str, Any]:
    """What the tree cannot say: whose it is, updates, versions, what is in flight, which inputs want gradients."""
    return {
        "layers": list(runner.stage.names),
        "replica": runner.place.replica,
        "replicas": _replicas(runner),
        "updates": runner.weights.updates,
        "versions": sorted(runner.weights.versions),
        "in_flight": {
            str(minibatch): [tensor.requires_grad for tensor in flight.forward.inputs]
            for (minibatch, _), flight in runner.in_flight.items()
        },
    }


def _of_layers(
    stage: Stage, tensors: Mapping[str, Tensor], part: str, layers: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        layer, own = stage.split_name(name)
        if layer in layers:
            yield f"layers/{layer}/{part}/{own}", tensor


def _below(
    stage: Stage, folder: str, tensors: Mapping[str, Tensor], layers: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        layer, own = stage.split_name(name)
        if layers is None or layer in layers:
            yield f"{folder}/{layer}/{own}", tensor


class HostCopies:
    """Host copies of named tensors, in memory that is reused from one cut to the next."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.bf16: set[str] = set()
        self._memory: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._taken: Counter[tuple[torch.Size, torch.dtype]] = Counter()

    def clear(self) -> None:
        """Forget what was copied, but not the memory."""
        self.arrays = {}
        self.bf16 = set()
        self._taken.clear()

    def copy(self, path: str, tensor: Tensor) -> None:
        """Copy `tensor` to the host under `path`; bfloat16 is kept as its 16 bits."""
        kind = (tensor.shape, tensor.dtype)
        memory = self._memory[kind]
        if self._taken[kind] == len(memory):
            memory.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        kept = memory[self._taken[kind]]
        self._taken[kind] += 1
        kept.copy_(tensor.detach())
        if tensor.dtype is torch.bfloat16:
            self.bf16.add(path)
            kept = kept.view(torch.uint16)
        self.arrays[path] = kept.numpy()


def to_tensor(array: Array, bf16: bool) -> Tensor:
    """A stored array as a tensor, bfloat16 restored from its 16 bits."""
    tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    return tensor.view(torch.bfloat16) if bf16 else tensor
