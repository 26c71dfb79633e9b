"""``fit``: its arguments, the checks before a run, the training loop, the result."""
