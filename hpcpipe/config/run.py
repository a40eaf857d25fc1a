"""The whole run file as one frozen object, and the checks that look at several sections at once.

It neither reads files nor knows where a value came from; `load` does.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import model_validator

from hpcpipe.config import toml
from hpcpipe.config.base import Mistakes, Section
from hpcpipe.config.data import DataConfig
from hpcpipe.config.model import ModelConfig
from hpcpipe.config.optimizer import AdamwConfig, ConstantRate, OptimizerConfig, RateConfig, SgdConfig
from hpcpipe.config.sections import (
    SPLIT_BY_HAND,
    SPLIT_BY_PLAN,
    CheckpointConfig,
    EvalConfig,
    LossConfig,
    PipelineConfig,
    RunSection,
    TransportConfig,
)


class RunConfig(Section):
    """A run file as resolved: every value given or defaulted, all checks passed."""

    run: RunSection
    """How long, where to, on what, and what to show."""
    model: ModelConfig
    """The model and its arguments."""
    loss: LossConfig = LossConfig()
    """What is minimised and what is reported."""
    data: DataConfig
    """The data, minibatch sizes and order."""
    pipeline: PipelineConfig = PipelineConfig()
    """The schedule, the staleness policy and the split."""
    optimizer: OptimizerConfig
    """The update rule."""
    lr_schedule: RateConfig = ConstantRate()
    """How the learning rate changes."""
    eval: EvalConfig = EvalConfig()
    """When the held-out data are scored."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written and which are kept."""
    transport: TransportConfig = TransportConfig()
    """How messages travel."""

    def to_toml(self) -> str:
        """Return the run file as resolved; loading the text again gives an equal configuration."""
        tables = self.model_dump()
        # A section reads best when the name that decides its other keys comes first.
        return toml.dump({key: {"name": table.get("name")} | table for key, table in tables.items()})

    def unsplit(self) -> RunConfig:
        """Return the same run with nothing said about how layers are dealt out to ranks."""
        fields = PipelineConfig.model_fields
        defaults = {key: fields[key].default for key in (*SPLIT_BY_PLAN, *SPLIT_BY_HAND)}
        return self.model_copy(update={"pipeline": self.pipeline.model_copy(update=defaults)})

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        found = tuple(_contradictions(self))
        if found:
            raise Mistakes(*found)
        return self


def _contradictions(config: RunConfig) -> Iterator[tuple[str, str]]:
    pipeline, data = config.pipeline, config.data
    if pipeline.microbatches > 1 and pipeline.schedule == "pipedream":
        yield (
            "pipeline.microbatches",
            f"must be 1 with schedule pipedream, whose unit is the minibatch, got {pipeline.microbatches}; "
            "use gpipe or 1f1b for microbatches",
        )
    if pipeline.microbatches > data.batch:
        yield (
            "pipeline.microbatches",
            f"{pipeline.microbatches} microbatches need as many rows, but data.batch is {data.batch}; "
            "raise data.batch or use fewer",
        )
    if pipeline.schedule == "pipedream" and pipeline.policy == "spectrain" and pipeline.stage_count != 1:
        yield from _nothing_to_predict_from(config.optimizer)


def _nothing_to_predict_from(optimizer: SgdConfig | AdamwConfig) -> Iterator[tuple[str, str]]:
    # A prediction along one raw gradient has a lower stability limit than none (delay 1: alpha below 1 - gamma).
    if isinstance(optimizer, SgdConfig):
        key, smoothing, usual = "optimizer.momentum", optimizer.momentum, "momentum = 0.9"
    else:
        key, smoothing, usual = "optimizer.betas", optimizer.betas[0], "betas = [0.9, 0.999]"
    if smoothing == 0:
        yield (
            key,
            "is 0, so policy spectrain would predict from one raw gradient, which makes training less stable; "
            f'use {usual}, or pipeline.policy = "stash"',
        )
