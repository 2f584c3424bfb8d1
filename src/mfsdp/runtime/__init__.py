"""What programs do when they run: kernels, runs, static buffers, ranks that stay in step, and whoever carries bytes."""

from . import kernels  # noqa: F401  (registers them)
