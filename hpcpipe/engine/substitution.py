"""Forward and backward on different weights in stock PyTorch.

While F(j) runs, whatever autograd saves that lies in the forward weights' buffer is packed as a place in that
buffer; when B(j) runs, the same place in the backward weights' buffer is unpacked. The graph therefore holds no
weights, nothing is written back in place (which autograd's version counters would refuse, and did in PipeDream
from PyTorch 1.5 on), and gradients equal an explicit swap of the weights to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcpipe.engine.derived import DerivedTensors
from hpcpipe.engine.weights import WeightBuffer


class _Place(NamedTuple):
    """A view of a weight buffer, wherever that buffer's content comes from."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """Anything else that autograd saved, with its version: hooks switch autograd's own check off."""

    tensor: Tensor
    version: int


class Substitution:
    """The saved-tensor hooks of one forward pass.

    Set `backward` before the backward pass runs. `derived`, while the first forward runs, notes saved tensors
    that were computed from weights and would keep the forward's values.
    """

    def __init__(self, forward: WeightBuffer, derived: DerivedTensors | None = None) -> None:
        self.backward: WeightBuffer | None = None
        self._forward_pointer = forward.pointer
        self._derived = derived

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context to run the forward pass in."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Place | _Kept:
        pointer = tensor.untyped_storage().data_ptr()
        # Tensors without memory all have the same pointer: none.
        if pointer and pointer == self._forward_pointer:
            return _Place(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        if self._derived is not None:
            self._derived.note_saved(tensor)
        # A tensor that knows its graph would keep itself alive where its backward never runs, as after a stop.
        return _Kept(tensor.detach(), tensor._version)

    def _unpack(self, packed: _Place | _Kept) -> Tensor:
        if isinstance(packed, _Kept):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    "a tensor needed for the backward pass was changed in place: it is at version "
                    f"{packed.tensor._version}, the forward pass saved version {packed.version}"
                )
            return packed.tensor
        assert self.backward is not None
        return torch.as_strided(self.backward.flat.detach(), packed.size, packed.stride, packed.offset)
