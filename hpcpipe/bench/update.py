"""Measures the fused update against torch and against the memory bandwidth of the machine, all in one run.

The case is SGD with momentum and one prediction, version t kept: the compiled rule writes version t+1 elsewhere,
torch copies version t away first. It measures time alone; that results agree is the business of the tests.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch

__all__ = ["bench_update", "update"]

MOMENTUM = 0.9
LEARNING_RATE = 0.01
DISTANCE = 3
LARGEST_TENSOR = 1 << 20
STREAMS = 6
"""Reads g, v, W; writes v, W', Ŵ."""


def bench_update(
    parameters: int = 64 << 20,
    threads: Sequence[int] = (1, 2),
    repeats: int = 7,
    device: str = "cpu",
) -> dict[str, Any]:
    """Time one update of all parameters: compiled, by torch, and a triad with as many streams, taking turns.

    Args:
        parameters: number of float32 parameters, split into tensors of at most 1 Mi elements; 1024 or more.
        threads: thread counts, one result each; a CUDA device takes the first only.
        repeats: rounds; each round times every contender once.
        device: "cpu", "cuda" or "cuda:1".

    Returns:
        parameters, device, target (instruction set or device name) and threads: thread count -> medians as
        speedup_over_torch, fraction_of_triad, ours_ms, torch_ms, triad_ms, triad_gb_s (10^9 bytes a second),
        torch_variant.

    Raises:
        ConfigError: the extension cannot be used on that device.
    """
    import torch

    from hpcpipe.errors import ConfigError
    from hpcpipe.optim import native

    if parameters < 1024 or repeats < 1 or not threads or min(threads) < 1:
        raise ConfigError("bench update needs 1024 or more parameters, 1 or more repeats and 1 or more threads")
    place = torch.device(device)
    reason = native.available(place.type)
    if reason is not None:
        raise ConfigError(f"bench update needs the compiled update: {reason}")
    case = _Case(parameters, place)
    core = native.extension()
    before = torch.get_num_threads(), core.get_threads()
    results: dict[str, Any] = {}
    try:
        for count in threads if place.type == "cpu" else threads[:1]:
            torch.set_num_threads(count)
            core.set_threads(count)
            results[str(count)] = _measure(case, repeats)
    finally:
        torch.set_num_threads(before[0])
        core.set_threads(before[1])
    target = native.cpu_target() if place.type == "cpu" else torch.cuda.get_device_name(place)
    return {"parameters": case.numel, "device": str(place), "target": target, "threads": results}


