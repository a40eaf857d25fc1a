"""A stage as a module: a contiguous slice of the model's layers, run in order.

Owns the layers, their names, and the seeding of their random numbers: every layer starts each pass from a seed
that depends on (run seed, minibatch, microbatch, layer name) only, so dropout does not depend on how many ranks
share the layers and a repeated forward draws the same numbers again. Knows nothing of versions or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpcpipe.errors import ModelError
from hpcpipe.seeding import layer_key, pass_seed


class Stage(nn.Module):
    """Layers `names`[i] = `layers`[i] of the model, called one after another.

    A layer takes the tensors that the one before it returned, and returns a tensor or a tuple of tensors.
    `between` is called after each layer, for whoever wants to look after messages meanwhile.
    """

    def __init__(
        self, index: int, names: Sequence[str], layers: Sequence[nn.Module], *, seed: int, device: torch.device
    ) -> None:
        super().__init__()
        self.index = index
        self.names = tuple(names)
        self.running = ""
        self.between: Callable[[], None] = lambda: None
        self._layers = nn.ModuleList(layers)
        self._keys = [layer_key(seed, name) for name in names]
        self._generator = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        )
        self.to(device)

    def forward(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run `call` inside whatever context torch.func.functional_call put this module into."""
        return call(*args)

    def run(self, minibatch: int, microbatch: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The stage's outputs for `inputs`. Raises ModelError if a layer returns anything but tensors."""
        current: Any = inputs
        for name, key, layer in zip(self.names, self._keys, self._layers, strict=True):
            self.running = name
            self._generator.manual_seed(pass_seed(key, minibatch, microbatch))
            current = layer(*current)
            if isinstance(current, Tensor):
                current = (current,)
            elif not (isinstance(current, (tuple, list)) and all(isinstance(t, Tensor) for t in current)):
                raise ModelError(
                    f"layer {name!r} returned {type(current).__name__}: "
                    "a layer must return a tensor or a tuple of tensors"
                )
            self.between()
        return tuple(current)

    def split_name(self, qualified: str) -> tuple[str, str]:
        """(layer name, name within the layer) of a name as named_parameters() gives it."""
        _, index, name = qualified.split(".", 2)
        return self.names[int(index)], name

    def public_name(self, qualified: str) -> str:
        """`<layer>.<parameter>`: the name that users and checkpoints see."""
        return ".".join(self.split_name(qualified))
