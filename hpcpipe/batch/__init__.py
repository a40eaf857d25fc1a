"""Scripts for batch systems: from a request to the text of a script, one module a scheduler.

It writes text and submits nothing. The scripts are bash; what they share is in `pieces` and `ranks`.
"""

from __future__ import annotations

from hpcpipe.batch.request import JobRequest
from hpcpipe.batch.script import SUBMIT, write_script

__all__ = ["SUBMIT", "JobRequest", "write_script"]
