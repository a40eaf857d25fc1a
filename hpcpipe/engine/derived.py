"""Finds what the substitution of backward weights cannot see: derived copies of weights, and weights kept aside.

The substitution of backward weights recognises a saved weight by its storage. What autograd saves of a *derived
copy* of a weight (autocast, weight_norm, cat of two weights) escapes it and keeps the forward's values, which is
wrong wherever forward and backward use different weights. The first forward of a stage runs under this dispatch
mode, which follows what depends on weights and on nothing that came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A saved tensor that depends on weights only: where it was made."""

    layer: str
    op: str


_aten = torch.ops.aten
_ZEROS = {_aten.zeros, _aten.zeros_like, _aten.new_zeros}
_PRODUCTS = {_aten.addmm, _aten.mm, _aten.bmm, _aten.baddbmm, _aten.linear, _aten.convolution}


def _storage(tensor: Tensor) -> int:
    """Where a tensor's memory lies; 0 for one without memory, which is nobody's."""
    return tensor.untyped_storage().data_ptr()


def _storages(tree: Any) -> set[int]:
    return {_storage(t) for t in tree_leaves(tree) if isinstance(t, Tensor)} - {0}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that never meets torch's compiler."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would load its compiler, seconds of imports, to keep it away from this mode.
        return False


class ForwardReads(_Watch):  # type: ignore[no-untyped-call]
    """Notices a backward pass that reads the forward's weights although it should use others.

    An autograd.Function that keeps a weight on its context, instead of saving it for the backward, does so behind
    the back of every hook. `op` is the first operation found reading the buffer at `weights`.
    """

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.op: str | None = None
        self._weights = weights

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.op is None and self._weights in _storages((args, kwargs)):
            self.op = str(func)
        return func(*args, **(kwargs or {}))


class DerivedTensors(_Watch):  # type: ignore[no-untyped-call]
    """Follows tensors through one forward pass by their storage.

    A tensor is `derived` if it was computed from weights (or derived tensors) and constants, and `incoming` if a
    stage input went into it. Tensors made from nothing, and buffers, are constants; but a product of weights with
    zeros made in the pass is a recurrent layer's first state, and counts as if it had come in. `layer` is asked
    for the name of the layer that runs.
    """

    def __init__(self, *, weights: int, inputs: Iterable[Tensor], layer: Callable[[], str]) -> None:
        super().__init__()
        self.found: list[Derived] = []
        self._layer = layer
        self._weights = weights
        self._incoming = _storages(tuple(inputs))
        self._zeros: set[int] = set()
        self._derived: dict[int, Derived] = {}
        # Holding every tensor keeps the allocator from giving a storage to two tensors during the pass.
        self._alive: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = _storages((args, kwargs))
        made = _storages(result)
        self._alive += [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        kind = getattr(func, "overloadpacket", None)
        weighty = self._weights in sources or bool(sources & self._derived.keys())
        if sources & self._incoming or (weighty and kind in _PRODUCTS and sources & self._zeros):
            self._incoming |= made
            for place in made:
                # A change in place may have added what came in to what was derived.
                self._derived.pop(place, None)
        elif weighty:
            origin = Derived(layer=self._layer(), op=str(func))
            for place in made - {self._weights}:
                self._derived.setdefault(place, origin)
                self._zeros.discard(place)
        elif kind in _ZEROS or sources & self._zeros:
            self._zeros |= made
        return result

    def note_saved(self, tensor: Tensor) -> None:
        """Called for each tensor that autograd saves and that is no view of a weight."""
        origin = self._derived.get(_storage(tensor))
        if origin is not None and origin not in self.found:
            self.found.append(origin)
