"""Measuring a model on a GPU: times come from the device's own clock, bytes are those of the CPU."""

from __future__ import annotations

import torch

from hpcpipe.datasets.build import build_dataset
from hpcpipe.engine.measure import measure
from tests.oracle.runs import configured
from tests.unit.measured_nets import net, profile_of


def test_a_model_is_measured_on_the_device_that_trains_it() -> None:
    config = configured(**net("build_chain"), run={"device": "cuda"})
    torch.cuda.init()
    found = measure(config, build_dataset(config.data, config.run.seed), device=torch.device("cuda", 0), repeats=3)
    on_cpu = profile_of(configured(**net("build_chain")))
    assert found.about["device"] == "cuda"
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in found.layers)
    assert [(layer.output_bytes, layer.gradient_bytes, layer.parameter_bytes) for layer in found.layers] == [
        (layer.output_bytes, layer.gradient_bytes, layer.parameter_bytes) for layer in on_cpu.layers
    ]
