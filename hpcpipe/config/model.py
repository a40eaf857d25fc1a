"""The section model: one class for each built-in model and one for a user's own.

Sizes that are left out are taken from the data when the model is built. Building is the business of
`hpcpipe.models`; nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag, model_validator

from hpcpipe.config.base import Count, Fraction, Mistakes, ObjectName, Positive, Section, chosen_by_name

MODELS = ("mlp", "vgg11", "vgg16", "gpt")
SMALLEST_VGG_INPUT = 32
"""VGG halves its input five times, so its side is a multiple of this."""


class MlpModel(Section):
    """[model] name = "mlp": linear layers with an activation between."""

    name: Literal["mlp"]
    """Which model."""
    in_features: Count | None = None
    """Numbers in one row of input; taken from the data when left out."""
    hidden: tuple[Count, ...] | None = None
    """Width of each hidden layer; instead of width and depth."""
    width: Count | None = None
    """Width of all hidden layers; 128 when left out."""
    depth: Annotated[int, Field(ge=0)] | None = None
    """Number of hidden layers; 3 when left out."""
    out_features: Count | None = None
    """Outputs; the number of classes of the data when left out."""
    activation: Literal["tanh", "relu", "gelu"] = "relu"
    """After each hidden layer."""
    dropout: Fraction = 0.0
    """Share of each hidden layer's outputs set to zero in training."""
    batchnorm: bool = False
    """BatchNorm before each activation."""

    @model_validator(mode="after")
    def _hidden_or_width(self) -> MlpModel:
        if self.hidden is not None and (self.width is not None or self.depth is not None):
            raise Mistakes(("hidden", "already names every width; remove width and depth, or hidden"))
        return self

    @property
    def hidden_widths(self) -> tuple[int, ...]:
        """Width of each hidden layer, however it was given."""
        if self.hidden is not None:
            return self.hidden
        return (128 if self.width is None else self.width,) * (3 if self.depth is None else self.depth)


class VggModel(Section):
    """[model] name = "vgg11" or "vgg16" (Simonyan and Zisserman, configurations A and D)."""

    name: Literal["vgg11", "vgg16"]
    """Which model."""
    channels: Count | None = None
    """Channels of the input; taken from the data when left out."""
    size: Count | None = None
    """Side of the square input, a multiple of 32; taken from the data when left out."""
    classes: Count | None = None
    """Outputs; the number of classes of the data when left out."""
    width: Positive = 1.0
    """Multiplies the channels of every layer; 1.0 is the published model, 64 to 512 channels."""
    classifier: Count | None = None
    """Width of fc6 and fc7; 4096 times width when left out."""
    batchnorm: bool = False
    """BatchNorm after each convolution."""
    dropout: Fraction = 0.5
    """Share of the outputs of fc6 and fc7 set to zero in training."""

    @model_validator(mode="after")
    def _size_is_a_multiple(self) -> VggModel:
        if self.size is not None and self.size % SMALLEST_VGG_INPUT:
            raise Mistakes(("size", f"must be a multiple of {SMALLEST_VGG_INPUT}, got {self.size}"))
        return self


class GptModel(Section):
    """[model] name = "gpt": a decoder with learned positions, pre-norm blocks and a head of its own (untied)."""

    name: Literal["gpt"]
    """Which model."""
    vocab: Count | None = None
    """Number of tokens; taken from the data when left out."""
    context: Count | None = None
    """Longest sequence; the data's sequence when left out."""
    width: Count = 128
    """Width of the residual stream."""
    heads: Count = 4
    """Attention heads; width must be a multiple."""
    depth: Count = 4
    """Number of blocks."""
    mlp_ratio: Positive = 4.0
    """Width of a block's MLP as a multiple of width."""
    dropout: Fraction = 0.0
    """Dropout after the embedding, in the attention and on each residual branch."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> GptModel:
        if self.width % self.heads:
            raise Mistakes(("heads", f"must divide width ({self.width}), got {self.heads}"))
        return self


class UserModel(Section):
    """[model] name = "mypkg.mymodule:build": a user's own builder; all other keys are its arguments."""

    model_config = ConfigDict(extra="allow")

    name: ObjectName
    """The builder."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The builder's arguments as they were written, lists as lists."""
        return {key: as_written(value) for key, value in (self.model_extra or {}).items()}


def as_written(value: Any) -> Any:
    """Return a value of the run file with its lists as lists again."""
    if isinstance(value, tuple):
        return [as_written(item) for item in value]
    if isinstance(value, dict):
        return {key: as_written(item) for key, item in value.items()}
    return value


ModelConfig = Annotated[
    Annotated[MlpModel, Tag("mlp")]
    | Annotated[VggModel, Tag("vgg11")]
    | Annotated[VggModel, Tag("vgg16")]
    | Annotated[GptModel, Tag("gpt")]
    | Annotated[UserModel, Tag("user")],
    chosen_by_name(None, MODELS, "user"),
]
