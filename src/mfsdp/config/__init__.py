"""Decisions made before anything runs: layouts, units, precision, options, hardware. Plain values."""