class _Case:
    """Buffers of both sides, and one callable per contender."""

    def __init__(self, parameters: int, device: torch.device) -> None:
        import torch

        from hpcpipe.optim.flat import FlatLayout
        from hpcpipe.optim.native import NativeRule
        from hpcpipe.optim.prediction import coefficients
        from hpcpipe.optim.rules import Output, SgdOptions

        count = max(1, -(-parameters // LARGEST_TENSOR))
        shape = (parameters // count // 16 * 16,)
        layout = FlatLayout([(f"p{i}", shape, 0) for i in range(count)])
        self.numel = layout.numel
        self.device = device
        self._rule = NativeRule([SgdOptions(momentum=MOMENTUM)], layout)
        self._flats = [layout.allocate(device).normal_() for _ in range(4)]
        predicted = self._flats[3]
        self._gradients = [torch.randn(shape, device=device) for _ in range(count)]
        self._coef = coefficients("local", DISTANCE, [LEARNING_RATE] * DISTANCE)[1]
        self._outputs = [Output(buffer=predicted, factor=(1.0,), coef=(self._coef,))]
        self._flat_gradient = torch.randn(layout.numel, device=device)

        self._parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for _ in range(count)]
        self._stash = [torch.empty(shape, device=device) for _ in range(count)]
        self._predicted = [torch.empty(shape, device=device) for _ in range(count)]
        self._velocities = [torch.randn(shape, device=device) for _ in range(count)]
        self.torch_variants: dict[str, Callable[[], None]] = {}
        for kind in ("fused", "foreach"):
            optimizer = torch.optim.SGD(self._parameters, lr=LEARNING_RATE, momentum=MOMENTUM, **{kind: True})
            for parameter, gradient, velocity_part in zip(
                self._parameters, self._gradients, self._velocities, strict=True
            ):
                parameter.grad = gradient
                optimizer.state[parameter]["momentum_buffer"] = velocity_part
            for name, predict in (("copy+add", self._copy_add), ("add.out", self._add_out)):
                self.torch_variants[f"SGD({kind}=True), prediction by foreach {name}"] = self._torch_step(
                    optimizer, predict
                )

    def ours(self) -> None:
        weights, next_weights, velocity, _ = self._flats
        self._rule.step(
            gradients=self._gradients,
            weights=weights,
            next_weights=next_weights,
            state={"momentum_buffer": velocity},
            step=1,
            learning_rates=(LEARNING_RATE,),
            outputs=self._outputs,
        )

    def triad(self) -> None:
        from hpcpipe.optim.native import triad

        weights, next_weights, velocity, predicted = self._flats
        triad(self._flat_gradient, velocity, weights, next_weights, predicted)

    def _torch_step(self, optimizer: torch.optim.SGD, predict: Callable[[], None]) -> Callable[[], None]:
        import torch

        @torch.no_grad()
        def step() -> None:
            torch._foreach_copy_(self._stash, list(self._parameters))
            optimizer.step()
            predict()

        return step

    def _copy_add(self) -> None:
        import torch

        torch._foreach_copy_(self._predicted, list(self._parameters))
        torch._foreach_add_(self._predicted, self._velocities, alpha=-self._coef)

    def _add_out(self) -> None:
        import torch

        torch.ops.aten._foreach_add.List_out(
            list(self._parameters), self._velocities, alpha=-self._coef, out=self._predicted
        )


def _measure(case: _Case, repeats: int) -> dict[str, Any]:
    contenders = {"ours": case.ours, "triad": case.triad, **case.torch_variants}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(repeats + 1):
        for name, run in contenders.items():
            elapsed = _timed(run, case.device)
            # The first round warms caches, page tables and thread pools.
            if round_ > 0:
                times[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in times.items()}
    variant = min(case.torch_variants, key=medians.__getitem__)
    return {
        "speedup_over_torch": medians[variant] / medians["ours"],
        "fraction_of_triad": medians["triad"] / medians["ours"],
        "ours_ms": medians["ours"] * 1e3,
        "torch_ms": medians[variant] * 1e3,
        "triad_ms": medians["triad"] * 1e3,
        "triad_gb_s": STREAMS * 4 * case.numel / medians["triad"] / 1e9,
        "torch_variant": variant,
    }


def _timed(run: Callable[[], None], device: torch.device) -> float:
    """Return the seconds that one run takes, on CUDA by events."""
    import torch

    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    with torch.cuda.device(device):
        begin.record()
        run()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@click.command()
@click.option("--parameters", type=click.IntRange(min=1024), default=64 << 20, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), multiple=True, default=(1, 2), show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:INDEX")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def update(parameters: int, threads: tuple[int, ...], repeats: int, device: str, as_json: bool) -> None:
    """Time the fused update against torch and a memory triad."""
    result = bench_update(parameters, threads, repeats, device)
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(
        f"SGD with momentum and one prediction, {result['parameters'] / 2**20:g} Mi parameters "
        f"on {result['device']} ({result['target']})"
    )
    for count, row in result["threads"].items():
        click.echo(
            f"{count} thread{'s' if int(count) > 1 else ''}: {row['ours_ms']:.1f} ms, "
            f"{row['speedup_over_torch']:.2f} times as fast as torch "
            f"({row['torch_ms']:.1f} ms, {row['torch_variant']}), "
            f"{row['fraction_of_triad']:.2f} of a triad at {row['triad_gb_s']:.1f} GB/s"
        )
