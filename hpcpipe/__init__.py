"""hpcpipe: asynchronous pipeline-parallel training of PyTorch models over MPI.

Importing this package loads neither torch nor MPI, so that planning and `--help` work on a login node.
"""

__version__ = "0.1.0"
