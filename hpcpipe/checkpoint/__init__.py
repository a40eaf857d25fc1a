"""Checkpoints on disk: one HDF5 file per rank, and a commit record that makes the files a set.

Pure storage: it takes and gives dictionaries of NumPy arrays and never touches MPI, torch or the engine. Import
from the modules; this package re-exports nothing, so that `hpcpipe.checkpoint.interval` does not load h5py.

    <run>/checkpoints/step-0000000050/rank-00000.h5   layout, skeleton, writer, structure, reader
                                      rank-00001.h5
                                      commit.json     record (written last)
                                                      sets, retention, digest, export read whole sets
"""
