"""The CUDA kernels against the CPU kernels, which share their arithmetic, and against the twin on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpipe.bench.update import bench_update
from hpcpipe.optim import native, twin
from hpcpipe.optim.flat import FlatLayout
from hpcpipe.optim.rules import AdamOptions, Output, RuleOptions, SgdOptions, make_rule

REASON = native.available("cuda") if torch.cuda.is_available() else "no CUDA device"
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"CUDA update not available: {REASON}")

SHAPES: list[tuple[int, ...]] = [(7, 13), (), (1,), (300, 130), (0, 4), (8193,), (4, 4, 8)]
CASES: list[RuleOptions] = [
    [SgdOptions(), SgdOptions(weight_decay=0.1)],
    [SgdOptions(momentum=0.9, nesterov=True), SgdOptions(momentum=0.5, dampening=0.3, maximize=True)],
    [AdamOptions(), AdamOptions(betas=(0.3, 0.9), decoupled=False)],
]


def run(options: RuleOptions, device: str, native_rule: bool, dtype: torch.dtype, shift: int) -> list[Tensor]:
    """Five updates with a prediction and a bfloat16 copy; returns all buffers on the CPU."""
    layout = FlatLayout([(f"p{i}", shape, i % 2) for i, shape in enumerate(SHAPES)])
    make: Any = native.make if native_rule else twin.make
    rule = make(options, layout)
    generator = torch.Generator().manual_seed(0)
    weights, spare = layout.allocate(device), layout.allocate(device)
    for view in layout.view_list(weights):
        view.copy_(torch.randn(view.shape, generator=generator))
    state = {name: layout.allocate(device) for name in rule.state_names}
    predicted, short = layout.allocate(device), layout.allocate(device, torch.bfloat16)
    coef = (0.25, 0.05) if rule.state_names else (0.0, 0.0)
    outputs = [
        Output(buffer=predicted, factor=(0.999, 1.0), coef=coef),
        Output(buffer=short, factor=(1.0, 1.0), coef=(0.0, 0.0)),
    ]
    for step in range(5):
        gradients: list[Tensor | None] = []
        for slot in layout.slots:
            memory = torch.empty(slot.numel + shift, dtype=dtype, device=device)[shift:]
            memory.copy_(torch.randn(slot.numel, generator=generator))
            gradients.append(memory.view(slot.shape))
        gradients[step] = None
        rule.step(
            gradients=gradients,
            weights=weights,
            next_weights=spare,
            state=state,
            step=step,
            learning_rates=(0.1, 0.03),
            grad_scale=0.7,
            outputs=outputs,
        )
        weights, spare = spare, weights
    return [flat.cpu() for flat in (weights, *state.values(), predicted, short)]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_cuda_gives_the_bits_of_the_cpu_kernels(options: RuleOptions, dtype: torch.dtype, shift: int) -> None:
    if native.cpu_target() == "generic":
        pytest.skip("the CPU kernels of this processor do not fuse multiply-adds")
    on_cpu = run(options, "cpu", True, dtype, shift)
    on_cuda = run(options, "cuda", True, dtype, shift)
    for expected, actual in zip(on_cpu, on_cuda, strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_cuda_is_close_to_the_twin_on_the_device(options: RuleOptions) -> None:
    for expected, actual in zip(
        run(options, "cuda", False, torch.float32, 0), run(options, "cuda", True, torch.float32, 0), strict=True
    ):
        tolerance = 1e-2 if expected.dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(expected.float(), actual.float(), rtol=tolerance, atol=tolerance)


def test_an_update_follows_the_current_stream() -> None:
    layout = FlatLayout([("w", (1 << 22,), 0)])
    rule, note = make_rule([SgdOptions()], layout, device="cuda")
    assert note is None
    weights = layout.allocate("cuda")
    gradient = torch.zeros(1 << 22, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(20):
            gradient.add_(1)
            rule.step(
                gradients=[gradient],
                weights=weights,
                next_weights=weights,
                state={},
                step=step,
                learning_rates=(1.0,),
            )
    stream.synchronize()
    assert bool((weights == -210).all())


def test_one_table_serves_two_streams_in_turn() -> None:
    layout = FlatLayout([("w", (1 << 20,), 0)])
    rule = native.make([SgdOptions()], layout)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    weights = [layout.allocate("cuda") for _ in streams]
    gradients = [torch.full((1 << 20,), float(i + 1), device="cuda") for i in range(2)]
    torch.cuda.synchronize()
    for step in range(10):
        for stream, flat, gradient in zip(streams, weights, gradients, strict=True):
            with torch.cuda.stream(stream):
                rule.step(
                    gradients=[gradient],
                    weights=flat,
                    next_weights=flat,
                    state={},
                    step=step,
                    learning_rates=(1.0,),
                )
    torch.cuda.synchronize()
    assert bool((weights[0] == -10).all())
    assert bool((weights[1] == -20).all())


def test_a_gradient_on_the_host_is_named() -> None:
    layout = FlatLayout([("w", (3,), 0)])
    rule = native.make([SgdOptions()], layout)
    weights = layout.allocate("cuda")
    with pytest.raises(ValueError, match="gradient of 'w' has shape"):
        rule.step(
            gradients=[torch.zeros(3)],
            weights=weights,
            next_weights=weights,
            state={},
            step=0,
            learning_rates=(0.1,),
        )


def test_the_benchmark_runs_on_the_device() -> None:
    result = bench_update(parameters=1 << 20, threads=(1,), repeats=2, device="cuda")
    assert result["threads"]["1"]["ours_ms"] > 0
