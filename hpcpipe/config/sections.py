"""The sections of the run file that are about the run itself: run, loss, pipeline, eval, checkpoint, transport.

Each key has its default, its meaning and its own check here; checks over several sections are in `run`.
"""

from __future__ import annotations

import re
import signal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_serializer, field_validator, model_validator

from hpcpipe.config.base import (
    LARGEST,
    Count,
    Mistakes,
    Names,
    NotNegative,
    Positive,
    Section,
    Whole,
    name_or_object,
    shown,
)
from hpcpipe.hints import did_you_mean

_CANNOT_BE_CAUGHT = ("SIGKILL", "SIGSTOP")
_TIME = re.compile(r"(?P<count>\d+\.?\d*|\.\d+) ?(?:(?P<s>s|sec|seconds?)|(?P<min>min|minutes?)|h|hours?)")


def _seconds(text: str) -> float:
    """The length of a time with its unit; 0.0 if it is none."""
    found = _TIME.fullmatch(text)
    if found is None:
        return 0.0
    return float(found["count"]) * (1 if found["s"] else 60 if found["min"] else 3600)


def _is_time(text: str) -> str:
    if not 0 < _seconds(text) < LARGEST:
        raise ValueError(f'must be a time with its unit, as in "120s", "5min" or "1.5h", got {shown(text)}')
    return text


