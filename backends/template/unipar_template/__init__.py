"""A strategy of unipar to copy."""
