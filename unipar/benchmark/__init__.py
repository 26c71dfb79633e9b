"""Comparing strategies on one job: ``unipar bench``."""
