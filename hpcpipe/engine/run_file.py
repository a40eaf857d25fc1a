"""The run file as all ranks of a job agree on it, and its name before what is wrong with what it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hpcpipe.config import RunConfig, load_run, parse_run
from hpcpipe.errors import UserError
from hpcpipe.transport.world import World


def agreed_run(world: World, run_file: str, overrides: Sequence[str]) -> RunConfig:
    """The run file with its overrides, the same on every rank. All ranks call it.

    Rank 0 alone reads it: one message if it is wrong, one version of it for all. Raises ConfigError there.
    """
    tables = None
    if world.rank == 0:
        tables = load_run(run_file, overrides).model_dump(mode="json", exclude_none=True)
    tables = world.broadcast_json(tables, what="the run file from rank 0")
    return parse_run(tables, source=run_file)


@contextmanager
def naming(run_file: str) -> Iterator[None]:
    """Put the run file's name before a UserError about what it asks for."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{run_file}: {error}") from error
