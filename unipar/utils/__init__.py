"""Helpers that know nothing of training: signals, files, devices, documents, messages."""
