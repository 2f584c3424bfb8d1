"""Per-rank state: flat buffers of weights and gradients, the tensors that users see of them, and their mesh."""

from . import dispatch  # noqa: F401  (registers the operators of sharded tensors)
