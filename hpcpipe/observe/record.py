"""What the rank of the last stage writes down and shows while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from hpcpipe.observe.metrics import MetricsFile
from hpcpipe.observe.progress import Progress


class RunRecord:
    """Metrics and progress of one run.

    `epoch`, `rows` and `rate` give the epoch, rows and learning rate of a minibatch. Losses in metrics.jsonl are
    means over the minibatches since the line before.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        progress: Progress,
        *,
        log_every: int,
        last: int,
        epoch: Callable[[int], int],
        rows: Callable[[int], int],
        rate: Callable[[int], float],
    ) -> None:
        self.final: dict[str, float] = {}
        self._metrics = metrics
        self._progress = progress
        self._log_every = log_every
        self._last = last
        self._epoch = epoch
        self._rows = rows
        self._rate = rate
        self._began = self._since = time.perf_counter()
        self._losses: list[float] = []
        self._samples = 0
        self._shown = ""

    def minibatch_done(self, minibatch: int, loss: float) -> None:
        """U(minibatch) is done at the last stage."""
        self._losses.append(loss)
        self._samples += self._rows(minibatch)
        step = minibatch + 1
        if step % self._log_every == 0 or minibatch == self._last:
            now = time.perf_counter()
            mean = sum(self._losses) / len(self._losses)
            speed = self._samples / (now - self._since)
            self._metrics.write(
                {
                    "step": step,
                    "epoch": self._epoch(minibatch),
                    "loss": mean,
                    "lr": self._rate(minibatch),
                    "samples_per_s": speed,
                    "wall_s": now - self._began,
                }
            )
            self.final["train_loss"] = mean
            self._shown = f"epoch {self._epoch(minibatch)}  loss {mean:.4f}  {speed:.0f} samples/s"
            self._losses, self._samples, self._since = [], 0, now
        self._progress.step(step, self._shown)

    def evaluated(self, minibatch: int, figures: Mapping[str, float]) -> None:
        """The evaluation behind U(minibatch) is done."""
        now = time.perf_counter()
        self._metrics.write(
            {
                "step": minibatch + 1,
                "epoch": self._epoch(minibatch),
                "evaluation": dict(figures),
                "wall_s": now - self._began,
            }
        )
        self.final.update({f"eval_{name}": value for name, value in figures.items()})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        self._progress.say(f"step {minibatch + 1}: evaluation {shown}")
        # Time spent evaluating is not training throughput.
        self._since = now

    def close(self) -> None:
        """The run is over."""
        self._metrics.close()
        self._progress.close()
