"""Prints what came out of a run, from its summary.json: figures, staleness per stage, and where things are."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def lines(directory: Path) -> list[str]:
    """The result of the run in `directory`, for people."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    figures = summary["figures"]
    name = next((name for name in ("accuracy", "perplexity", "loss") if f"eval_{name}" in figures), None)
    shown = [f"{summary['steps']} updates in {summary['train_seconds']:.1f} s"]
    if name is not None:
        shown.append(f"test {name}: {figures[f'eval_{name}']:.4f}")
    shown.append("staleness (updates between the weights a minibatch is computed on and those it changes):")
    policy = "" if summary["policy"] is None else f", {summary['policy']}"
    for rank in summary["ranks"]:
        for stage in rank["stages"]:
            layers = ", ".join(stage["layers"])
            shown.append(
                f"  stage {stage['stage']}: {stage['staleness']}{policy}  ({layers} on rank {rank['rank']})"
            )
    shown.append(f"metrics:     {directory / 'metrics.jsonl'}")
    shown.append(f"checkpoints: {directory / 'checkpoints'}")
    return shown


if __name__ == "__main__":
    print("\n".join(lines(Path(sys.argv[1]))))
