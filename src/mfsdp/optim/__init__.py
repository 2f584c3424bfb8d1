"""Optimizer steps on flat buffers: uncompiled, compiled, or with state on the host."""
