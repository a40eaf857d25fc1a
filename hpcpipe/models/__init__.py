"""Models as lists of named layers: built-in ones, a user's own, their seeded initialisation and their split.

`split` is pure; the other modules import torch, so nothing is imported here.
"""

from __future__ import annotations
