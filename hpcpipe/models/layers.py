"""Named layers that are built only where they are needed, each with weights decided by (seed, layer name) alone.

It owns what can be told about a model without running it: parameter counts, storage shared by
layers, a fingerprint. It never keeps a layer.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hpcpipe.errors import ModelError
from hpcpipe.seeding import seeded


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer by name and how to build it.

    A layer takes one or several tensors and returns a tensor or a tuple of tensors, which the next layer takes.
    """

    name: str
    factory: Callable[[], nn.Module]
    """Builds the module on the CPU in float32."""
    on_meta: bool = False
    """Whether the factory also works under torch.device("meta"), where it costs no memory."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is known of a whole model after building each layer once."""

    parameter_counts: tuple[int, ...]
    """Numbers in the parameters of each layer."""
    parameter_names: tuple[str, ...]
    """Full names, `<layer>.<parameter>`, of all parameters in order."""
    shared: tuple[tuple[str, str, str], ...]
    """(earlier layer, later layer, name in the later one) for storage that both hold."""
    fingerprint: str
    """Hash of layer names and of the names, shapes and dtypes of parameters and buffers."""


def draw(weight: torch.Tensor, std: float) -> None:
    """Fill a parameter from a normal distribution; one without memory (meta) is left alone."""
    # Drawing into meta memory would do nothing but make torch load its 800 modules of decompositions.
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def make_layers(specs: Sequence[LayerSpec], seed: int) -> list[nn.Module]:
    """Build the layers; the weights of each depend on (seed, its name) only, not on which others are built.

    Raises ModelError when a factory returns something else than a module.
    """
    return [_make(spec, seed) for spec in specs]


def _make(spec: LayerSpec, seed: int) -> nn.Module:
    with seeded(seed, spec.name):
        module = spec.factory()
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"model: the factory of layer {spec.name!r} returned a {type(module).__name__}; "
            "it must return a torch.nn.Module"
        )
    return module


def check_names(names: Sequence[str]) -> None:
    """Raise ModelError for layer names that checkpoints could not tell apart."""
    for name in names:
        if not name or "/" in name or name.strip(".") != name or not name.isprintable():
            raise ModelError(f"model: {name!r} cannot be the name of a layer; use letters, digits, _, - and dots")
    known = set(names)
    if len(known) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelError(f"model: two layers are named {twice!r}; give each a name of its own")
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts)):
            if (outer := ".".join(parts[:end])) in known:
                text = f"layers {outer!r} and {name!r} could have parameters of the same full name"
                raise ModelError(f"model: {text}; rename one of them")


def inspect_layers(specs: Sequence[LayerSpec], seed: int) -> Inspection:
    """Build each layer once, one at a time, and return what the whole model looks like.

    Built-in layers are built without memory; a user's are built for real and dropped again.
    """
    counts: list[int] = []
    names: list[str] = []
    shared: list[tuple[str, str, str]] = []
    parts: list[object] = []
    holders = _Holders()
    for spec in specs:
        if spec.on_meta:
            with torch.device("meta"):
                module = _make(spec, seed)
        else:
            module = _make(spec, seed)
        counts.append(sum(parameter.numel() for parameter in module.parameters()))
        names.extend(f"{spec.name}.{name}" for name, _ in module.named_parameters())
        shared.extend(holders.add(spec.name, module))
        parts.append(_signature(spec.name, module))
    return Inspection(
        parameter_counts=tuple(counts),
        parameter_names=tuple(names),
        shared=tuple(shared),
        fingerprint=_hash(parts),
    )


def shared_parameters(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, str, str]]:
    """Return (earlier layer, later layer, name in the later one) for parameters or buffers in the same storage."""
    holders = _Holders()
    return [found for name, module in layers for found in holders.add(name, module)]


def fingerprint(layers: Sequence[tuple[str, nn.Module]]) -> str:
    """Return a hash of layer names and of the names, shapes and dtypes of their parameters and buffers."""
    return _hash([_signature(name, module) for name, module in layers])


def _signature(layer: str, module: nn.Module) -> object:
    def described(tensors: Iterator[tuple[str, torch.Tensor]]) -> list[object]:
        return [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]

    return layer, described(module.named_parameters()), described(module.named_buffers())


def _hash(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class _Holders:
    """Remembers which layer holds which storage, as long as that storage lives."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}

    def add(self, layer: str, module: nn.Module) -> list[tuple[str, str, str]]:
        """Record a layer and return (earlier layer, this layer, name) for what an earlier one holds as well."""
        found = []
        tensors = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in tensors:
            # A tensor without memory (meta, empty) can only be shared as the same object.
            place = tensor.untyped_storage().data_ptr() or id(tensor)
            earlier = self._of.get(place)
            # A dead holder's place may have been given to a new tensor, which shares nothing.
            if earlier is None or earlier[1]() is None:
                self._of[place] = (layer, weakref.ref(tensor))
            elif earlier[0] != layer:
                found.append((earlier[0], layer, name))
        return found
