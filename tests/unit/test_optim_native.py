"""The compiled rule against the torch twin.

SGD gives equal bits where torch's own kernels fuse multiply-adds, and so does Adam's state. Adam's step passes
through a square root that torch takes from MKL, which may be one unit in the last place off, and divisions carry
that on.
"""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpipe.errors import ConfigError
from hpcpipe.optim import native, twin
from hpcpipe.optim.flat import FlatLayout
from hpcpipe.optim.rules import AdamOptions, Output, RuleOptions, SgdOptions, UpdateRule

pytestmark = pytest.mark.skipif(native.available() is not None, reason=f"no extension: {native.available()}")

EPS = torch.finfo(torch.float32).eps
SHAPES: list[tuple[int, ...]] = [(7, 13), (), (1,), (16,), (33, 65), (0, 4), (31,), (4, 4, 8)]
RATES = (0.1, 0.03)
FACTOR, COEF = (0.999, 1.0), (0.25, 0.05)

SGD_CASES: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"momentum": 0.5, "maximize": True},
]
ADAM_CASES: list[dict[str, Any]] = [
    {},
    {"betas": (0.3, 0.9), "weight_decay": 0.1, "maximize": True},
    {"decoupled": False, "weight_decay": 0.1},
]
ALL_CASES: list[RuleOptions] = [
    *[[SgdOptions(**case), SgdOptions(**{**case, "weight_decay": 0.2})] for case in SGD_CASES],
    *[[AdamOptions(**case), AdamOptions(**{**case, "weight_decay": 0.0})] for case in ADAM_CASES],
]


@pytest.fixture(autouse=True)
def unchanged_settings() -> Iterator[None]:
    core = native.extension()
    threads, target = core.get_threads(), core.cpu_target()
    yield
    core.set_threads(threads)
    core.select_cpu_target(target)


@pytest.fixture
def layout() -> FlatLayout:
    return FlatLayout([(f"p{i}", shape, i % 2) for i, shape in enumerate(SHAPES)])


def alike_targets() -> list[str]:
    """The instruction sets of this processor that fuse multiply-adds exactly if torch's kernels in use do."""
    if native.available() is not None:
        return []
    core = native.extension()
    best = core.cpu_target()
    found = [target for target in ("avx512", "avx2", "generic") if core.select_cpu_target(target)]
    core.select_cpu_target(best)
    if platform.machine() not in ("x86_64", "AMD64"):
        return found
    torch_fuses = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return [target for target in found if (target != "generic") == torch_fuses]


TARGETS = alike_targets()


def gradients_of(layout: FlatLayout, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(slot.shape, generator=generator).to(dtype) for slot in layout.slots]


def random_flat(layout: FlatLayout, seed: int) -> Tensor:
    flat = layout.allocate()
    flat.copy_(torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed)))
    return flat


class Side:
    """Buffers of one rule: weights, spare, state, a float32 prediction and a bfloat16 copy."""

    def __init__(self, rule: UpdateRule, layout: FlatLayout) -> None:
        self.rule = rule
        self.layout = layout
        self.weights, self.spare = random_flat(layout, 0), layout.allocate()
        self.state = {name: layout.allocate() for name in rule.state_names}
        self.predicted = layout.allocate()
        self.short = layout.allocate(dtype=torch.bfloat16)
        predicts = bool(rule.state_names)
        self.outputs = [
            Output(buffer=self.predicted, factor=FACTOR, coef=COEF if predicts else (0.0, 0.0)),
            Output(buffer=self.short, factor=(1.0, 1.0), coef=(0.0, 0.0)),
        ]

    def step(self, gradients: list[Tensor | None], step: int, **changes: Any) -> None:
        arguments: dict[str, Any] = {
            "gradients": gradients,
            "weights": self.weights,
            "next_weights": self.spare,
            "state": self.state,
            "step": step,
            "learning_rates": RATES,
            "outputs": self.outputs,
            **changes,
        }
        self.rule.step(**arguments)
        if arguments["next_weights"] is self.spare:
            self.weights, self.spare = self.spare, self.weights

    def parts(self, flat: Tensor) -> Tensor:
        """The elements that belong to parameters, without the padding."""
        return torch.cat([view.flatten() for view in self.layout.view_list(flat)])

    def everything(self) -> list[Tensor]:
        return [self.parts(flat) for flat in (self.weights, *self.state.values(), self.predicted, self.short)]


