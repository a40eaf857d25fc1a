"""Nets of a user's own, each awkward in its own way, named in run files as `tests.oracle.nets:build_...`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Layers = list[tuple[str, Callable[[], nn.Module]]]


class Convolution(nn.Module):
    """Conv, BatchNorm, ReLU in place, dropout."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(functional.relu(self.norm(self.conv(x)), inplace=True))


class Residual(nn.Module):
    """x + conv(relu(bn(x))), added in place to what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(torch.relu(self.norm(x)))
        out += x
        return out


def build_convnet(dropout: float = 0.1) -> Layers:
    """A small residual net with BatchNorm for images of 1 by 8 by 8: five layers and a head."""
    return [
        ("stem", lambda: Convolution(1, 6, 1, dropout)),
        ("res1", lambda: Residual(6)),
        ("down", lambda: Convolution(6, 8, 2, dropout)),
        ("res2", lambda: Residual(8)),
        ("pool", lambda: nn.AdaptiveAvgPool2d(2)),
        ("head", lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 10))),
    ]


class Fork(nn.Module):
    """(hidden, mask, positions, scale): what transformers pass on; only `hidden` needs a gradient."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.linear(x))
        mask = x[:, : hidden.shape[1]] > 0
        positions = torch.arange(hidden.shape[1]).expand(hidden.shape[0], -1)
        return hidden, mask, positions, x.mean(dim=1, keepdim=True), hidden[:, ::2].t()


class Through(nn.Module):
    """Uses all of them, passes all of them on, one of them not contiguous and one empty."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.table = nn.Embedding(width, 1)

    def forward(
        self, hidden: Tensor, mask: Tensor, positions: Tensor, scale: Tensor, side: Tensor, *empty: Tensor
    ) -> tuple[Tensor, ...]:
        placed = hidden + self.table(positions).squeeze(-1)
        mixed = torch.where(mask, self.linear(placed), hidden) * (1.0 + 0.1 * scale)
        mixed = torch.tanh(mixed) + 0.1 * side.t().mean(dim=1, keepdim=True)
        # Shapes must not depend on what a layer is: an empty tensor goes along from here on.
        return mixed, mask, positions.flip(1), scale, side * 0.5, hidden[:, :0]


class Join(nn.Module):
    """The head: it never looks at `side`, whose gradient is therefore none."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, hidden: Tensor, mask: Tensor, *others: Tensor) -> Tensor:
        return self.linear(hidden.masked_fill(mask, 0.0))


def build_several(inputs: int = 16, width: int = 8, depth: int = 3, classes: int = 5) -> Layers:
    """Several tensors of several dtypes on every boundary."""
    return [
        ("fork", lambda: Fork(inputs, width)),
        *((f"through{i}", lambda: Through(width)) for i in range(depth)),
        ("join", lambda: Join(width, classes)),
    ]


class InPlace(nn.Module):
    """ReLU in place on what comes in, then a linear layer to which the input is added in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(self.relu(x))
        out += x
        return out


def build_in_place(inputs: int = 16, width: int = 8, depth: int = 4, classes: int = 5) -> Layers:
    """Every stage begins with a change of its input in place."""
    return [
        ("first", lambda: nn.Linear(inputs, width)),
        *((f"block{i}", lambda: InPlace(width)) for i in range(depth)),
        ("last", lambda: nn.Linear(width, classes)),
    ]


class Recomputed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, inputs: int, width: int, *, recompute: bool, dropout: float) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Linear(inputs, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, width)
        )
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.block, x, use_reentrant=False)
        return self.block(x)


def build_recomputed(
    recompute: bool, inputs: int = 16, width: int = 8, depth: int = 3, classes: int = 5, dropout: float = 0.2
) -> Layers:
    """Blocks under torch.utils.checkpoint, the first of which gets inputs that need no gradient."""
    return [
        *(
            (
                f"block{i}",
                lambda i=i: Recomputed(inputs if i == 0 else width, width, recompute=recompute, dropout=dropout),
            )
            for i in range(depth)
        ),
        ("head", lambda: nn.Linear(width, classes)),
    ]


class Tied(nn.Module):
    """Two linear maps with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.other = nn.Linear(width, width)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


def build_tied(inputs: int = 16, width: int = 8, depth: int = 3, classes: int = 5) -> Layers:
    """Weights tied within each layer."""
    return [
        ("first", lambda: nn.Linear(inputs, width)),
        *((f"tied{i}", lambda: Tied(width)) for i in range(depth)),
        ("last", lambda: nn.Linear(width, classes)),
    ]


def build_shared(inputs: int = 16, classes: int = 5) -> nn.Sequential:
    """The first and the fourth of six layers hold the same weight."""
    first, fourth = nn.Linear(inputs, inputs), nn.Linear(inputs, inputs)
    fourth.weight = first.weight
    last = nn.Linear(inputs, classes)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(inputs, inputs), fourth, nn.Tanh(), last)


class Named(nn.Module):
    """Returns something else than tensors."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


def build_named() -> Layers:
    """A layer in the middle returns a dictionary."""
    return [("first", lambda: nn.Linear(16, 5)), ("named", Named), ("last", lambda: nn.Linear(5, 5))]


class Normed(nn.Module):
    """A linear layer under spectral_norm, whose power iteration moves buffers in every forward pass."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class WeightNormed(nn.Module):
    """A linear layer under weight_norm: the weight that autograd saves is computed from parameters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Autocast(nn.Module):
    """A linear layer that computes in bfloat16: autograd saves a cast of the weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.tanh(self.linear(x)).float()


