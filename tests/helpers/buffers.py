"""The flat buffers of a sharded model."""

from __future__ import annotations

from typing import Any

import torch


def buffers_of(model: torch.nn.Module) -> list[Any]:
    return list({r.buffer: None for m in model.modules() for r in m.__dict__.get("_mfsdp_refs", {}).values()})
