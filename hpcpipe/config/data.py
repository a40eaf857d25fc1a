"""The section data: one class for each built-in data set and one for a user's own.

Reading is the business of `hpcpipe.datasets`; nothing here touches a file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag, model_validator

from hpcpipe.config.base import Count, Fraction, Mistakes, ObjectName, Section, chosen_by_name
from hpcpipe.config.model import as_written

DATASETS = ("digits", "idx", "text", "synthetic")
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
Path = Annotated[str, Field(min_length=1)]


class _Data(Section):
    batch: Count = 32
    """Rows of a minibatch."""
    eval_batch: Count | None = None
    """Rows of a batch in evaluation; the same as batch when left out."""
    drop_last: bool = False
    """Leave out the short last minibatch of an epoch."""
    shuffle: bool = True
    """A new order in each epoch, decided by run.seed and the epoch alone."""

    @property
    def eval_rows(self) -> int:
        """Rows of a batch in evaluation."""
        return self.batch if self.eval_batch is None else self.eval_batch


class DigitsData(_Data):
    """[data] name = "digits": scikit-learn's 1,797 images of 8 by 8, ten classes."""

    name: Literal["digits"]
    """Which data."""
    eval_fraction: Share = 0.2
    """Share held out for evaluation; which images is fixed and does not depend on run.seed."""
    flat: bool = True
    """Rows of 64 numbers; false gives images of 1 by 8 by 8."""


class IdxData(_Data):
    """[data] name = "idx": images and labels in the file format of MNIST."""

    name: Literal["idx"]
    """Which data."""
    path: Path | None = None
    """Folder with train-images-idx3-ubyte[.gz] and its companions; Debian's Fashion-MNIST when left out."""
    size: Count | None = None
    """Pad the images with black to this side; as they are when left out."""
    channels: Count = 1
    """Repeat the grey image in this many channels."""
    limit: Count | None = None
    """Use only the first images of the training file; all when left out."""
    eval_limit: Count | None = None
    """Use only the first images of the test file; all when left out."""


class TextData(_Data):
    """[data] name = "text": bytes of a file or folder, cut into sequences; the target is the next byte."""

    name: Literal["text"]
    """Which data."""
    path: Path | None = None
    """A file, or a folder whose files are read in sorted order; Python's own standard library when left out."""
    pattern: Path = "*"
    """Which files of the folder, such as "*.txt"; the default corpus takes "*.py"."""
    sequence: Count = 128
    """Bytes of one sequence."""
    eval_fraction: Share = 0.05
    """Share of the text, at its end, held out for evaluation."""
    limit: Count | None = None
    """Use only this many bytes from the beginning; all when left out."""


class SyntheticData(_Data):
    """[data] name = "synthetic": random numbers, for benchmarks; there is nothing to learn in them."""

    name: Literal["synthetic"]
    """Which data."""
    shape: tuple[Count, ...] = (64,)
    """Shape of one row."""
    classes: Count = 10
    """Targets are drawn below this number."""
    vocab: Count | None = None
    """Make rows of tokens below this number, and as many targets; shape is then one length."""
    rows: Count = 4096
    """Rows of training data."""
    eval_data_rows: Annotated[int, Field(ge=0)] = 512
    """Rows of evaluation data."""

    @model_validator(mode="after")
    def _tokens_are_a_line(self) -> SyntheticData:
        if self.vocab is not None and len(self.shape) != 1:
            raise Mistakes(
                ("shape", f"must be one length when vocab is given, as in [128], got {list(self.shape)}")
            )
        return self


class UserData(_Data):
    """[data] name = "mypkg.mymodule:build": a user's own builder; all other keys are its arguments."""

    model_config = ConfigDict(extra="allow")

    name: ObjectName
    """The builder."""
    eval_fraction: Fraction = 0.1
    """Share of the rows held out, at the end, when the builder returns one data set alone."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The builder's arguments as they were written, lists as lists."""
        return {key: as_written(value) for key, value in (self.model_extra or {}).items()}


DataConfig = Annotated[
    Annotated[DigitsData, Tag("digits")]
    | Annotated[IdxData, Tag("idx")]
    | Annotated[TextData, Tag("text")]
    | Annotated[SyntheticData, Tag("synthetic")]
    | Annotated[UserData, Tag("user")],
    chosen_by_name(None, DATASETS, "user"),
]
