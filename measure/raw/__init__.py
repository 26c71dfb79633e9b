"""The loops that one would write by hand, for ``unipar bench --raw``; none imports unipar."""
