from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcpipe.config import IdxData, check_groups, load_run
from hpcpipe.datasets.build import build_dataset
from hpcpipe.datasets.protocol import DataDescription
from hpcpipe.models.build import build_layers, split_layers
from hpcpipe.models.layers import inspect_layers, make_layers
from hpcpipe.models.loss import make_loss

JOBS = Path(__file__).parents[2] / "jobs"
RUN_FILES = sorted(JOBS.glob("*.toml"))


@pytest.mark.parametrize("path", RUN_FILES, ids=[path.stem for path in RUN_FILES])
def test_a_run_file_names_a_model_that_its_data_fit_and_that_four_ranks_can_share(path: Path) -> None:
    config = load_run(path)
    if isinstance(config.data, IdxData):
        # What the images of Fashion-MNIST are, whether or not they are on this machine.
        description = DataDescription(input_shape=(1, 32, 32), classes=10)
        x, targets = torch.randn(4, 1, 32, 32), torch.tensor([0, 1, 2, 3])
    else:
        data = build_dataset(config.data, config.run.seed)
        description, x, targets = data.describe(), data.inputs(0)[0], data.targets(0)
    specs = build_layers(config.model, config.run.seed, description)
    inspection = inspect_layers(specs, config.run.seed)
    check_groups(inspection.parameter_names, config.optimizer.groups)
    assert len(split_layers(config.pipeline, inspection.parameter_counts, 4)) == 4

    for layer in make_layers(specs, config.run.seed):
        x = layer(x)
    loss = make_loss(config.loss)(x, targets)

    assert torch.isfinite(loss)


def test_there_is_a_run_file_for_each_kind_of_data() -> None:
    assert {load_run(path).data.name for path in RUN_FILES} >= {"digits", "idx", "text"}
