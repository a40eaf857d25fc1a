"""The run file: its sections, their defaults and checks, and loading it with overrides.

Everything here is pure Python: neither torch nor MPI is imported, so that a run file can be checked on a login
node. Names of models and data are only checked for their form; the builders import what they name.
"""

from __future__ import annotations

from hpcpipe.config.data import DataConfig, DigitsData, IdxData, SyntheticData, TextData, UserData
from hpcpipe.config.load import load_run, parse_run
from hpcpipe.config.model import GptModel, MlpModel, ModelConfig, UserModel, VggModel
from hpcpipe.config.optimizer import (
    AdamwConfig,
    ConstantRate,
    CosineRate,
    LinearRate,
    OptimizerConfig,
    ParameterGroup,
    RateConfig,
    SgdConfig,
    StepRate,
    check_groups,
    group_of,
)
from hpcpipe.config.run import RunConfig
from hpcpipe.config.sections import (
    CheckpointConfig,
    EvalConfig,
    LossConfig,
    PipelineConfig,
    RunSection,
    TransportConfig,
)

__all__ = [
    "AdamwConfig",
    "CheckpointConfig",
    "ConstantRate",
    "CosineRate",
    "DataConfig",
    "DigitsData",
    "EvalConfig",
    "GptModel",
    "IdxData",
    "LinearRate",
    "LossConfig",
    "MlpModel",
    "ModelConfig",
    "OptimizerConfig",
    "ParameterGroup",
    "PipelineConfig",
    "RateConfig",
    "RunConfig",
    "RunSection",
    "SgdConfig",
    "StepRate",
    "SyntheticData",
    "TextData",
    "TransportConfig",
    "UserData",
    "UserModel",
    "VggModel",
    "check_groups",
    "group_of",
    "load_run",
    "parse_run",
]
