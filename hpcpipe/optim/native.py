"""The update rules on the compiled extension: one pass over memory per update, on CPU or CUDA.

It turns options into constants as torch would and hands tensors over as DLPack capsules. Arithmetic, threads and
checks of memory are the extension's; which weights are meant is the caller's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # public, but not in its __all__

import hpcpipe
from hpcpipe.errors import ConfigError
from hpcpipe.native import loader
from hpcpipe.optim.flat import FlatLayout, Slot
from hpcpipe.optim.options import AdamOptions, RuleOptions, SgdOptions, state_names_for
from hpcpipe.optim.protocol import Output, check_outputs, check_step

__all__ = ["NativeRule", "available", "build_record", "cpu_target", "extension", "make", "set_threads", "triad"]

_DIRECTORY = Path(loader.__file__).parent

StreamStores = Literal["auto", "always", "never"]


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    return loader.load(_DIRECTORY, hpcpipe.__version__)


@functools.cache
def available(device_type: str = "cpu") -> str | None:
    """Return why updates on "cpu" or "cuda" cannot use the extension, or None where they can.

    The first question about "cuda" runs a small update on the current device, which finds a missing driver and a
    device that the kernels were not compiled for.
    """
    module, reason = _load()
    if module is None:
        return reason
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return f"it runs on cpu and cuda, not on {device_type}"
    problem = str(module.cuda_problem())
    if not problem:
        return None
    return f"{problem} (CUDA side of the extension: {build_record().get('cuda', 'unknown')})"


def extension() -> Any:
    """Return the extension module.

    Raises:
        ConfigError: it cannot be loaded; the message says why.
    """
    module, reason = _load()
    if module is None:
        raise ConfigError(f"the compiled update cannot be used: {reason}")
    return module


def build_record() -> dict[str, Any]:
    """Return what the build wrote about itself: python, cuda (on, or off and why), built, reason if not built."""
    return loader.read_build_record(_DIRECTORY)


def set_threads(count: int) -> None:
    """Set the threads of CPU updates in this process, the calling one included; 1 or more."""
    if count < 1:
        raise ConfigError(f"threads must be 1 or more, got {count}")
    extension().set_threads(count)


def cpu_target() -> str:
    """Return the instruction set in use: avx512, avx2 or generic."""
    return str(extension().cpu_target())


def triad(g: Tensor, v: Tensor, w: Tensor, next_weights: Tensor, output: Tensor) -> None:
    """Read g, v, w and write v, next_weights, output once: the memory traffic of an update, for benchmarks.

    All are flat float32 of one length, a multiple of 16, on one device and aligned to 64 bytes.
    """
    buffers = map(to_dlpack, (g, v, w, next_weights, output))
    extension().triad(*buffers, cuda_stream=_stream_of(w))


def _stream_of(tensor: Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else 0


class NativeRule:
    """An `UpdateRule` over the extension, for float32 weights and state; gradients float32 or bfloat16."""

    def __init__(
        self,
        options: RuleOptions,
        layout: FlatLayout,
        *,
        keep_velocity: bool = False,
        stream_stores: StreamStores = "auto",
    ) -> None:
        core = extension()
        self._layout = layout
        self._options: tuple[SgdOptions | AdamOptions, ...] = tuple(options)
        self._keep_velocity = keep_velocity
        self._adam = isinstance(options[0], AdamOptions)
        self._state_names = state_names_for(options, keep_velocity=keep_velocity)
        self._has_direction = tuple(
            isinstance(group, AdamOptions) or keep_velocity or group.momentum != 0 for group in options
        )
        self._flags: dict[str, int] = dict(core.FLAGS)
        self._stream_stores = {"auto": -1, "never": 0, "always": 1}[stream_stores]
        self._table = core.SlotTable(
            offsets=[slot.offset for slot in layout.slots],
            numels=[slot.numel for slot in layout.slots],
            groups=[slot.group for slot in layout.slots],
            numel=layout.numel,
            group_count=len(options),
        )

    @property
    def state_names(self) -> tuple[str, ...]:
        return self._state_names

    def step(
        self,
        *,
        gradients: Sequence[Tensor | None],
        weights: Tensor,
        next_weights: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        learning_rates: tuple[float, ...],
        grad_scale: float = 1.0,
        outputs: Sequence[Output] = (),
    ) -> None:
        check_step(self._layout, len(self._options), gradients, weights, next_weights, learning_rates)
        constants = [
            self._constants(group, step, rate, grad_scale)
            for group, rate in zip(self._options, learning_rates, strict=True)
        ]
        unfit = self._run(gradients, weights, next_weights, state, step + 1, constants, outputs)
        if unfit:
            converted = list(gradients)
            for index in unfit:
                converted[index] = self._converted(gradients[index], self._layout.slots[index], weights)
            self._run(converted, weights, next_weights, state, step + 1, constants, outputs)

    def predict(
        self, *, weights: Tensor, state: Mapping[str, Tensor], step: int, outputs: Sequence[Output]
    ) -> None:
        constants = [self._constants(group, max(step - 1, 0), 0.0, 1.0) for group in self._options]
        self._run(None, weights, None, state, step, constants, outputs)

    def _run(
        self,
        gradients: Sequence[Tensor | None] | None,
        weights: Tensor,
        next_weights: Tensor | None,
        state: Mapping[str, Tensor],
        count: int,
        constants: list[list[float]],
        outputs: Sequence[Output],
    ) -> list[int]:
        """Run the call; where it returns indices, these gradients must be converted first and nothing was done."""
        check_outputs(self._has_direction, weights, outputs)
        unfit: list[int] = self._table.run(
            rule=1 if self._adam else 0,
            gradients=None if gradients is None else [None if g is None else to_dlpack(g) for g in gradients],
            weights=to_dlpack(weights),
            next_weights=None if next_weights is None else to_dlpack(next_weights),
            states=[to_dlpack(state[name]) for name in self._state_names],
            constants=constants,
            outputs=[
                (to_dlpack(output.buffer), output.factor, self._minus_coefs(output, count)) for output in outputs
            ],
            stream_stores=self._stream_stores,
            cuda_stream=_stream_of(weights),
        )
        return unfit

    def _converted(self, gradient: Tensor | None, slot: Slot, weights: Tensor) -> Tensor:
        """Return the gradient in a type and with strides that the extension takes; another shape is an error."""
        assert gradient is not None
        if gradient.shape != slot.shape or gradient.device != weights.device:
            raise ValueError(
                f"gradient of {slot.name!r} has shape {tuple(gradient.shape)} on {gradient.device}, "
                f"expected {slot.shape} on {weights.device}"
            )
        dtype = torch.bfloat16 if gradient.dtype == torch.bfloat16 else torch.float32
        return gradient.to(dtype).contiguous()

    def _minus_coefs(self, output: Output, count: int) -> list[float]:
        if count == 0:
            return [0.0] * len(output.coef)
        if self._adam:
            return [
                -(coef / (1 - group.betas[0] ** count)) if isinstance(group, AdamOptions) else 0.0
                for coef, group in zip(output.coef, self._options, strict=True)
            ]
        return [-coef for coef in output.coef]

    def _constants(
        self, group: SgdOptions | AdamOptions, step: int, rate: float, grad_scale: float
    ) -> list[float]:
        """Return what `SlotTable.run` asks of a group; computed in double and rounded once, as torch does."""
        flags = self._flags
        used = flags["scale"] * (grad_scale != 1.0) | flags["maximize"] * group.maximize
        if isinstance(group, SgdOptions):
            used |= flags["weight_decay"] * (group.weight_decay != 0) | flags["nesterov"] * group.nesterov
            used |= flags["first"] * (step == 0)
            if group.momentum != 0:
                used |= flags["momentum"]
            elif self._keep_velocity:
                used |= flags["keep"]
            momentum, blend = group.momentum, 1 - group.dampening
            return [used, grad_scale, group.weight_decay, -rate, momentum, blend, 0.0, 1.0, 1.0, 0.0]
        if group.weight_decay != 0:
            used |= flags["decoupled"] if group.decoupled else flags["weight_decay"]
        beta1, beta2 = group.betas
        return [
            used,
            grad_scale,
            group.weight_decay,
            -(rate / (1 - beta1 ** (step + 1))),
            beta2,
            1 - beta2,
            1 - beta1,
            1 - rate * group.weight_decay,
            (1 - beta2 ** (step + 1)) ** 0.5,
            group.eps,
        ]


def make(
    options: RuleOptions, layout: FlatLayout, *, keep_velocity: bool = False, threads: int | None = None
) -> NativeRule:
    """Build the compiled rule; `threads` as in `make_rule`.

    Raises:
        ConfigError: the extension cannot be loaded.
    """
    set_threads(torch.get_num_threads() if threads is None else threads)
    return NativeRule(options, layout, keep_velocity=keep_velocity)
