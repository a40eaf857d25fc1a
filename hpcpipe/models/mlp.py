"""The multilayer perceptron as named layers: hidden1, hidden2, ..., output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from hpcpipe.config.model import MlpModel
from hpcpipe.models.layers import LayerSpec

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


class Hidden(nn.Module):
    """Linear, BatchNorm if asked for, activation, dropout if asked for. Input (rows, ...) is flattened by row."""

    def __init__(self, inputs: int, outputs: int, *, activation: str, batchnorm: bool, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs) if batchnorm else nn.Identity()
        self.activation = _ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, ...) to (rows, outputs)."""
        result: Tensor = self.dropout(self.activation(self.norm(self.linear(x.flatten(1)))))
        return result


class Output(nn.Module):
    """The last linear layer. Input (rows, ...) is flattened by row."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, ...) to (rows, outputs)."""
        result: Tensor = self.linear(x.flatten(1))
        return result


def mlp_layers(model: MlpModel, *, in_features: int, out_features: int) -> list[LayerSpec]:
    """Return the layers of an MLP. Weights are torch's own default for linear layers."""
    widths = (in_features, *model.hidden_widths)
    hidden = [
        LayerSpec(
            name=f"hidden{number}",
            factory=partial(
                Hidden,
                inputs,
                outputs,
                activation=model.activation,
                batchnorm=model.batchnorm,
                dropout=model.dropout,
            ),
            on_meta=True,
        )
        for number, (inputs, outputs) in enumerate(pairwise(widths), start=1)
    ]
    return [*hidden, LayerSpec(name="output", factory=partial(Output, widths[-1], out_features), on_meta=True)]
