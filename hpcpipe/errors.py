"""The exceptions that hpcpipe raises on purpose, each knowing the exit code it ends a job with.

A `UserError` is wrong use or bad input: the command line shows its message as one line and exits 2. Everything
else keeps its traceback and aborts the whole job.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_REQUEUE = 75
"""Stopped by request with a committed checkpoint (EX_TEMPFAIL): the job script should run the command again."""
EXIT_TERMINATED = 143
"""Ended at once by a second SIGTERM: what a shell says of a process that SIGTERM killed."""


class HpcpipeError(Exception):
    """Base of all deliberate errors; `exit_code` is what the process ends with."""

    exit_code = EXIT_FAILURE


class UserError(HpcpipeError):
    """Wrong use or bad input: one clear line (what, where, what to do), exit code 2, no traceback."""

    exit_code = EXIT_USAGE


class ConfigError(UserError):
    """A run file, an override or an option that cannot be used."""


class ModelError(UserError):
    """A model that cannot be built, split or trained as asked."""


class DataError(UserError):
    """A data set that is missing, unreadable or too small."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or of another model or run."""


class FolderError(UserError):
    """The folder of a run that cannot be used: it cannot be written, or another run has it."""


class FolderLostError(FolderError):
    """The same in the middle of a run: one line, but exit code 1, as what is committed is there to go on from."""

    exit_code = EXIT_FAILURE


class PlanError(UserError):
    """A profile, topology or plan that cannot be read or used, or a model that fits no plan."""


class JobError(UserError):
    """A job script that cannot be written as asked."""


class LauncherError(UserError):
    """Ranks started by a launcher that does not match the MPI library, or in the wrong number."""


class TransportError(HpcpipeError):
    """A message that did not arrive, or arrived with a shape or dtype that was not agreed."""


class NonFiniteError(HpcpipeError):
    """The loss or a gradient is NaN or infinite and the run was told to stop at that."""


class FailedElsewhere(HpcpipeError):
    """Another rank has failed and speaks for all: this one ends without a word."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} failed")
        self.exit_code = exit_code
