"""Colossal-AI's Booster plugins as a strategy of unipar."""
