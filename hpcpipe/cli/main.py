"""The `hpcpipe` command: a group whose subcommands are imported only when they are called.

A login node has no GPU and often no working MPI, so `--help` and the planning commands must load neither.
Errors that the user can mend end in one line and exit code 2; every option can also come from the environment
(`HPCPIPE_<COMMAND>_<OPTION>`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module

import click

from hpcpipe import __version__
from hpcpipe.errors import EXIT_DONE, EXIT_FAILURE, HpcpipeError
from hpcpipe.transport.launcher import launcher_rank

_COMMANDS = {
    "train": ("hpcpipe.cli.train", "Train a model as a pipeline over the ranks of this job."),
    "profile": ("hpcpipe.cli.profile", "Measure what each layer of a model costs."),
    "plan": ("hpcpipe.cli.plan", "Choose layers and ranks of each stage from a profile, and say why."),
    "simulate": ("hpcpipe.cli.simulate", "Predict throughput, bubble and memory of a plan."),
    "schedule": ("hpcpipe.cli.schedule", "Show or verify a schedule."),
    "checkpoint": ("hpcpipe.cli.checkpoint", "List, show, verify or export checkpoints."),
    "job": ("hpcpipe.cli.job", "Write the script that a batch system runs."),
    "doctor": ("hpcpipe.cli.doctor", "Say what this installation can do and what it would use."),
    "bench": ("hpcpipe.cli.bench", "Measure the update, a link, or a whole pipeline."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command = getattr(import_module(module), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"auto_envvar_prefix": "HPCPIPE"})
@click.version_option(__version__, prog_name="hpcpipe")
def hpcpipe() -> None:
    """Asynchronous pipeline-parallel training of PyTorch models over MPI."""


def main() -> None:
    """Entry point of the console script: what is wrong with the command is said by one rank only."""
    try:
        code = hpcpipe(standalone_mode=False)
    except click.ClickException as error:
        sys.exit(_refuse(error.exit_code, error.show))
    except HpcpipeError as error:
        message = f"hpcpipe: {error}"
        sys.exit(_refuse(error.exit_code, lambda: click.echo(message, err=True)))
    except click.Abort:
        sys.exit(EXIT_FAILURE)
    # click returns the code of --help and --version instead of leaving with it.
    sys.exit(code if isinstance(code, int) else EXIT_DONE)


def _refuse(code: int, show: Callable[[], object]) -> int:
    if launcher_rank(os.environ) == 0:
        show()
    else:
        # A launcher that sees one rank end may kill the one that has something to say.
        time.sleep(1.0)
    return code


if __name__ == "__main__":
    main()
