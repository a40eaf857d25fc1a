"""The weights of one stage in all their versions, and the weights predicted from them.

An update reads the newest version and writes the next into another buffer; the old one is the stash, and goes back
to a pool when its last reader is done (PipeDream, SOSP'19, section 3.3, without a copy). Version v holds the
updates of all minibatches below v; where replicas share an update, it is that of several. Predictions live in
buffers of their own, so the true weights are never touched by one. In the steady state nothing is allocated.

With bfloat16 weights the versions are bfloat16 copies of float32 master weights, which only the update reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hpcpipe.engine.horizon import Horizon
from hpcpipe.optim.flat import FlatLayout
from hpcpipe.optim.rules import Output, UpdateRule
from hpcpipe.schedule import Prediction, Role

GradientHook = Callable[[int, Tensor | None], Tensor | None]
"""Given (index of the slot, its gradient or None), what to put in the gradient's place; None leaves it."""


class WeightBuffer:
    """One flat buffer of weights with a permanent leaf for each parameter.

    The leaves are permanent because autograd keeps the leaves of a forward alive until its graph is gone: a leaf
    made anew for each minibatch would keep its memory alive with it.
    """

    def __init__(self, layout: FlatLayout, device: torch.device, dtype: torch.dtype) -> None:
        self.flat = layout.allocate(device, dtype)
        self.leaves = {name: view.detach().requires_grad_() for name, view in layout.views(self.flat).items()}
        self.pointer = self.flat.untyped_storage().data_ptr()

    def watch(self, hook: GradientHook) -> None:
        """Have `hook` called for each gradient of a backward pass as soon as it is complete."""
        for index, leaf in enumerate(self.leaves.values()):
            leaf.register_hook(partial(hook, index))  # type: ignore[no-untyped-call]

    @property
    def bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.flat.numel() * self.flat.element_size()