class Concatenated(nn.Module):
    """One product with two weights put together."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(outputs // 2, inputs) / inputs**0.5)
        self.right = nn.Parameter(torch.randn(outputs - outputs // 2, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(x, torch.cat([self.left, self.right])))


DERIVED: dict[str, type[nn.Module]] = {
    "spectral_norm": Normed,
    "weight_norm": WeightNormed,
    "autocast": Autocast,
    "cat": Concatenated,
}


def build_derived(kind: str, inputs: int = 16, width: int = 8, depth: int = 3, classes: int = 5) -> Layers:
    """Layers that make something of their weights and let autograd save that."""
    layer = DERIVED[kind]
    return [
        ("first", lambda: nn.Linear(inputs, width)),
        *((f"{kind}{i}", lambda: layer(width, width)) for i in range(depth)),
        ("last", lambda: nn.Linear(width, classes)),
    ]


def build_frozen(trained: list[str], inputs: int = 16, width: int = 8, depth: int = 3, classes: int = 5) -> Layers:
    """A tanh net of `depth` + 1 linear layers in which only the layers named are trained."""

    def made(name: str, *sizes: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            layer = nn.Sequential(nn.Linear(*sizes), nn.Tanh() if name != "last" else nn.Identity())
            return layer.requires_grad_(name in trained)

        return build

    return [
        *((f"hidden{i}", made(f"hidden{i}", inputs if i == 0 else width, width)) for i in range(depth)),
        ("last", made("last", width, classes)),
    ]


class Shift(nn.Module):
    """Adds a parameter of the very shape of the rows, whose gradient is the gradient that arrives itself."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(rows, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def build_aliases(rows: int = 8, inputs: int = 16, width: int = 8, classes: int = 5) -> Layers:
    """Outputs that are the input itself or a view of it, and gradients that are the arriving one itself."""
    return [
        ("first", lambda: nn.Linear(inputs, width)),
        ("shift1", lambda: Shift(rows, width)),
        ("identity", lambda: nn.Identity()),
        ("view", lambda: nn.Unflatten(1, (width // 2, 2))),
        ("flat", lambda: nn.Flatten()),
        ("shift2", lambda: Shift(rows, width)),
        ("last", lambda: nn.Linear(width, classes)),
    ]


def build_wide(inputs: int = 16, width: int = 2**16, classes: int = 5) -> Layers:
    """With 32 rows, every boundary carries 8 MiB each way; the layer in the middle has no parameters."""
    return [
        ("spread", lambda: nn.Linear(inputs, width)),
        ("tanh", lambda: nn.Tanh()),
        ("gather", lambda: nn.Linear(width, classes)),
    ]


class Sleepy(nn.Module):
    """Takes a while that nobody can foresee."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self._random = random.Random()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._random.uniform(0.0, 0.01))
        return torch.tanh(self.linear(x))


def build_sleepy(inputs: int = 16, width: int = 8, depth: int = 4, classes: int = 5) -> Layers:
    """Layers whose times differ in every pass and on every rank."""
    return [
        *((f"sleepy{i}", lambda i=i: Sleepy(inputs if i == 0 else width, width)) for i in range(depth)),
        ("last", lambda: nn.Linear(width, classes)),
    ]


class _Slow(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    """A linear layer; forward and backward take `seconds` longer than it does."""

    def __init__(self, inputs: int, outputs: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(self.linear(x), self.seconds)


def build_slow(
    inputs: int = 16, width: int = 8, depth: int = 4, classes: int = 5, seconds: float = 0.03
) -> Layers:
    """Layers that all take the same time, far longer than anything around them."""
    sizes = [inputs, *[width] * (depth - 1), classes]
    return [(f"slow{i}", lambda i=i: Slow(sizes[i], sizes[i + 1], seconds)) for i in range(depth)]


class TwoInputs(nn.Module):
    """Takes rows and a scale for each, and returns one tensor twice; one of its parameters is never used."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.linear(x)) * scale
        return hidden, hidden


class FixedNorm(nn.Module):
    """BatchNorm that its builder has set to evaluation for ever, and one that it has not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fixed = nn.BatchNorm1d(width).eval()
        self.moving = nn.BatchNorm1d(width)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.moving(left) + right, self.fixed(right)


class TwoOutputs(nn.Module):
    """Scores and something to regularise."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(left), right.square().mean(dim=1)


def build_odd(inputs: int = 16, width: int = 8, depth: int = 2, classes: int = 5) -> Layers:
    """Two inputs, two outputs, aliases between, unused parameters and modules in evaluation mode."""
    return [
        ("two_inputs", lambda: TwoInputs(inputs, width)),
        *((f"norm{i}", lambda: FixedNorm(width)) for i in range(depth)),
        ("two_outputs", lambda: TwoOutputs(width, classes)),
    ]


class Sometimes(nn.Module):
    """Two experts, of which each minibatch sees one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x.detach().sum() > 0)
        return torch.tanh(self.experts[chosen](x))


def build_sometimes(inputs: int = 16, width: int = 8, depth: int = 2, classes: int = 5) -> Layers:
    """Parameters that have no gradient in some minibatches."""
    return [
        *((f"sometimes{i}", lambda: Sometimes(inputs)) for i in range(depth)),
        ("narrow", lambda: nn.Linear(inputs, width)),
        ("last", lambda: nn.Linear(width, classes)),
    ]
