"""Hugging Face Accelerate behind unipar's strategy interface."""
