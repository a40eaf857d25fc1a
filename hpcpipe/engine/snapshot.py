"""The state of a stage at a cut as a tree of host arrays, and back.

Owns the names under which a stage's state is stored (per layer, not per rank, so that another plan can read it)
and which parts of it there are. Copies into buffers that are reused from cut to cut; never touches a disk.

    layers/<layer>/parameters/<p>, /optimizer/<state>/<p>, /buffers/<b>, /buffers_next/<b> (before F(k+1))
    stages/<s>/versions/<v>/<layer>/<p>         live versions older than the newest
    stages/<s>/predictions/<j>/<layer>/<p>      weights that F(j) of a minibatch in flight ran on
    stages/<s>/inflight/<j>/inputs/<i>, /buffers/<layer>/<b>
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpcpipe.engine.runner import StageRunner
from hpcpipe.schedule import Role

Array = npt.NDArray[Any]


def named_state(runner: StageRunner) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of everything that `runner`'s stage must store at the cut it has just reached."""
    weights, stage = runner.weights, runner.stage
    place = f"stages/{stage.index}"
    for name, tensor in _of_layers(runner, weights.layout.views(weights.master), "parameters"):
        yield name, tensor
    trained = {slot.name for slot in weights.layout.slots}
    for name, parameter in stage.named_parameters():
        if name not in trained:
            layer, own = stage.split_name(name)
            yield f"layers/{layer}/parameters/{own}", parameter
    for state, flat in weights.state.items():
        yield from _of_layers(runner, weights.layout.views(flat), f"optimizer/{state}")
    yield from _of_layers(runner, runner.buffers, "buffers")
    coming = runner.in_flight.get((weights.newest, 0))
    before = None if coming is None else coming.buffers_before
    yield from _of_layers(runner, runner.buffers if before is None else before, "buffers_next")
    for version, buffer in weights.versions.items():
        if version != weights.newest:
            yield from _below(runner, f"{place}/versions/{version}", weights.layout.views(buffer.flat))
    for (minibatch, _), flight in runner.in_flight.items():
        kept = weights.apart(Role.FORWARD, minibatch)
        if kept is not None:
            yield from _below(runner, f"{place}/predictions/{minibatch}", weights.layout.views(kept.flat))
        for i, tensor in enumerate(flight.forward.inputs):
            yield f"{place}/inflight/{minibatch}/inputs/{i}", tensor
        yield from _below(runner, f"{place}/inflight/{minibatch}/buffers", flight.buffers_before or {})


def stage_meta(runner: StageRunner) -> dict[str, Any]:
    """What the tree cannot say: layers, versions and minibatches in flight, and which inputs want gradients."""
    return {
        "layers": list(runner.stage.names),
        "versions": sorted(runner.weights.versions),
        "in_flight": {
            str(minibatch): [tensor.requires_grad for tensor in flight.forward.inputs]
            for (minibatch, _), flight in runner.in_flight.items()
        },
    }


def _of_layers(runner: StageRunner, tensors: Mapping[str, Tensor], part: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        layer, own = runner.stage.split_name(name)
        yield f"layers/{layer}/{part}/{own}", tensor


def _below(runner: StageRunner, folder: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        layer, own = runner.stage.split_name(name)
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