def assert_close_to(oracle: Side, got: Side, before: Tensor, adam: bool) -> None:
    """Each output within one rounding of (|W| + |coef·v|), for Adam with four on the step's part."""
    rates, coefs = ([], [])
    for slot in oracle.layout.slots:
        rates += [RATES[slot.group]] * slot.numel
        coefs += [COEF[slot.group]] * slot.numel
    rate, coef = torch.tensor(rates), torch.tensor(coefs)
    old, new = oracle.parts(before), oracle.parts(oracle.weights)
    moved = (new - old).abs()
    slack = 4 if adam else 1
    difference = (new - got.parts(got.weights)).abs()
    assert bool((difference <= EPS * (old.abs() + slack * moved) * 1.0001).all())
    difference = (oracle.parts(oracle.predicted) - got.parts(got.predicted)).abs()
    assert bool((difference <= EPS * (old.abs() + slack * (moved + coef / rate * moved)) * 1.0001).all())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", ALL_CASES, ids=str)
def test_one_update_is_the_twins_within_one_rounding(
    layout: FlatLayout, options: RuleOptions, target: str
) -> None:
    native.extension().select_cpu_target(target)
    oracle, got = Side(twin.make(options, layout), layout), Side(native.make(options, layout), layout)
    adam = isinstance(options[0], AdamOptions)
    for step in range(6):
        before = oracle.weights.clone()
        gradients = gradients_of(layout, step + 1)
        oracle.step(gradients, step)
        got.step(gradients, step)
        assert_close_to(oracle, got, before, adam)
        if adam:
            for name in got.rule.state_names:
                assert torch.equal(oracle.parts(oracle.state[name]), got.parts(got.state[name]))
        # Both go on from the same numbers, so that each update is judged alone.
        got.weights.copy_(oracle.weights)
        for name, flat in got.state.items():
            flat.copy_(oracle.state[name])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SGD_CASES, ids=str)
def test_sgd_keeps_the_twins_bits_over_many_updates(
    layout: FlatLayout, case: dict[str, Any], dtype: torch.dtype, target: str
) -> None:
    native.extension().select_cpu_target(target)
    options = [SgdOptions(**case), SgdOptions(**{**case, "weight_decay": 0.2})]
    oracle, got = Side(twin.make(options, layout), layout), Side(native.make(options, layout), layout)
    for step in range(50):
        gradients = gradients_of(layout, step + 1, dtype)
        gradients[step % len(gradients)] = None
        for side in (oracle, got):
            side.step(gradients, step, grad_scale=1.0 if step % 2 else 0.37)
        for expected, actual in zip(oracle.everything(), got.everything(), strict=True):
            assert torch.equal(expected, actual)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="fusing is a choice on x86 only")
