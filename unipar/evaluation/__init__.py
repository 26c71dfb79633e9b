"""Evaluation: every sample counted once, whatever the number of ranks."""