class RunSection(Section):
    """[run]: how long, where to, on what, and what to show."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the initial weights, the data order and dropout."""
    out: Annotated[str, Field(min_length=1)]
    """Folder for metrics, summary and checkpoints; runs/<name of the run file> when left out."""
    epochs: Count = 1
    """Passes over the training data; the run ends here or at max_steps, whichever comes first."""
    max_steps: Count | None = None
    """Minibatches after which the run ends, at most; none when left out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the stages compute; auto takes a GPU where torch finds one."""
    threads: Count | None = None
    """Compute threads of each rank; left out, OMP_NUM_THREADS or what the rank was given of its host decides."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of weights and activations in the passes."""
    log_every: Count = 10
    """Minibatches between two lines of metrics."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """How progress is shown; auto is a bar on a terminal and lines in a batch log."""
    trace: bool = False
    """Write trace.json, a timeline of all ranks."""
    stop_signals: Names = ("SIGUSR1", "SIGTERM")
    """Signals that ask for a checkpoint and a clean end."""
    stop_before: Annotated[str, AfterValidator(_is_time)] | None = None
    """Stop so long before the end of a Slurm allocation, as in "120s", "5min" or "0.5h"; never when left out."""
    stall_warning_s: NotNegative = 60.0
    """Seconds without a message after which the waiting rank says what it waits for; 0 is never."""
    stall_abort_s: NotNegative = 600.0
    """Seconds without a message after which the job is ended; 0 is never."""
    init_from: Annotated[str, Field(min_length=1)] | None = None
    """Start from these weights: a safetensors file, a run folder or a checkpoint; none when left out."""

    @property
    def stop_before_s(self) -> float | None:
        """stop_before in seconds."""
        return None if self.stop_before is None else _seconds(self.stop_before)

    @field_validator("stop_signals")
    @classmethod
    def _signals_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = [name for name in signal.Signals.__members__ if name not in _CANNOT_BE_CAUGHT]
        for name in names:
            if name in _CANNOT_BE_CAUGHT:
                raise ValueError(f"{name} cannot be caught by a program; use SIGUSR1 or SIGTERM")
            if name not in known:
                raise ValueError(f"no such signal on this system: {shown(name)}{did_you_mean(name, known)}")
        return names

    @model_validator(mode="after")
    def _warning_before_abort(self) -> RunSection:
        if 0 < self.stall_abort_s < self.stall_warning_s:
            text = f"must be at least stall_warning_s ({self.stall_warning_s:g}), got {self.stall_abort_s:g}"
            raise Mistakes(("stall_abort_s", text))
        return self


LOSSES = ("cross_entropy",)
METRICS = ("accuracy", "perplexity")


def _metrics_exist(names: tuple[str, ...]) -> tuple[str, ...]:
    check = name_or_object(METRICS, "mypkg.mymodule:metric")
    return tuple(check(name) for name in names)


class LossConfig(Section):
    """[loss]: what is minimised and what an evaluation reports."""

    name: Annotated[str, AfterValidator(name_or_object(LOSSES, "mypkg.mymodule:loss"))] = "cross_entropy"
    """cross_entropy, or your own function of (output, targets) that returns the mean loss."""
    ignore_index: int | None = None
    """Target value that does not count (cross_entropy only); none when left out."""
    metrics: Annotated[Names, AfterValidator(_metrics_exist)] | None = None
    """Figures of an evaluation beside the loss; left out: perplexity for gpt, accuracy for the other built-ins."""

    @model_validator(mode="after")
    def _ignore_index_is_known(self) -> LossConfig:
        if self.ignore_index is not None and self.name not in LOSSES:
            raise Mistakes(
                ("ignore_index", f"only cross_entropy knows it; remove it, or see to it in {self.name}")
            )
        return self


_SIZE = re.compile(r"(\d+\.?\d*|\.\d+) ?[kKMGT]i?B")


def _is_size(text: str) -> str:
    if not _SIZE.fullmatch(text):
        raise ValueError(f'must be a size with its unit, as in "40GiB" or "512MB", got {shown(text)}')
    return text


SPLIT_BY_PLAN = ("plan", "memory_limit")
SPLIT_BY_HAND = ("stages", "balance", "replicas")
"""The keys of [pipeline] that decide how layers are dealt out, one way or the other."""


class PipelineConfig(Section):
    """[pipeline]: the schedule, what is done about staleness, and how the layers are dealt out."""

    schedule: Literal["pipedream", "gpipe", "1f1b"] = "pipedream"
    """pipedream is asynchronous; gpipe and 1f1b flush after each minibatch."""
    policy: Literal["stash", "vertical_sync", "none", "spectrain"] = "spectrain"
    """Which weights the passes of the asynchronous schedule use."""
    target: Literal["round_trip", "local", "damped"] = "round_trip"
    """Which coming version spectrain predicts."""
    microbatches: Count = 1
    """Parts of a minibatch in the synchronous schedules."""
    stages: Count | None = None
    """Number of stages; the number of ranks when left out."""
    replicas: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Ranks of each stage, as in [3, 1]: so many stages on so many ranks; one rank for each when left out."""
    balance: Literal["parameters"] | tuple[Count, ...] = "parameters"
    """Layers of each stage as a list of counts, or an even split by number of parameters."""
    plan: Annotated[str, Field(min_length=1)] | None = None
    """A plan file with the layers and ranks of each stage, or "auto" to profile and plan at the start."""
    memory_limit: Annotated[str, AfterValidator(_is_size)] | None = None
    """Memory of each rank that plan = "auto" must keep to, as in "40GiB"; none when left out."""
    derived: Literal["refuse", "keep_forward"] = "refuse"
    """What to do about saved copies derived from weights (autocast, weight_norm) under none and spectrain."""

    @property
    def stage_count(self) -> int | None:
        """Number of stages as far as the run file decides it; None where ranks or a plan do."""
        return self.stages if self.replicas is None else len(self.replicas)

    @field_validator("balance", mode="plain")
    @classmethod
    def _balance_is_counts(cls, value: Any) -> Any:
        counts = isinstance(value, (list, tuple)) and len(value) > 0
        if value == "parameters" or (counts and all(type(item) is int and item >= 1 for item in value)):
            return value if isinstance(value, str) else tuple(value)
        raise ValueError(
            f'must be "parameters" or the number of layers of each stage, as in [3, 2, 2], got {shown(value)}; '
            "no stage may be empty"
        )

    @field_serializer("balance", mode="plain")
    def _balance_as_it_is(self, value: str | tuple[int, ...]) -> Any:
        # The serializer of the union would warn of each member that the value is not.
        return value

    @model_validator(mode="after")
    def _one_split(self) -> PipelineConfig:
        counts = None if isinstance(self.balance, str) else self.balance
        if self.plan is not None:
            given = {"stages": self.stages, "balance": counts, "replicas": self.replicas}
            if also := [key for key, value in given.items() if value is not None]:
                raise Mistakes(
                    ("plan", f"decides {' and '.join(also)} itself; remove {'them' if also[1:] else 'it'}")
                )
        elif self.replicas is not None and self.stages not in (None, len(self.replicas)):
            raise Mistakes(
                ("replicas", f"is for {len(self.replicas)} stages, but stages is {self.stages}; remove stages")
            )
        elif self.stage_count is not None and counts is not None and len(counts) != self.stage_count:
            text = f"has {len(counts)} counts for {self.stage_count} stages; give one count for each stage"
            raise Mistakes(("balance", text))
        if self.memory_limit is not None and self.plan != "auto":
            raise Mistakes(("memory_limit", 'is kept by plan = "auto" only; set that or remove it'))
        return self


