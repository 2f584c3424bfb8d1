"""``torch.distributed.pipelining``: `mfsdp.PipelineStage`."""

from ..sharding.pipelining import PipelineStage

__all__ = ["PipelineStage"]
