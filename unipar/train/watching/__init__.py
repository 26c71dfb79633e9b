"""Watching runs from outside: what their directories say of them, and curves of it."""
