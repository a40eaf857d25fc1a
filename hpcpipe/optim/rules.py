"""The choice of an update rule: the compiled one where it can run, its torch twin where not.

Names of the protocol and of the options are found here as well, so that the engine needs this module alone.
"""

from __future__ import annotations

from typing import Literal

import torch

from hpcpipe.errors import ConfigError
from hpcpipe.optim import native, twin
from hpcpipe.optim.flat import FlatLayout
from hpcpipe.optim.options import AdamOptions, RuleOptions, SgdOptions
from hpcpipe.optim.protocol import Output, UpdateRule

__all__ = ["AdamOptions", "Backend", "Output", "RuleOptions", "SgdOptions", "UpdateRule", "make_rule"]

Backend = Literal["auto", "native", "torch"]


def make_rule(
    options: RuleOptions,
    layout: FlatLayout,
    *,
    backend: Backend = "auto",
    device: torch.device | str = "cpu",
    keep_velocity: bool = False,
    threads: int | None = None,
) -> tuple[UpdateRule, str | None]:
    """Build the update rule for a layout.

    Args:
        options: one `SgdOptions` or `AdamOptions` per parameter group.
        layout: where the parameters lie.
        backend: `native` insists on the extension, `torch` on the twin, `auto` prefers the extension.
        device: where the buffers will live.
        keep_velocity: SGD without momentum keeps its last gradient, so that a prediction has a direction.
        threads: threads of the extension on the CPU, for the whole process; None takes torch's number, so
            OMP_NUM_THREADS counts.

    Returns:
        The rule, and one line for the user when `auto` fell back to the twin, else None.

    Raises:
        ConfigError: no options, mixed kinds, fewer options than groups, or `native` where it cannot run.
    """
    _check_options(options, layout)
    if backend == "torch":
        return twin.make(options, layout, keep_velocity=keep_velocity), None
    if backend not in ("auto", "native"):
        raise ConfigError(f"update backend {backend!r} is unknown; choose one of auto, native, torch")
    reason = native.available(torch.device(device).type)
    if reason is None and layout.dtype != torch.float32:
        reason = f"it keeps weights in float32, these are {str(layout.dtype).removeprefix('torch.')}"
    if reason is None:
        return native.make(options, layout, keep_velocity=keep_velocity, threads=threads), None
    if backend == "native":
        raise ConfigError(f"update backend 'native' cannot be used: {reason}")
    rule = twin.make(options, layout, keep_velocity=keep_velocity)
    return rule, f"compiled update off, torch twin used: {reason}"


def _check_options(options: RuleOptions, layout: FlatLayout) -> None:
    if not options:
        raise ConfigError("an update rule needs the options of at least one parameter group")
    if len({type(group) for group in options}) != 1:
        raise ConfigError("all parameter groups of a stage must use the same kind of optimizer")
    if layout.group_count > len(options):
        raise ConfigError(f"parameters name {layout.group_count} groups, but options are given for {len(options)}")
