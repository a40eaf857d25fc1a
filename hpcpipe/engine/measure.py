"""Measures a model for the planner: what each layer costs on this run's data, dtype and device.

Takes medians over whole sweeps, so that noise hits all layers alike, and parts what a pass costs into its layers
and what every stage pays beside them. Knows no plan: that is made from the profile (PipeDream, SOSP'19, section
3.1).
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypedDict, TypeVar

import torch

import hpcpipe
from hpcpipe.config import RunConfig
from hpcpipe.datasets.protocol import Dataset
from hpcpipe.engine.assemble import DTYPES, build_runners, lay_out
from hpcpipe.engine.batches import Batches
from hpcpipe.engine.clocks import clock_of
from hpcpipe.engine.messages import DEFAULT_MESSAGE_S, message_seconds
from hpcpipe.engine.objective import Objective
from hpcpipe.engine.plan import Plan
from hpcpipe.engine.resources import cuda_aware
from hpcpipe.engine.runner import StageRunner
from hpcpipe.engine.steering import Steering
from hpcpipe.engine.sweeps import Nothing, Sample, Sweeps
from hpcpipe.models.build import build_layers
from hpcpipe.models.layers import LayerSpec
from hpcpipe.models.loss import make_loss
from hpcpipe.planning.profile import LayerCost, Profile
from hpcpipe.schedule import Place, Schedule
from hpcpipe.schedule.policies import keeps_forward_weights
from hpcpipe.transport.world import World

DEFAULT_REPEATS = 20
WARM_UP = 3
"""The first sweep looks for what cannot be trained, the others fill caches and allocators."""
MINIBATCHES = 4
"""Different minibatches that the sweeps run on in turn."""

_T = TypeVar("_T")

Step = Callable[[int, int], None]
"""Told how many sweeps are done, and of how many."""


class Figures(TypedDict):
    """What one rank found; `times` are seconds, one a layer or one in all, by what they are of."""

    times: dict[str, list[float]]
    names: list[str]
    shared: list[list[int]]
    bytes: list[dict[str, int]]
    rows: int
    input_bytes: int
    about: dict[str, Any]


def measure(
    config: RunConfig,
    data: Dataset,
    world: World | None = None,
    *,
    device: torch.device,
    repeats: int = DEFAULT_REPEATS,
    concurrent: bool = False,
    step: Step = lambda done, total: None,
) -> Profile:
    """The profile of the model of `config` on `device`; every rank of `world` calls it and gets the same.

    `repeats`: sweeps that count. `concurrent`: all ranks measure at the same time, as they will compute at the
    same time, and the median over ranks counts; otherwise rank 0 measures and the others wait.

    One pass is one microbatch. With 2 ranks or more the cost of a message is measured between them.

    Raises ConfigError or ModelError for what cannot be built or trained; a layer that fails is named with the
    shapes of its inputs.
    """
    if world is None or world.size == 1:
        return _profile(_figures(config, data, None, device, repeats, step), message_s=None, ranks=1)
    message_s = message_seconds(world, device, cuda_aware=cuda_aware(config, world, device))
    # However long a sweep takes, nobody is lost.
    with world.waiter.patiently():
        if concurrent:
            mine = _figures(config, data, world, device, repeats, step)
            found = _median_over_ranks(world.all_gather_json(mine, what="the figures of all ranks"))
        else:
            alone = _figures(config, data, None, device, repeats, step) if world.rank == 0 else None
            found = world.broadcast_json(alone, what="rank 0 to measure the model")
    return _profile(found, message_s=message_s, ranks=world.size if concurrent else 1)


def parted(layers: Sequence[float], whole: float, overhead: float) -> tuple[list[float], float]:
    """What each layer costs and what a stage pays beside its layers, so that all layers in one stage cost `whole`.

    `layers`: seconds of each layer in a stage of its own. `overhead`: seconds of a stage that computes nothing. Of
    layers that take hardly longer than that, the shortest keeps half of its time.
    """
    overhead = min(overhead, min(layers) / 2, whole)
    own = [seconds - overhead for seconds in layers]
    total = sum(own)
    return [(whole - overhead) * (seconds / total) if total else 0.0 for seconds in own], overhead


def spread(values: Sequence[float]) -> float:
    """The interquartile range."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _figures(
    config: RunConfig, data: Dataset, world: World | None, device: torch.device, repeats: int, step: Step
) -> Figures:
    """Measure on this rank, in step with the others of `world` if there are any."""
    sweeps = WARM_UP + repeats
    mine = _together(world, "building the model", partial(_Measuring, config, data, device, sweeps))
    # Ranks whose order differs do not all do the same thing at the same time, as the stages of a pipeline do not.
    layers_first = world is None or world.rank % 2 == 0
    for done in range(sweeps):
        step(done, sweeps)
        # A layer that cannot be trained is found, and named, layer by layer.
        sweep = partial(mine.sweep, counts=done >= WARM_UP, layers_first=layers_first or done == 0)
        _together(world, f"sweep {done}", sweep)
    step(sweeps, sweeps)
    figures = mine.figures()
    del mine, sweep
    # Runners hold each other in circles, and the run that may follow needs their memory.
    gc.collect()
    return figures


