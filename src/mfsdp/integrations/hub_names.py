"""Names and shapes of weights as transformers' checkpoints have them, for `mfsdp.stream_weights`.

    mfsdp.stream_weights(model, torch.bfloat16, convert=hub_names(model))

transformers 5 renames, stacks and joins tensors when it loads some models: experts of one layer are one parameter,
and each a tensor of its own in files and inference engines.
"""

from __future__ import annotations

import torch
import transformers.core_model_loading as loading
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from ..checkpoints.files import some
from ..checkpoints.streams import Convert, stream_weights


def hub_names(model: nn.Module) -> Convert:
    """Returns the reverse of the conversions with which transformers loads a model, as ``convert`` of
    `mfsdp.stream_weights`: names, shapes and values are those that ``save_pretrained`` writes. Importing it changes
    nothing in transformers. Tried with 5.23 (``core_model_loading.revert_weight_conversion``).

    Args:
        model: a transformers model, sharded or not.

    Raises:
        TypeError: it is none.
        ValueError: when the stream is used, a conversion joins tensors of several units, or ``only`` leaves some out.
    """
    pretrained = getattr(model, "_orig_mod", model)
    if not isinstance(pretrained, PreTrainedModel):
        raise TypeError(f"hub_names: {type(pretrained).__name__} is not a transformers model")
    own = {meta.name: torch.empty(meta.shape, device="meta") for meta in stream_weights(model).metadata()}
    shapes = {name: tuple(t.shape) for name, t in loading.revert_weight_conversion(pretrained, own).items()}

    def convert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = loading.revert_weight_conversion(pretrained, weights)
        wrong = [name for name, t in out.items() if shapes.get(name) != tuple(t.shape)]
        if wrong:
            raise ValueError(
                f"hub_names: {some(wrong)} cannot be made of {some(weights)} alone: choose units (and only=) that hold "
                "all tensors which transformers joins"
            )
        return {name: t.contiguous() for name, t in out.items()}

    return convert
