"""``fit``: from the arguments of one call through the training loop to its result."""
