"""What is decided before anything runs: layouts, units, precision, options, hardware. Plain values."""
