"""`hpcpipe bench`: the group of benchmarks, each of which measures both sides in one run."""

from __future__ import annotations

from importlib import import_module

import click

_BENCHES = ("update", "link", "pipeline")


class _LazyBenches(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _BENCHES:
            return None
        command = getattr(import_module(f"hpcpipe.bench.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyBenches)
def bench() -> None:
    """Measure the update, a link, or a whole pipeline."""
