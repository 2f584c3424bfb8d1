"""Runs compiled programs: kernels, executions, static buffers, desync detection, transports."""

from . import kernels  # noqa: F401  (registers them)
