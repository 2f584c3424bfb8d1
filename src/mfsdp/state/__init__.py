"""What one rank keeps: buffers of weights and gradients, the tensors that users see of them, and their mesh."""

from . import dispatch  # noqa: F401  (says what operators do to the tensors)
