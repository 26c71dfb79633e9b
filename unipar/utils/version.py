"""The version of this package, where its own modules can import it."""

__version__ = "0.1.0"