def _together(world: World | None, what: str, act: Callable[[], _T]) -> _T:
    """What `act` returns; ranks of a world do it at the same time, and fail together."""
    with nullcontext() if world is None else world.together(what):
        return act()


class _Measuring:
    """A model under measurement on this rank."""

    def __init__(self, config: RunConfig, data: Dataset, device: torch.device, sweeps: int) -> None:
        # However the run splits the model, here it is one stage, and then one stage a layer.
        config = config.unsplit()
        self._config = config
        self._data = data
        self._device = device
        self._clock = clock_of(device)
        _, plan, schedule = lay_out(config, data, 1)
        # Every sweep makes an update, and the last of them still predicts.
        schedule = replace(schedule, minibatches=schedule.minibatches + sweeps + 1, drain_every=0)
        self._schedule = schedule
        self._plan = plan
        self._shared = plan.shared
        count = len(plan.names)
        split = replace(
            plan, bounds=tuple((index, index + 1) for index in range(count)), ranks_of_stage=((0,),) * count
        )
        if self._shared:
            # A runner takes the memory of its parameters, so that layers that share some are built apart.
            layers = [runner for place in split.places_of(0) for runner in self._build(split, [place])]
        else:
            layers = self._build(split, split.places_of(0))
        nothing = [LayerSpec(name="nothing", factory=Nothing)]
        idle = replace(plan, names=("nothing",), bounds=((0, 1),))
        self._predictions = 1 if schedule.predicts else 0
        self._sweeps = Sweeps(
            layers=layers,
            whole=self._build(plan, [Place(0)])[0],
            nothing=self._build(idle, [Place(0)], nothing)[0],
            objective=Objective(make_loss(config.loss), ()),
            clock=self._clock,
            substitute=_substitutes(schedule),
            predictions=self._predictions,
            accumulates=schedule.microbatches > 1,
            clips=config.optimizer.clip_norm is not None,
        )
        usable = range(min(MINIBATCHES, data.minibatches_per_epoch))
        self._minibatches = [j for j in usable if data.rows(j) == data.rows(0)]
        self._done = 0
        self._times: dict[str, list[Sequence[float]]] = {}

    def _build(
        self, plan: Plan, places: Sequence[Place], specs: Sequence[LayerSpec] | None = None
    ) -> list[StageRunner]:
        """Runners of a split of the model, or of `specs`."""
        config, schedule = self._config, replace(self._schedule, stages=plan.stages)
        if specs is None:
            # A user's builder may give modules instead of functions, and runners must not share them.
            specs = build_layers(config.model, config.run.seed, self._data.describe())
        runners, _ = build_runners(
            config,
            plan=plan,
            specs=specs,
            places=places,
            schedule=schedule,
            data=self._data,
            steering=Steering(schedule, every=0),
            device=self._device,
        )
        return list(runners.values())

    def sweep(self, *, counts: bool, layers_first: bool) -> None:
        """Run layer by layer and as a whole on the next minibatch; `counts`: and keep the times."""
        minibatch = self._minibatches[self._done % len(self._minibatches)]
        self._done += 1
        sample, data_s, targets_s = self._load(minibatch)
        parts: list[Callable[[Sample], Sequence[Any]]] = [self._sweeps.layers, self._sweeps.whole]
        found = {part.__name__: part(sample) for part in (parts if layers_first else reversed(parts))}
        idle = self._sweeps.nothing(sample)
        if counts:
            forward, backward = found["layers"]
            times = {
                "forward": forward,
                "backward": backward,
                "whole": found["whole"],
                "nothing": idle,
                "data": [data_s, targets_s],
            }
            for name, seconds in times.items():
                self._times.setdefault(name, []).append(seconds)

    def figures(self) -> Figures:
        """What was found."""
        sample, _, _ = self._load(self._minibatches[0])
        sizes = self._sweeps.weigh(sample)
        whole_forward, whole_backward, update = _medians(self._times["whole"])
        data_s, targets_s = _medians(self._times["data"])
        times = {"data": [data_s], "targets": [targets_s], "update": [update]}
        idle = _medians(self._times["nothing"])
        overheads = []
        for name, whole, beside in (("forward", whole_forward, idle[0]), ("backward", whole_backward, idle[1])):
            runs = self._times[name]
            seconds, overhead = parted(_medians(runs), whole, beside)
            times[name] = seconds
            times[f"{name}_spread"] = [spread(values) for values in zip(*runs, strict=True)]
            overheads.append(overhead)
        # A stage pays it once forward and once backward.
        times["overhead"] = [statistics.mean(overheads)]
        return Figures(
            times=times,
            names=list(self._plan.names),
            shared=[[self._plan.names.index(one), self._plan.names.index(two)] for one, two, _ in self._shared],
            bytes=[asdict(size) for size in sizes],
            rows=-(-self._data.rows(self._minibatches[0]) // self._schedule.microbatches),
            input_bytes=sum(t.numel() * t.element_size() for t in sample.inputs),
            about=self._about(),
        )

    def _load(self, minibatch: int) -> tuple[Sample, float, float]:
        """One pass worth of data, and the seconds that its inputs and its targets took."""
        # The loader keeps its last minibatch; a new one has to load it.
        batches = Batches(
            self._data,
            microbatches=self._schedule.microbatches,
            device=self._device,
            dtype=DTYPES[self._config.run.dtype],
        )
        began = time.perf_counter()
        inputs = batches.inputs(minibatch, 0)
        self._clock.settle()
        loaded = time.perf_counter()
        targets = batches.targets(minibatch, 0)
        self._clock.settle()
        ended = time.perf_counter()
        passes = batches.microbatches
        return Sample(minibatch, inputs, targets), (loaded - began) / passes, (ended - loaded) / passes

    def _about(self) -> dict[str, Any]:
        config, schedule = self._config, self._schedule
        return {
            "model": config.model.name,
            "fingerprint": self._plan.fingerprint,
            "batch": config.data.batch,
            "microbatches": schedule.microbatches,
            "schedule": schedule.name,
            "policy": None if schedule.synchronous else schedule.policy.value,
            "optimizer": config.optimizer.name,
            "predictions": self._predictions,
            "dtype": config.run.dtype,
            "device": self._device.type,
            "device_name": _device_name(self._device),
            "threads": torch.get_num_threads(),
            "sweeps": len(self._times["whole"]),
            "hpcpipe": hpcpipe.__version__,
            "torch": torch.__version__,
        }


def _profile(found: Figures, *, message_s: float | None, ranks: int) -> Profile:
    times, sizes = found["times"], found["bytes"]
    parameters = sum(size["parameter"] for size in sizes)
    # The update is one pass over memory: its time goes by bytes.
    update = times["update"][0] / parameters if parameters else 0.0
    names = found["names"]
    return Profile(
        layers=tuple(
            LayerCost(
                name=name,
                forward_s=times["forward"][index],
                backward_s=times["backward"][index],
                output_bytes=size["output"],
                gradient_bytes=size["gradient"],
                parameter_bytes=size["parameter"],
                buffer_bytes=size["buffer"],
                state_bytes=size["state"],
                saved_bytes=size["saved"],
                update_s=update * size["parameter"],
                forward_spread_s=times["forward_spread"][index],
                backward_spread_s=times["backward_spread"][index],
            )
            for index, (name, size) in enumerate(zip(names, sizes, strict=True))
        ),
        edges=tuple((index, index + 1) for index in range(len(names) - 1)),
        shared=tuple((earlier, later) for earlier, later in found["shared"]),
        rows=found["rows"],
        input_bytes=found["input_bytes"],
        pass_overhead_s=times["overhead"][0],
        data_s=times["data"][0],
        targets_s=times["targets"][0],
        message_s=DEFAULT_MESSAGE_S if message_s is None else message_s,
        about={
            **found["about"],
            "ranks_measuring": ranks,
            "message_s": "default" if message_s is None else "measured",
        },
    )


def _median_over_ranks(everyone: Sequence[Figures]) -> Figures:
    """The median of each time; all else is the same on all ranks."""
    names = everyone[0]["times"]
    return {**everyone[0], "times": {name: _medians([one["times"][name] for one in everyone]) for name in names}}


def _substitutes(schedule: Schedule) -> bool:
    """Whether backward passes run on other weights than their forward passes."""
    return not schedule.synchronous and not keeps_forward_weights(schedule.policy)


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*runs, strict=True)]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
