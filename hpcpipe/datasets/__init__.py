"""Data sets that can be asked for any minibatch at any time, so that a restart needs no state of theirs.

`order` and `protocol` import no torch; nothing is imported here.
"""

from __future__ import annotations
