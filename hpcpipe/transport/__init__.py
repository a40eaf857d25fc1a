"""How bytes move between ranks: channels between stages, buffers, waits, launcher checks, the end of a job.

Only `world` imports `mpi4py.MPI`, and nothing here knows a schedule. Importing this package itself loads
nothing.
"""
