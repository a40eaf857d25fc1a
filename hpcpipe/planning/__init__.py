"""Profiles, topologies, the partitioner and plan files: pure arithmetic, without torch and MPI.

Import from the modules; this package re-exports nothing.
"""
