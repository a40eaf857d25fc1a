"""A serial replay of asynchronous pipeline training: the published recurrences and nothing else.

One process, every version of every stage's weights kept for ever, weights swapped by copying them into the
modules before each pass, torch.optim's own optimizers. Stage k of N is 0..N-1, w = N-1-k; minibatch j. Versions
count updates.

    stash           F(j), B(j) on version max(0, j-w)                       PipeDream
    vertical_sync   F(j), B(j) on version max(0, j-(N-1))                   PipeDream
    none            F(j) on max(0, j-w), B(j) on j
    spectrain       the versions of `none`, predicted s updates ahead:      SpecTrain, arXiv 1809.02839
                    Ŵ = W - (sum of the coming s learning rates) · v

Where stages have replicas, r_k of stage k and R in all, they take the minibatches in turn and update once per
round of r_k, with the mean of its gradients (1F1B-RR): j becomes the round m = ⌊j/r_k⌋, w becomes
⌊(R-1-Σ_{i<k} r_i)/r_k⌋, and the bound of vertical_sync is what stage 0's version holds. An update's learning
rate is that of its last minibatch.

Where the pipeline is drained for checkpoints, each stretch between two drains is a run of its own that starts from
the weights (and the velocity) of the one before: 0 becomes the first minibatch of the stretch. So does a run that
goes on from a checkpoint on another pipeline.

Its purpose is to be an oracle: it shares no code with hpcpipe.schedule, hpcpipe.optim or the engine's passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpcpipe.config import RunConfig
from tests.oracle.parts import Parts, Slice, TorchOptimizer, parts_of, start_from
from tests.oracle.runs import Outcome
from tests.oracle.timeline import simulate, updates_before_return, warm_up

Named = dict[str, Tensor]


class Recurrence:
    """Which version each pass finds and how far ahead of it it aims. Mutations of it are what tests must notice.

    For minibatches `first` to `last` - 1, from fill to drain; `made` updates of each stage came before.
    """

    sign = 1.0

    def __init__(
        self, config: RunConfig, replicas: Sequence[int], first: int, last: int, made: Sequence[int]
    ) -> None:
        self.policy = config.pipeline.policy
        self.target = config.pipeline.target
        self.replicas = replicas
        self._ticks = simulate(replicas, last - first)
        self.passes = [p._replace(minibatch=first + p.minibatch) for p in self._ticks]
        self.stages = len(replicas)
        self.first = first
        self.last = last
        self.made = made

    def round(self, stage: int, j: int) -> int:
        """The round of the stretch that `j` belongs to."""
        return (j - self.first) // self.replicas[stage]

    def minibatches_of(self, stage: int, turn: int) -> range:
        """The minibatches of a round."""
        start = self.first + turn * self.replicas[stage]
        return range(start, min(start + self.replicas[stage], self.last))

    def forward_version(self, stage: int, j: int) -> int:
        if self.policy != "vertical_sync":
            return self.made[stage] + max(0, self.round(stage, j) - warm_up(stage, self.replicas))
        bound = self.replicas[0] * max(0, self.round(0, j) - warm_up(0, self.replicas))
        return self.made[stage] + bound // self.replicas[stage]

    def backward_version(self, stage: int, j: int) -> int:
        if self.policy in ("stash", "vertical_sync"):
            return self.forward_version(stage, j)
        return self.made[stage] + self.round(stage, j)

    def aim(self, stage: int, j: int) -> int:
        own = self.round(stage, j)
        if self.target != "round_trip":
            return self.made[stage] + own
        # B(j) may start at stage 0 in the very tick in which the update before it ends there.
        returned = updates_before_return(self._ticks, stage, j - self.first, self.replicas)
        return self.made[stage] + max(own, returned)

    def forward_distance(self, stage: int, j: int) -> int:
        return self.aim(stage, j) - self.forward_version(stage, j) if self.policy == "spectrain" else 0

    def backward_distance(self, stage: int, j: int) -> int:
        return self.aim(stage, j) - self.backward_version(stage, j) if self.policy == "spectrain" else 0


def stretches(config: RunConfig, start: int, minibatches: int) -> list[tuple[int, int]]:
    """[first, last) of each stretch from fill to drain, of a run that begins at minibatch `start`."""
    length = config.checkpoint.every if config.checkpoint.cut == "drain" else minibatches
    return [(first, min(first + length, minibatches)) for first in range(start, minibatches, length)]


class ReplayStage:
    """One stage with all versions of its weights. `masters` are what the optimizer sees.

    `labels` are the minibatches whose learning rate each update of the run takes.
    """

    def __init__(
        self, parts: Parts, index: int, replicas: int, labels: Sequence[int], start: Outcome | None = None
    ) -> None:
        self.net: Slice = parts.slices[index]
        self.parts = parts
        self.labels = labels
        config = parts.config
        state_dtype = torch.float64 if parts.dtype is torch.float64 else torch.float32
        self.trained = {name: p for name, p in self.net.parameters().items() if p.requires_grad}
        self.masters = {
            name: nn.Parameter(p.detach().to(state_dtype, copy=True)) for name, p in self.trained.items()
        }
        for layer in self.net.layers:
            layer.to(parts.dtype)
        self.optimizer = TorchOptimizer(config, self.masters)
        self.has_velocity = start is not None
        if start is not None:
            start_from(start, self.masters, self.net.buffers(), self.optimizer)
        self.versions: list[Named] = [self._copy_of_masters()]
        self.velocities: list[dict[str, Named]] = [self.optimizer.state()]
        self.flights: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self.gradients: dict[int, dict[str, Tensor | None]] = {}
        self.buffers = [{name: b.clone() for name, b in self.net.buffers().items()} for _ in range(replicas)]

    def _copy_of_masters(self) -> Named:
        return {name: p.detach().clone() for name, p in self.masters.items()}

    def predicted(self, version: int, distance: int, target: str, sign: float) -> Named:
        """Weights `distance` updates ahead of `version`, along the velocity of the update that made it."""
        true = self.versions[version]
        if distance == 0:
            return true
        return {name: self._ahead(name, version, distance, target, sign) for name in true}

    def _ahead(self, name: str, version: int, distance: int, target: str, sign: float) -> Tensor:
        options = self.parts.config.optimizer
        coming = self.labels[version : version + distance]
        rates = [self.optimizer.rate_of(name, self.parts.rate(label)) for label in coming]
        weight = self.versions[version][name]
        if self.optimizer.adamw:
            momentum = options.betas[0]
            decay = math.prod(1.0 - rate * self.optimizer.decays[name] for rate in rates)
            if decay != 1.0:
                weight = weight * decay
        else:
            momentum = options.momentum
        if target == "damped":
            reach = math.fsum(rate * momentum ** (i + 1) for i, rate in enumerate(rates))
        else:
            reach = math.fsum(rates)
        if version == 0 and not self.has_velocity:
            return weight
        state = {key: tensors[name] for key, tensors in self.velocities[version].items()}
        if self.optimizer.adamw:
            second = 1 - options.betas[1] ** version
            step = state["exp_avg"] / (state["exp_avg_sq"].sqrt() / second**0.5 + options.eps)
            return torch.sub(weight, step, alpha=sign * reach / (1 - options.betas[0] ** version))
        return torch.sub(weight, state["momentum_buffer"], alpha=sign * reach)

    def load(self, weights: Named) -> None:
        """Put `weights` into the modules behind autograd's back, which is what "swapping" has always meant."""
        for name, parameter in self.trained.items():
            parameter.data.copy_(weights[name])

    def forward(self, j: int, inputs: Sequence[Tensor], weights: Named, replica: int) -> tuple[Tensor, ...]:
        self.load(weights)
        live = self.net.buffers()
        for name, buffer in live.items():
            buffer.data.copy_(self.buffers[replica][name])
        leaves = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)
        outputs = self.net(j, 0, *(leaf.clone() for leaf in leaves))
        self.buffers[replica] = {name: buffer.clone() for name, buffer in live.items()}
        self.flights[j] = leaves, outputs
        return outputs

    def backward(
        self, j: int, gradients: Sequence[Tensor | None] | None, weights: Named, loss: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the stage's inputs; the weights' are kept until the round's update."""
        self.load(weights)
        leaves, outputs = self.flights.pop(j)
        for parameter in self.trained.values():
            parameter.grad = None
        if loss is not None:
            loss.backward()
        else:
            assert gradients is not None
            roots = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
            if roots:
                torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
        self.gradients[j] = {name: p.grad for name, p in self.trained.items()}
        return tuple(leaf.grad for leaf in leaves)

    def update(self, minibatches: range) -> None:
        """The update of a round, with the mean of its gradients."""
        for name, master in self.masters.items():
            found = [g for j in minibatches if (g := self.gradients[j][name]) is not None]
            total = None
            for gradient in found:
                total = gradient.to(master.dtype) if total is None else total + gradient.to(master.dtype)
            master.grad = None if total is None else total * (1.0 / len(minibatches))
        for j in minibatches:
            del self.gradients[j]
        if self.parts.config.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters.values(), self.parts.config.optimizer.clip_norm)
        self.optimizer.step(self.parts.rate(minibatches[-1]))
        self.versions.append(self._copy_of_masters())
        self.velocities.append(self.optimizer.state())

    def mean_buffers(self) -> Named:
        """Of the replicas: the mean of what is floating, the first one's of the rest."""
        return {
            name: torch.stack([own[name].double() for own in self.buffers]).mean(0).to(buffer.dtype)
            if buffer.is_floating_point() and len(self.buffers) > 1
            else buffer
            for name, buffer in self.buffers[0].items()
        }


