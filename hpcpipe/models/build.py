"""From the section model to a list of named layers: built-in models by name, or what a user's builder returns.

Sizes that the run file leaves out come from the data; sizes that contradict the data are refused here, before
any rank computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from hpcpipe.config.model import SMALLEST_VGG_INPUT, GptModel, MlpModel, ModelConfig, UserModel, VggModel
from hpcpipe.config.sections import PipelineConfig
from hpcpipe.datasets.protocol import DataDescription
from hpcpipe.errors import ModelError
from hpcpipe.models.gpt import gpt_layers
from hpcpipe.models.layers import LayerSpec, check_names
from hpcpipe.models.mlp import mlp_layers
from hpcpipe.models.split import split, split_counts
from hpcpipe.models.vgg import vgg_layers
from hpcpipe.seeding import seeded
from hpcpipe.user_code import call_builder


def build_layers(model: ModelConfig, seed: int, data: DataDescription | None = None) -> list[LayerSpec]:
    """Return the model's layers in order. Built-in ones are built later, by `make_layers`.

    Raises ModelError: a size is missing or contradicts the data, or a user's builder cannot be imported, does not
    take an argument, or returns no list of layers.
    """
    if isinstance(model, UserModel):
        specs = _user_layers(model, seed, data)
    elif isinstance(model, GptModel):
        specs = _gpt(model, data)
    elif isinstance(model, VggModel):
        specs = _vgg(model, data)
    else:
        specs = _mlp(model, data)
    check_names([spec.name for spec in specs])
    return specs


def split_layers(pipeline: PipelineConfig, parameter_counts: Sequence[int], stages: int) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each stage's layers, as [pipeline] asks.

    Raises ModelError when there are more stages than layers or `balance` does not fit.
    """
    if isinstance(pipeline.balance, str):
        return split(parameter_counts, stages)
    if len(pipeline.balance) != stages:
        raise ModelError(
            f"pipeline.balance: {list(pipeline.balance)} is for {len(pipeline.balance)} stages, but there are "
            f"{stages}; start as many ranks as it has counts, or change it"
        )
    return split_counts(pipeline.balance, len(parameter_counts))


def _mlp(model: MlpModel, data: DataDescription | None) -> list[LayerSpec]:
    _wants_tokens(model.name, data, wanted=False)
    size = None if data is None else math.prod(data.input_shape)
    return mlp_layers(
        model,
        in_features=_agreed("in_features", model.in_features, size),
        out_features=_at_least("out_features", model.out_features, data),
    )


def _vgg(model: VggModel, data: DataDescription | None) -> list[LayerSpec]:
    _wants_tokens(model.name, data, wanted=False)
    shape: tuple[int | None, ...] = (None, None, None) if data is None else data.input_shape
    if len(shape) != 3 or shape[1] != shape[2]:
        raise ModelError(f"model.name: {model.name} needs square images, but a row of the data has shape {shape}")
    size = _agreed("size", model.size, shape[1])
    if size % SMALLEST_VGG_INPUT:
        padded = math.ceil(size / SMALLEST_VGG_INPUT) * SMALLEST_VGG_INPUT
        text = f"{model.name} needs a multiple of {SMALLEST_VGG_INPUT}, but the images have {size}"
        raise ModelError(f"model.size: {text}; pad them with data.size = {padded}")
    return vgg_layers(
        model,
        channels=_agreed("channels", model.channels, shape[0]),
        size=size,
        classes=_at_least("classes", model.classes, data),
    )


def _gpt(model: GptModel, data: DataDescription | None) -> list[LayerSpec]:
    _wants_tokens(model.name, data, wanted=True)
    sequence = None if data is None else data.input_shape[0]
    context = sequence if model.context is None else model.context
    if context is None:
        raise ModelError("model.context: missing, and there are no data to take it from; give it a value")
    if sequence is not None and sequence > context:
        text = f"sequences of {sequence} tokens do not fit in a context of {context}"
        raise ModelError(f"model.context: {text}; raise it or lower data.sequence")
    return gpt_layers(model, vocab=_at_least("vocab", model.vocab, data), context=context)


def _wants_tokens(name: str, data: DataDescription | None, *, wanted: bool) -> None:
    if data is not None and data.tokens != wanted:
        kinds = ("tokens", "numbers") if wanted else ("numbers", "tokens")
        text = f"{name} takes {kinds[0]}, but the data are {kinds[1]}"
        raise ModelError(f"model.name: {text}; choose another model or other data")


def _agreed(key: str, given: int | None, found: int | None) -> int:
    """Return the size that the run file and the data agree on."""
    if given is not None and found is not None and given != found:
        raise ModelError(
            f"model.{key}: is {given}, but the data have {found}; remove the key to take it from them"
        )
    value = given if given is not None else found
    if value is None:
        raise ModelError(f"model.{key}: missing, and the data do not tell it; give it a value")
    return value


def _at_least(key: str, given: int | None, data: DataDescription | None) -> int:
    """Return the number of outputs; more than the data have is allowed."""
    found = None if data is None else data.classes
    if given is not None and found is not None and given < found:
        text = f"is {given}, but the data have targets up to {found - 1}"
        raise ModelError(f"model.{key}: {text}; raise it to at least {found}")
    return _agreed(key, given, found if given is None else None)


_ACCEPTED = "an nn.Sequential, a list of (name, module or function that builds one), or a list of modules"


def _user_layers(model: UserModel, seed: int, data: DataDescription | None) -> list[LayerSpec]:
    with seeded(seed, "model", model.name):
        built = call_builder(
            model.name, model.arguments, section="model", error=ModelError, offered={"data": data, "seed": seed}
        )
    return layers_of(built, model.name)


def layers_of(built: Any, source: str) -> list[LayerSpec]:
    """Return the layers of what a builder returned; `source` names the builder in messages.

    Raises ModelError when it is none of the accepted forms.
    """
    if isinstance(built, nn.Sequential):
        if type(built).forward is not nn.Sequential.forward:
            text = f"{type(built).__name__} has a forward of its own, which a split would skip"
            raise ModelError(f"model.name: {source} returned a Sequential, but {text}; return {_ACCEPTED}")
        # Not named_children, which leaves out a module that stands in two places.
        named: list[Any] = list(built._modules.items())
    elif isinstance(built, (list, tuple, nn.ModuleList)):
        named = [item if isinstance(item, tuple) else (str(place), item) for place, item in enumerate(built)]
    else:
        raise ModelError(f"model.name: {source} returned a {type(built).__name__}; it must return {_ACCEPTED}")
    if not named:
        raise ModelError(f"model.name: {source} returned no layers; it must return {_ACCEPTED}")
    return [_user_layer(place, item, source) for place, item in enumerate(named)]


def _user_layer(place: int, item: Any, source: str) -> LayerSpec:
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
        shape = f"a tuple of {len(item)}" if isinstance(item, tuple) else f"a {type(item).__name__}"
        raise ModelError(
            f"model.name: item {place} of what {source} returned is {shape}; it must return {_ACCEPTED}"
        )
    name, layer = item
    if isinstance(layer, nn.Module):
        return LayerSpec(name=name, factory=lambda: layer)
    if callable(layer):
        return LayerSpec(name=name, factory=layer)
    raise ModelError(
        f"model.name: layer {name!r} of {source} is a {type(layer).__name__}; it must return {_ACCEPTED}"
    )
