"""Checkpoints of a run: written beside the training, committed, kept or dropped, and continued from."""
