"""Training itself: executes schedules on stages, weights and messages.

train     one run on one rank, in order
plan, assemble, restore       what runs where, its parts, and starting from a checkpoint
loop      takes action after action from the rank's list
runner, flight, batches       carries out the actions of one replica of a stage, on messages and data
replicas  sums gradients, losses and words over the replicas of a stage
passes, substitution, derived, stage      forward and backward on given weights
objective                     losses and figures of the last stage
weights, horizon              versions and predictions
steering, checkpoints, snapshot           cuts, stops, and what is stored at them
stopping, signals, forked, time_left      what asks a run to stop
"""
