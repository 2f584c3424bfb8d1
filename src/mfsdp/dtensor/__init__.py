"""DTensors over flat buffers: which rank holds which rows, their operators, and what other parallelisms left."""

from . import dispatch  # noqa: F401  (registers the operators of sharded tensors)
