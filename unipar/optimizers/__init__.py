"""Optimizers and schedulers as a user gives them: by name, as functions, in groups."""