def replay(
    config: RunConfig,
    stages: int | Sequence[int],
    recurrence: type[Recurrence] = Recurrence,
    *,
    begin: int = 0,
    start: Outcome | None = None,
) -> Outcome:
    """Train as `config` says on a pipeline of so many stages, or of these replicas of each, pass after pass.

    With `start`, from minibatch `begin` on, with the weights, buffers and velocity given; for SGD.
    """
    replicas = (1,) * stages if isinstance(stages, int) else tuple(stages)
    parts = parts_of(config, len(replicas))
    spans = stretches(config, begin, parts.minibatches)
    pipeline = [ReplayStage(parts, k, r, _labels(spans, r), start) for k, r in enumerate(replicas)]
    losses: dict[int, Tensor] = {}
    for first, last in spans:
        made = [len(stage.versions) - 1 for stage in pipeline]
        _replay_stretch(parts, pipeline, recurrence(config, replicas, first, last, made), losses)
    return Outcome(
        weights=_with_frozen(pipeline),
        buffers={name: b for stage in pipeline for name, b in stage.mean_buffers().items()},
        state=_joined([stage.velocities[-1] for stage in pipeline]),
        losses=[float(losses[j].detach()) for j in range(begin, parts.minibatches)],
    )


def _labels(spans: Sequence[tuple[int, int]], replicas: int) -> list[int]:
    """The last minibatch of each round of the run; and some more, for mutations that look past its end."""
    rounds = [min(j + replicas, last) - 1 for first, last in spans for j in range(first, last, replicas)]
    return [*rounds, *range(rounds[-1] + 1, rounds[-1] + 65)]


