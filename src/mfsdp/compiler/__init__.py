"""Compiles models into programs, and programs into code: backend, capture, lowering, and tracing without execution."""
