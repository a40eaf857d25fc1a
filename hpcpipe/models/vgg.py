"""VGG (Simonyan and Zisserman 2014, configurations A and D) as named layers: conv1_1, pool1, ..., fc6, fc7, fc8.

Width, input size, BatchNorm and dropout are free, so that the published network and one that two CPU cores can
train are the same code.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn

from hpcpipe.config.model import SMALLEST_VGG_INPUT, VggModel
from hpcpipe.models.layers import LayerSpec, draw

_BLOCKS = {
    "vgg11": ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    "vgg16": ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)),
}
"""Channels of the convolutions before each of the five poolings."""


class Convolution(nn.Module):
    """3 by 3 convolution that keeps the size, BatchNorm if asked for, ReLU."""

    def __init__(self, inputs: int, outputs: int, *, batchnorm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
        self.norm = nn.BatchNorm2d(outputs) if batchnorm else nn.Identity()
        self.activation = nn.ReLU()
        # He initialisation: keeps the variance of gradients through convolution and ReLU.
        draw(self.conv.weight, math.sqrt(2 / (9 * outputs)))
        _zero(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, inputs, side, side) to (rows, outputs, side, side)."""
        result: Tensor = self.activation(self.norm(self.conv(x)))
        return result


class Classifier(nn.Module):
    """Linear, with ReLU and dropout unless it is the last. Input (rows, ...) is flattened by row."""

    def __init__(self, inputs: int, outputs: int, *, dropout: float, last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.activation = nn.Identity() if last else nn.ReLU()
        self.dropout = nn.Identity() if last else nn.Dropout(dropout)
        # The published 0.01 starves narrow networks; He initialisation keeps the variance at every width.
        draw(self.linear.weight, 0.01 if last else math.sqrt(2 / inputs))
        _zero(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, ...) to (rows, outputs)."""
        result: Tensor = self.dropout(self.activation(self.linear(x.flatten(1))))
        return result


def vgg_layers(model: VggModel, *, channels: int, size: int, classes: int) -> list[LayerSpec]:
    """Return the layers of a VGG for images of (channels, size, size)."""
    layers = []
    inputs = channels
    for block, convolutions in enumerate(_BLOCKS[model.name], start=1):
        for number, published in enumerate(convolutions, start=1):
            outputs = _scaled(published, model.width)
            factory = partial(Convolution, inputs, outputs, batchnorm=model.batchnorm)
            layers.append(LayerSpec(name=f"conv{block}_{number}", factory=factory, on_meta=True))
            inputs = outputs
        pool = partial(nn.MaxPool2d, kernel_size=2)
        layers.append(LayerSpec(name=f"pool{block}", factory=pool, on_meta=True))
    wide = _scaled(4096, model.width) if model.classifier is None else model.classifier
    features = inputs * (size // SMALLEST_VGG_INPUT) ** 2
    for name, fan_in, fan_out in (("fc6", features, wide), ("fc7", wide, wide), ("fc8", wide, classes)):
        factory_of = partial(Classifier, fan_in, fan_out, dropout=model.dropout, last=name == "fc8")
        layers.append(LayerSpec(name=name, factory=factory_of, on_meta=True))
    return layers


def _scaled(published: int, width: float) -> int:
    return max(1, round(published * width))


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
