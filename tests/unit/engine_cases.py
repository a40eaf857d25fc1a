"""Stages, weight stores and passes put together by hand, and the explicit swap that they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hpcpipe.engine.horizon import Horizon
from hpcpipe.engine.passes import Passes
from hpcpipe.engine.stage import Stage
from hpcpipe.engine.weights import WeightBuffer, WeightStore
from hpcpipe.optim.flat import FlatLayout
from hpcpipe.optim.rules import SgdOptions, make_rule
from hpcpipe.optim.schedules import LearningRate

CPU = torch.device("cpu")


def stage_of(*layers: nn.Module, seed: int = 3) -> Stage:
    """A stage of layers named layer0, layer1, …"""
    torch.set_num_threads(1)
    return Stage(0, [f"layer{i}" for i in range(len(layers))], layers, seed=seed, device=CPU)


def store_of(stage: Stage, *, momentum: float = 0.9, lr: float = 0.1, target: str = "local") -> WeightStore:
    """A weight store that holds the stage's own weights as version 0."""
    trained = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
    layout = FlatLayout([(name, tuple(p.shape), 0) for name, p in trained])
    rule, _ = make_rule([SgdOptions(momentum=momentum)], layout, backend="torch", keep_velocity=True)
    store = WeightStore(
        layout,
        rule=rule,
        horizon=Horizon(
            LearningRate(base=lr), target=target, momentum=momentum, updates_from=lambda v, d: range(v, v + d)
        ),
        device=CPU,
        dtype=torch.float32,
    )
    store.start_from(0, {name: p.detach() for name, p in trained}, updates=0)
    return store


def other_weights(store: WeightStore, seed: int = 11) -> WeightBuffer:
    """A buffer with weights a little off version 0."""
    generator = torch.Generator().manual_seed(seed)
    buffer = WeightBuffer(store.layout, CPU, torch.float32)
    noise = torch.randn(buffer.flat.shape, generator=generator)
    buffer.flat.copy_(store.versions[0].flat + 0.1 * noise)
    return buffer


def two_sided(
    stage: Stage, inputs: Sequence[Tensor], *, keep_derived: bool = False
) -> tuple[list[Tensor | None], ...]:
    """Gradients of inputs and weights with other weights in the backward pass: (as the engine, by explicit swap).

    The forward's buffer is filled with NaN before the backward, so a graph that holds on to it is found out.
    """
    store = store_of(stage)
    backward = other_weights(store)
    # Not a copy of the stage itself, which would have a copy of the random number generator.
    swapped = stage_of(*copy.deepcopy(stage._layers))
    expected = by_explicit_swap(swapped, store, backward, inputs)
    passes = Passes(stage, keep_derived=keep_derived)
    leaves = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)
    done = passes.forward(4, 0, leaves, store.versions[0], substitute=True, head=None)
    with torch.no_grad():
        store.versions[0].flat.fill_(float("nan"))
    gradients = [torch.cos(output.detach()) if output.requires_grad else None for output in done.outputs]
    of_inputs, of_weights = passes.backward(done, backward, gradients)
    return [*of_inputs, *of_weights], expected


def by_explicit_swap(
    stage: Stage, store: WeightStore, backward: WeightBuffer, inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The same with the modules' own parameters, whose data is overwritten between the two passes."""
    parameters = [p for p in stage.parameters() if p.requires_grad]
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    _load(parameters, store, store.versions[0])
    outputs = stage.run(4, 0, *(leaf.clone() for leaf in leaves))
    _load(parameters, store, backward)
    roots = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(roots, [torch.cos(output.detach()) for output in roots])
    return [leaf.grad for leaf in leaves] + [p.grad for p in parameters]


def _load(parameters: Sequence[nn.Parameter], store: WeightStore, buffer: WeightBuffer) -> None:
    for parameter, value in zip(parameters, store.layout.view_list(buffer.flat), strict=True):
        parameter.data.copy_(value)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module whose weights are always the same."""
    torch.manual_seed(seed)
    return build()
