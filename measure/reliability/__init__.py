"""Runs whose ranks hang or are killed."""