class EvalConfig(Section):
    """[eval]: when the held-out data are scored."""

    every: Whole = 0
    """Minibatches between two evaluations; 0 is at the end of each epoch."""
    batches: Count | None = None
    """Score at most this many batches; all when left out."""
    at_end: bool = True
    """Also evaluate when the run is done."""


class CheckpointConfig(Section):
    """[checkpoint]: when checkpoints are written and which are kept. A final one is always written."""

    every: Whole = 0
    """Minibatches between two checkpoints; 0 is only the final one."""
    minutes: Positive | None = None
    """Minutes between two checkpoints; left out, time does not matter."""
    auto: bool = False
    """Choose the interval from the measured cost of a write and mtbf_hours (Young/Daly)."""
    mtbf_hours: Positive | None = None
    """Expected hours between two failures of the job, for auto."""
    keep_last: Count = 2
    """Keep this many newest checkpoints."""
    keep_every: Whole = 0
    """Also keep the first checkpoint at or past each multiple of this many minibatches; 0 is none."""
    max_failures: Whole = 3
    """End the run after this many checkpoints in a row that could not be written; 0 is never."""
    cut: Literal["inflight", "drain"] = "inflight"
    """Store the minibatches in flight, or drain the pipeline first (needs less memory, costs time)."""
    file: Literal["rank", "shared"] = "rank"
    """One file a rank, or one for all that they wait for each other to write (needs h5py built with MPI)."""

    @property
    def repeats(self) -> bool:
        """Whether there are checkpoints before the final one."""
        return bool(self.every or self.minutes or self.auto)

    @model_validator(mode="after")
    def _one_kind_of_interval(self) -> CheckpointConfig:
        if self.auto and self.mtbf_hours is None:
            raise Mistakes(("mtbf_hours", "auto = true needs it; add mtbf_hours = 24.0 or what your machine has"))
        if self.mtbf_hours is not None and not self.auto:
            raise Mistakes(("mtbf_hours", "is used by auto = true only; set that or remove it"))
        if self.auto and (self.every or self.minutes is not None):
            raise Mistakes(("auto", "chooses the interval itself; remove every and minutes, or auto"))
        return self


class TransportConfig(Section):
    """[transport]: how messages travel."""

    cuda_aware: Literal["auto", "on", "off"] = "auto"
    """Give device buffers to MPI; auto asks the library, off stages through pinned host memory."""
    progress: Literal["layers", "actions"] = "layers"
    """Test pending requests between layers, or only between actions."""
    chunk_bytes: Annotated[int, Field(ge=1, lt=2**31)] = 2**30
    """Messages above this many bytes are sent in parts."""
    bucket_bytes: Annotated[int, Field(ge=1, lt=2**31)] = 25 * 2**20
    """Gradients of a replicated stage are all-reduced in parts of this many bytes, while others are computed."""
