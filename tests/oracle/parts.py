"""What the serial references share with the engine on purpose: the net, the data, and the seeds of dropout.

Layers and data come from hpcpipe's own builders and dropout from its documented seeds, since a reference that used
others would compute something else. Nothing here knows schedules, versions, messages or flat buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpcpipe.config import AdamwConfig, RunConfig, group_of
from hpcpipe.datasets.build import build_dataset
from hpcpipe.datasets.protocol import Dataset
from hpcpipe.models.build import build_layers, split_layers
from hpcpipe.models.layers import inspect_layers, make_layers
from hpcpipe.models.loss import Loss, make_loss
from hpcpipe.seeding import layer_key, pass_seed
from tests.oracle.runs import Outcome

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Slice:
    """Some layers of the net, one after another; each starts every pass from its own seed."""

    def __init__(self, names: list[str], layers: list[nn.Module], seed: int) -> None:
        self.names = names
        self.layers = layers
        self._seed = seed

    def __call__(self, minibatch: int, microbatch: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        current: Any = inputs
        for name, layer in zip(self.names, self.layers, strict=True):
            torch.default_generator.manual_seed(pass_seed(layer_key(self._seed, name), minibatch, microbatch))
            current = layer(*current)
            current = (current,) if isinstance(current, Tensor) else tuple(current)
        return current

    def parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, under the first name that it has."""
        found: dict[str, nn.Parameter] = {}
        for layer, module in zip(self.names, self.layers, strict=True):
            for name, parameter in module.named_parameters():
                if not any(parameter is other for other in found.values()):
                    found[f"{layer}.{name}"] = parameter
        return found

    def buffers(self) -> dict[str, Tensor]:
        return {
            f"{layer}.{name}": buffer
            for layer, module in zip(self.names, self.layers, strict=True)
            for name, buffer in module.named_buffers()
        }


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A run's net in slices, its data, loss and length."""

    config: RunConfig
    slices: list[Slice]
    data: Dataset
    loss: Loss
    minibatches: int
    dtype: torch.dtype

    def inputs(self, minibatch: int) -> tuple[Tensor, ...]:
        return tuple(t.to(self.dtype) if t.is_floating_point() else t for t in self.data.inputs(minibatch))

    def rate(self, update: int) -> float:
        """Learning rate of an update: constant, or along a line to `end_factor` of it."""
        base, schedule = self.config.optimizer.lr, self.config.lr_schedule
        if schedule.name == "constant":
            return base
        assert schedule.name == "linear"
        assert not schedule.warmup
        return base * (1.0 + (schedule.end_factor - 1.0) * min(1.0, update / (schedule.total or self.minibatches)))


def parts_of(config: RunConfig, stages: int) -> Parts:
    """The net cut into `stages` slices as the engine cuts it."""
    torch.set_num_threads(1)
    data = build_dataset(config.data, config.run.seed)
    specs = build_layers(config.model, config.run.seed, data.describe())
    bounds = split_layers(config.pipeline, inspect_layers(specs, config.run.seed).parameter_counts, stages)
    slices = [
        Slice([spec.name for spec in specs[a:b]], make_layers(specs[a:b], config.run.seed), config.run.seed)
        for a, b in bounds
    ]
    minibatches = config.run.epochs * data.minibatches_per_epoch
    if config.run.max_steps is not None:
        minibatches = min(minibatches, config.run.max_steps)
    return Parts(
        config=config,
        slices=slices,
        data=data,
        loss=make_loss(config.loss),
        minibatches=minibatches,
        dtype=DTYPES[config.run.dtype],
    )


class TorchOptimizer:
    """torch.optim's own optimizer over named parameters, with the run's groups and a rate set before each step."""

    def __init__(self, config: RunConfig, parameters: dict[str, nn.Parameter]) -> None:
        options = config.optimizer
        hyper = [(1.0, options.weight_decay)] + [
            (group.lr_scale, options.weight_decay if group.weight_decay is None else group.weight_decay)
            for group in options.groups
        ]
        self._place = {name: group_of(name, options.groups) for name in parameters}
        self._scales = {name: hyper[place][0] for name, place in self._place.items()}
        self.decays = {name: hyper[place][1] for name, place in self._place.items()}
        self.parameters = parameters
        groups = [
            {"params": [p], "weight_decay": self.decays[name], "name": name} for name, p in parameters.items()
        ]
        self.adamw = isinstance(options, AdamwConfig)
        self._options = options
        self.torch: torch.optim.Optimizer | None = None
        if not groups:
            return
        if isinstance(options, AdamwConfig):
            self.torch = torch.optim.AdamW(
                groups, lr=1.0, betas=options.betas, eps=options.eps, maximize=options.maximize
            )
        else:
            self.torch = torch.optim.SGD(
                groups,
                lr=1.0,
                momentum=options.momentum,
                dampening=options.dampening,
                nesterov=options.nesterov,
                maximize=options.maximize,
            )

    def rate_of(self, name: str, rate: float) -> float:
        return rate * self._scales[name]

    def step(self, rate: float) -> None:
        if self.torch is None:
            return
        for group in self.torch.param_groups:
            group["lr"] = self.rate_of(group["name"], rate)
        self.torch.step()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Flat copies of the optimizer state by state name, zero where there has been no gradient yet."""
        if isinstance(self._options, AdamwConfig):
            names = ("exp_avg", "exp_avg_sq")
        else:
            names = ("momentum_buffer",) if self._options.momentum else ()
        assert self.torch is not None or not self.parameters
        return {
            state: {
                name: self.torch.state[p][state].clone() if state in self.torch.state[p] else torch.zeros_like(p)
                for name, p in self.parameters.items()
            }
            for state in names
        }


def start_from(
    start: Outcome, parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor], optimizer: TorchOptimizer
) -> None:
    """Go on with the weights, buffers and momentum that a run had reached, of those that are named here."""
    assert not optimizer.adamw
    for name, parameter in parameters.items():
        parameter.data.copy_(start.weights[name])
    for name, buffer in buffers.items():
        buffer.data.copy_(start.buffers[name])
    if optimizer.torch is not None:
        for state, tensors in start.state.items():
            for name, parameter in parameters.items():
                optimizer.torch.state[parameter][state] = tensors[name].clone()