def test_where_torch_fuses_nothing_the_generic_kernels_agree_with_it() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "within_one_rounding or keeps_the_twins_bits"],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        cwd=Path(native.__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert f"{len(ALL_CASES) + 2 * len(SGD_CASES)} passed" in done.stdout


@pytest.mark.parametrize("options", [ALL_CASES[2], ALL_CASES[5]], ids=["sgd", "adamw"])
def test_threads_streaming_and_instruction_sets_change_no_bit(options: RuleOptions) -> None:
    layout = FlatLayout([("a", (70_001,), 0), ("b", (3,), 1), ("c", (200, 333), 1), ("d", (5,), 0)])
    core = native.extension()
    results = []
    for target, threads, stream in itertools.product(TARGETS, (1, 2, 5), ("never", "always")):
        core.select_cpu_target(target)
        core.set_threads(threads)
        side = Side(native.NativeRule(options, layout, stream_stores=stream), layout)  # type: ignore[arg-type]
        for step in range(3):
            side.step(gradients_of(layout, step), step)
        results.append(side.everything())
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            assert torch.equal(expected, actual)


@pytest.mark.parametrize("options", [ALL_CASES[2], ALL_CASES[5]], ids=["sgd", "adamw"])
def test_in_place_gives_the_bits_of_out_of_place(layout: FlatLayout, options: RuleOptions) -> None:
    for stream in ("never", "always"):
        rule = native.NativeRule(options, layout, stream_stores=stream)  # type: ignore[arg-type]
        here, there = Side(rule, layout), Side(rule, layout)
        for step in range(3):
            here.step(gradients_of(layout, step), step, next_weights=here.weights)
            there.step(gradients_of(layout, step), step)
        for expected, actual in zip(there.everything(), here.everything(), strict=True):
            assert torch.equal(expected, actual)


def test_padding_and_the_old_version_are_never_written(layout: FlatLayout) -> None:
    side = Side(native.make(ALL_CASES[2], layout), layout)
    for flat in (side.spare, side.predicted, *side.state.values()):
        flat.fill_(7.0)
    old, before = side.weights, side.weights.clone()
    used = torch.zeros(layout.numel, dtype=torch.bool)
    for slot in layout.slots:
        used[slot.offset : slot.offset + slot.numel] = True
    side.step(gradients_of(layout, 1), 1)
    assert torch.equal(old, before)
    for flat in (side.weights, side.predicted, *side.state.values()):
        assert bool((flat[~used] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_may_lie_anywhere_and_have_any_strides(layout: FlatLayout, dtype: torch.dtype) -> None:
    plain = gradients_of(layout, 1, dtype)
    odd: list[Tensor | None] = []
    for index, gradient in enumerate(plain):
        assert gradient is not None
        if index % 2:
            shifted = torch.empty(gradient.numel() + 3, dtype=dtype)[3:].view(gradient.shape)
            shifted.copy_(gradient)
            odd.append(shifted)
        else:
            odd.append(
                gradient.permute(*reversed(range(gradient.dim())))
                .contiguous()
                .permute(*reversed(range(gradient.dim())))
            )
    first, second = (Side(native.make(ALL_CASES[2], layout), layout) for _ in range(2))
    first.step(plain, 0)
    second.step(odd, 0)
    for expected, actual in zip(first.everything(), second.everything(), strict=True):
        assert torch.equal(expected, actual)


def test_gradients_of_mixed_types_are_taken_at_their_float32_values(layout: FlatLayout) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    mixed = [None if g is None else g.to(dtypes[index % 4]) for index, g in enumerate(gradients_of(layout, 1))]
    first, second = (Side(native.make(ALL_CASES[2], layout), layout) for _ in range(2))
    first.step(mixed, 0)
    second.step([None if g is None else g.float() for g in mixed], 0)
    for expected, actual in zip(first.everything(), second.everything(), strict=True):
        assert torch.equal(expected, actual)


def test_bfloat16_outputs_round_to_nearest_even() -> None:
    values = [
        1.0,
        1.00390625,
        1.01171875,
        1.00390637,
        -1.00390625,
        3.4e38,
        1e-40,
        float("inf"),
        -0.0,
        float("nan"),
    ]
    for padding in (0, 40):
        layout = FlatLayout([("w", (len(values) + padding,), 0)])
        side_by_side = []
        for rule in (twin.make([SgdOptions()], layout), native.make([SgdOptions()], layout)):
            weights = layout.allocate()
            weights[: len(values)] = torch.tensor(values)
            short = layout.allocate(dtype=torch.bfloat16)
            output = Output(buffer=short, factor=(1.0,), coef=(0.0,))
            rule.predict(weights=weights, state={}, step=0, outputs=[output])
            side_by_side.append(short.float())
        assert torch.equal(side_by_side[0].nan_to_num(123.0), side_by_side[1].nan_to_num(123.0))
        assert torch.signbit(side_by_side[1][8])


@pytest.mark.parametrize("options", [ALL_CASES[2], ALL_CASES[5]], ids=["sgd", "adamw"])
def test_predict_writes_what_the_step_wrote(layout: FlatLayout, options: RuleOptions) -> None:
    side = Side(native.make(options, layout), layout)
    for step in range(3):
        side.step(gradients_of(layout, step), step)
    again = layout.allocate()
    output = Output(buffer=again, factor=FACTOR, coef=COEF)
    side.rule.predict(weights=side.weights, state=side.state, step=3, outputs=[output])
    assert torch.equal(side.parts(again), side.parts(side.predicted))


def test_distance_zero_copies_the_weights_to_the_bit(layout: FlatLayout) -> None:
    side = Side(native.make(ALL_CASES[2], layout), layout)
    side.spare.fill_(-0.0)
    side.weights.mul_(0).mul_(-1)
    side.outputs = [Output(buffer=side.predicted, factor=(1.0, 1.0), coef=(0.0, 0.0))]
    side.step([None] * len(SHAPES), 1)
    expected = side.parts(side.weights).view(torch.int32)
    assert torch.equal(expected, side.parts(side.predicted).view(torch.int32))


def test_sgd_without_momentum_keeps_its_gradient_where_predictions_are_wanted(layout: FlatLayout) -> None:
    options = [SgdOptions(), SgdOptions(weight_decay=0.1)]
    oracle = Side(twin.make(options, layout, keep_velocity=True), layout)
    got = Side(native.make(options, layout, keep_velocity=True), layout)
    for step in range(3):
        for side in (oracle, got):
            side.step(gradients_of(layout, step), step)
    for expected, actual in zip(oracle.everything(), got.everything(), strict=True):
        assert torch.allclose(expected, actual, rtol=1e-6, atol=1e-6)


def test_a_stage_without_parameters_takes_a_step() -> None:
    layout = FlatLayout([])
    for options in ([SgdOptions(momentum=0.9)], [AdamOptions()]):
        rule = native.make(options, layout)
        rule.step(
            gradients=[],
            weights=layout.allocate(),
            next_weights=layout.allocate(),
            state={name: layout.allocate() for name in rule.state_names},
            step=0,
            learning_rates=(0.1,),
        )


def test_a_gradient_of_another_shape_is_named(layout: FlatLayout) -> None:
    gradients = gradients_of(layout, 1)
    gradients[4] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"'p4' has shape \(7,\) on cpu, expected \(33, 65\)"):
        Side(native.make(ALL_CASES[2], layout), layout).step(gradients, 0)


def test_buffers_that_overlap_or_do_not_fit_are_refused(layout: FlatLayout) -> None:
    side = Side(native.make(ALL_CASES[2], layout), layout)
    gradients = gradients_of(layout, 1)
    double = layout.allocate(dtype=torch.float64)
    large = torch.zeros(layout.numel + 16)

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            side.step(gradients, 1, **changes)

    def output(buffer: Tensor) -> list[Output]:
        return [Output(buffer=buffer, factor=(1.0, 1.0), coef=(0.0, 0.0))]

    refused("an output overlaps weights", outputs=output(side.weights))
    refused("a state buffer overlaps next_weights", state={"momentum_buffer": side.spare})
    refused("next_weights overlaps weights", weights=large[: layout.numel], next_weights=large[16:])
    refused("weights must be float32", weights=double, next_weights=double, outputs=())
    refused("next_weights has .* elements", next_weights=large)
    refused("a state buffer must be contiguous", state={"momentum_buffer": torch.zeros(2 * layout.numel)[::2]})


def test_two_threads_may_update_at_the_same_time() -> None:
    layout = FlatLayout([("a", (300_000,), 0)])
    native.set_threads(2)
    sides = [Side(native.NativeRule(ALL_CASES[1], layout), layout) for _ in range(3)]

    def work(side: Side) -> None:
        for step in range(5):
            side.step(gradients_of(layout, step), step, outputs=())

    threads = [threading.Thread(target=work, args=(side,)) for side in sides[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work(sides[0])
    for side in sides[1:]:
        assert torch.equal(sides[0].weights, side.weights)


def test_threads_follow_torch_and_so_omp_num_threads() -> None:
    program = (
        "from hpcpipe.optim import native; from hpcpipe.optim.flat import FlatLayout;"
        "from hpcpipe.optim.rules import SgdOptions;"
        "native.make([SgdOptions()], FlatLayout([]));"
        "print(native.extension().get_threads())"
    )
    root = Path(native.__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "1"
    native.make([SgdOptions()], FlatLayout([]), threads=3)
    assert native.extension().get_threads() == 3
    with pytest.raises(ConfigError, match="1 or more"):
        native.set_threads(0)


def test_a_forked_child_updates_with_threads_of_its_own() -> None:
    program = (
        "import os, torch\n"
        "from hpcpipe.optim import native; from hpcpipe.optim.flat import FlatLayout\n"
        "from hpcpipe.optim.rules import SgdOptions\n"
        "torch.set_num_threads(1)\n"
        "layout = FlatLayout([('a', (500_000,), 0)])\n"
        "rule = native.make([SgdOptions()], layout, threads=2)\n"
        "def update():\n"
        "    w = layout.allocate()\n"
        "    g = [torch.ones(500_000)]\n"
        "    rule.step(gradients=g, weights=w, next_weights=w, state={}, step=0, learning_rates=(1.0,))\n"
        "    return bool((w[:500_000] == -1).all())\n"
        "assert update()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if update() else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert update()\n"
    )
    root = Path(native.__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(root)}, timeout=120, check=True
    )


def test_other_devices_are_refused_with_a_reason() -> None:
    assert native.available("cpu") is None
    assert native.available("mps") == "it runs on cpu and cuda, not on mps"


def test_where_cuda_cannot_be_used_the_reason_says_why_and_what_was_built() -> None:
    reason = native.available("cuda")
    assert torch.cuda.is_available() or reason is not None
    if reason is not None:
        assert "CUDA side of the extension: o" in reason
