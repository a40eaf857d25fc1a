"""Weights as flat buffers, the update rules that turn one version into the next, learning rates and predictions.

The compiled rule and its plain-torch twin share one protocol; nothing here knows about stages, ranks or MPI.
"""
