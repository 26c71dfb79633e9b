"""Overhead, memory and checkpoint speed, against plain loops."""
