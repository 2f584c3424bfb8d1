"""From a model to programs, and from programs to code: the backend, capture, lowering, and tracing without a run."""