def _replay_stretch(
    parts: Parts, pipeline: Sequence[ReplayStage], rules: Recurrence, losses: dict[int, Tensor]
) -> None:
    activations: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    gradients: dict[tuple[int, int], tuple[Tensor | None, ...]] = {}
    for _, k, kind, j, replica in rules.passes:
        stage = pipeline[k]
        if kind == "F":
            version, distance = rules.forward_version(k, j), rules.forward_distance(k, j)
            weights = stage.predicted(version, distance, rules.target, rules.sign)
            inputs = parts.inputs(j) if k == 0 else activations.pop((k, j))
            outputs = stage.forward(j, inputs, weights, replica)
            if k == len(pipeline) - 1:
                losses[j] = parts.loss(outputs[0] if len(outputs) == 1 else outputs, parts.data.targets(j))
            else:
                activations[k + 1, j] = outputs
            continue
        version, distance = rules.backward_version(k, j), rules.backward_distance(k, j)
        weights = stage.predicted(version, distance, rules.target, rules.sign)
        if k == len(pipeline) - 1:
            of_inputs = stage.backward(j, None, weights, losses[j])
        else:
            of_inputs = stage.backward(j, gradients.pop((k, j)), weights)
        if k > 0:
            gradients[k - 1, j] = of_inputs
        whole = rules.minibatches_of(k, rules.round(k, j))
        if all(other in stage.gradients for other in whole):
            stage.update(whole)


def _with_frozen(pipeline: Sequence[ReplayStage]) -> Named:
    weights: Named = {}
    for stage in pipeline:
        weights |= {name: p.detach().clone() for name, p in stage.net.parameters().items()}
        weights |= stage.versions[-1]
    return weights


def _joined(states: Sequence[dict[str, Named]]) -> dict[str, Named]:
    joined: dict[str, Named] = {}
    for state in states:
        for key, tensors in state.items():
            if tensors:
                joined.setdefault(key, {}).update(tensors)
    return joined