class WeightStore:
    """Versions, predictions and optimizer state of one stage.

    `dtype` is what the passes compute in; the update's own arithmetic is in `layout.dtype`. `newest` is the newest
    version and `updates` the number of updates that made it, which is less where several minibatches share one.
    """

    def __init__(
        self,
        layout: FlatLayout,
        *,
        rule: UpdateRule,
        horizon: Horizon,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.newest = 0
        self.updates = 0
        self.peak_versions = 1
        self.versions: dict[int, WeightBuffer] = {}
        self.state = {name: layout.allocate(device) for name in rule.state_names}
        self._rule = rule
        self._horizon = horizon
        self._device = device
        self._pool: list[WeightBuffer] = []
        self._apart: dict[tuple[Role, int], WeightBuffer] = {}
        self._allocated = 0
        self._hook: GradientHook | None = None
        self._masters = None if dtype == layout.dtype else layout.allocate(device)
        self.versions[0] = self._take()

    @property
    def master(self) -> Tensor:
        """The newest weights as the optimizer sees them: flat, in `layout.dtype`."""
        return self.versions[self.newest].flat if self._masters is None else self._masters

    def are_finite(self) -> bool:
        """Whether the newest weights hold neither NaN nor infinity; one fast pass over them."""
        return bool(torch.isfinite(self.master.sum()))

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all weight buffers, in use or pooled, and of the optimizer state."""
        extra = list(self.state.values()) + ([] if self._masters is None else [self._masters])
        return self._allocated + sum(t.numel() * t.element_size() for t in extra)

    def start_from(self, newest: int, named: Mapping[str, Tensor], *, updates: int) -> None:
        """Make `named` the true weights, as version `newest` and the only one; `updates` have been made."""
        self.versions = {newest: self.versions.pop(self.newest)}
        self.newest = newest
        self.updates = updates
        with torch.no_grad():
            for name, view in self.layout.views(self.master).items():
                view.copy_(named[name])
            if self._masters is not None:
                self.versions[newest].flat.copy_(self._masters)

    def watch_gradients(self, hook: GradientHook) -> None:
        """Have `hook` called for each gradient of every backward pass as soon as it is complete."""
        self._hook = hook
        buffers = (*self.versions.values(), *self._apart.values(), *self._pool)
        for buffer in {id(buffer): buffer for buffer in buffers}.values():
            buffer.watch(hook)

    def add_version(self, version: int) -> WeightBuffer:
        """A buffer for an older version, to be filled by the caller (a resumed run's stash)."""
        buffer = self.versions[version] = self._take()
        self.peak_versions = max(self.peak_versions, len(self.versions))
        return buffer

    def weights_of(self, role: Role, minibatch: int, version: int) -> WeightBuffer:
        """The weights a pass of `minibatch` runs on: those held for it alone, else true version `version`."""
        buffer = self._apart.get((role, minibatch))
        return self.versions[version] if buffer is None else buffer

    def keep_forward_weights(self, minibatch: int, version: int) -> None:
        """Keep what F(minibatch) runs on until `drop`: a restart from a coming cut must run it again."""
        key = Role.FORWARD, minibatch
        if key not in self._apart:
            self._apart[key] = self.versions[version]

    def restore_forward_weights(self, minibatch: int) -> WeightBuffer:
        """A buffer for the kept forward weights of `minibatch`, to be filled by the caller (a resumed run)."""
        buffer = self._apart[Role.FORWARD, minibatch] = self._take()
        return buffer

    def apart(self, role: Role, minibatch: int) -> WeightBuffer | None:
        """The weights of a pass that are held for it alone: predicted or kept ones."""
        return self._apart.get((role, minibatch))

    def drop(self, role: Role, minibatch: int) -> None:
        """Give back weights held for a pass alone, if there are any."""
        buffer = self._apart.pop((role, minibatch), None)
        if buffer is not None:
            self._pool_if_unused(buffer)

    def update(
        self,
        minibatch: int,
        gradients: Sequence[Tensor | None],
        predictions: Sequence[Prediction],
        *,
        grad_scale: float = 1.0,
    ) -> None:
        """U(minibatch): make version minibatch+1 and, in the same pass over memory, `predictions` from it.

        `gradients` times `grad_scale` are those of all minibatches from the newest version on, one per slot.
        """
        following = self._take()
        outputs = self._outputs(predictions)
        if self._masters is None:
            weights, next_weights = self.versions[self.newest].flat, following.flat
        else:
            weights = next_weights = self._masters
            outputs = [self._copy_into(following), *outputs]
        self._rule.step(
            gradients=gradients,
            weights=weights,
            next_weights=next_weights,
            state=self.state,
            step=self.updates,
            learning_rates=self._horizon.learning_rates(minibatch),
            grad_scale=grad_scale,
            outputs=outputs,
        )
        self.newest = minibatch + 1
        self.updates += 1
        self.versions[self.newest] = following
        self.peak_versions = max(self.peak_versions, len(self.versions))

    def predict(self, predictions: Sequence[Prediction]) -> None:
        """Make predictions from the newest version without an update."""
        self._rule.predict(
            weights=self.master, state=self.state, step=self.updates, outputs=self._outputs(predictions)
        )

    def release(self, versions: Sequence[int]) -> None:
        """Versions whose last reader is done."""
        for version in versions:
            self._pool_if_unused(self.versions.pop(version))

    def _pool_if_unused(self, buffer: WeightBuffer) -> None:
        holders = (*self.versions.values(), *self._apart.values())
        if not any(buffer is holder for holder in holders):
            self._pool.append(buffer)

    def _outputs(self, predictions: Sequence[Prediction]) -> list[Output]:
        """A buffer and its coefficients for each prediction; both passes of a minibatch share one if equal."""
        outputs: list[Output] = []
        made: dict[tuple[int, int], WeightBuffer] = {}
        for prediction in predictions:
            key = (prediction.minibatch, prediction.distance)
            buffer = made.get(key)
            if buffer is None:
                buffer = made[key] = self._take()
                factor, coef = self._horizon.coefficients(prediction.version, prediction.distance)
                outputs.append(Output(buffer=buffer.flat, factor=factor, coef=coef))
            self._apart[prediction.role, prediction.minibatch] = buffer
        return outputs

    def _copy_into(self, buffer: WeightBuffer) -> Output:
        groups = len(self._horizon.learning_rates(0))
        return Output(buffer=buffer.flat, factor=(1.0,) * groups, coef=(0.0,) * groups)

    def _take(self) -> WeightBuffer:
        if self._pool:
            return self._pool.pop()
        buffer = WeightBuffer(self.layout, self._device, self.dtype)
        self._allocated += buffer.bytes
        if self._hook is not None:
            buffer.watch(self._hook)
        return buffer
