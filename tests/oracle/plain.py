"""The training loop that everybody writes: one process, torch.optim, torch's own clipping, gradients accumulated.

Microbatches are equal to one, the larger first, and each counts by its share of the targets. Buffers that move in
the forward (BatchNorm) move once per microbatch, in order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcpipe.config import RunConfig
from tests.oracle.parts import TorchOptimizer, parts_of, start_from
from tests.oracle.runs import Outcome


def rows_of_microbatches(rows: int, microbatches: int) -> list[int]:
    """Sizes that differ by one at most, the larger first."""
    whole, extra = divmod(rows, microbatches)
    return [whole + 1] * extra + [whole] * (microbatches - extra)


def train_plainly(config: RunConfig, *, begin: int = 0, start: Outcome | None = None) -> Outcome:
    """Train as `config` says, but on one stage, one minibatch after the other.

    With `start`, from minibatch `begin` on, with the weights, buffers and momentum given; for SGD.
    """
    parts = parts_of(config, 1)
    net = parts.slices[0]
    for layer in net.layers:
        layer.to(parts.dtype)
    parameters: dict[str, nn.Parameter] = {n: p for n, p in net.parameters().items() if p.requires_grad}
    optimizer = TorchOptimizer(config, parameters)
    if start is not None:
        start_from(start, parameters, net.buffers(), optimizer)
    microbatches = config.pipeline.microbatches
    losses = []
    for j in range(begin, parts.minibatches):
        for parameter in parameters.values():
            parameter.grad = None
        inputs, targets = parts.inputs(j), parts.data.targets(j)
        sizes = rows_of_microbatches(len(targets), microbatches)
        total = 0.0
        for i, part in enumerate(zip(*(t.split(sizes) for t in (*inputs, targets)), strict=True)):
            outputs = net(j, i, *part[:-1])
            loss: Tensor = parts.loss(outputs[0] if len(outputs) == 1 else outputs, part[-1])
            share = parts.loss.count(part[-1]) / max(1, parts.loss.count(targets))
            (loss if microbatches == 1 else loss * share).backward()
            total += float(loss.detach()) * (1.0 if microbatches == 1 else share)
        if config.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), config.optimizer.clip_norm)
        optimizer.step(parts.rate(j))
        losses.append(total)
    return Outcome(
        weights={name: p.detach().clone() for name, p in net.parameters().items()},
        buffers={name: b.clone() for name, b in net.buffers().items()},
        state=optimizer.state(),
        losses=losses,
    )
