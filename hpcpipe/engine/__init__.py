"""Training itself: executes schedules on stages, weights and messages.

train     one run on one rank, in order
plan, assemble, restore       what runs where, its parts, and starting from a checkpoint
loop      takes action after action from the rank's list
runner    carries out one stage's actions
passes, substitution, derived, stage      forward and backward on given weights
weights, horizon              versions and predictions
steering, signals, checkpoints, snapshot  cuts, stops, and what is stored at them
"""
