"""Names in Megatron-Core's checkpoints: stacked layers, split tensors, and entries beside the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

NEWEST = "latest_checkpointed_iteration.txt"
CONFIG = "metadata.json"

_STACKED = re.compile(r"(?P<before>(?:.*\.)?layers)\.(?P<after>(?!\d+\.).+)")
_GATE = re.compile(r"(?P<whole>(?:.*\.)?linear_fc1\.(?:weight|bias)\d*)_w")
_BESIDE = re.compile(r"(chained_\d+\.)?optimizer\.")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<param>.+)")


@dataclass(frozen=True)
class Stored:
    """A tensor as a checkpoint stores it: boxes of tensors in the file, concatenated along dimension 0."""

    boxes: tuple[tuple[str, ChunkStorageMetadata], ...]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def views(
        self, tensor: torch.Tensor, offsets: Sequence[int] = ()
    ) -> Iterator[tuple[str, ChunkStorageMetadata, torch.Tensor]]:
        """Yields each box that part of the tensor is in, and the view that it fills.

        Args:
            tensor: the part, at most `shape`.
            offsets: where the part starts; by default at the tensor's start.
        """
        whole = tensor if tensor.dim() else tensor.view(1)
        start = list(offsets) or [0] * whole.dim()
        at = 0
        for name, box in self.boxes:
            above = len(box.sizes) - tensor.dim()  # 1 if the box is a layer of a tensor that stacks all
            rows = box.sizes[above] if tensor.dim() else 1
            first, end = max(start[0], at), min(start[0] + whole.shape[0], at + rows)
            if first < end:
                view = whole[first - start[0] : end - start[0]]
                inside = [0] * above + [first - at, *start[1:]]
                offset = torch.Size([a + b for a, b in zip(box.offsets, inside)])
                sizes = [*box.sizes[:above], *view.shape][: len(box.sizes)]
                yield name, ChunkStorageMetadata(offset, torch.Size(sizes)), view.view(sizes)
            at += rows


def as_it_is(name: str, entry: TensorStorageMetadata) -> Stored:
    box = ChunkStorageMetadata(torch.Size([0] * len(entry.size)), entry.size)
    return Stored(((name, box),), entry.size, entry.properties.dtype)


def newest(folder: Path) -> Path | None:
    """Returns the newest checkpoint in a run's folder, by Megatron-LM's tracker file; ``None`` without that file.

    Raises:
        ValueError: the file holds something else.
    """
    if not (folder / NEWEST).is_file():
        return None
    said = (folder / NEWEST).read_text().strip()
    if said != "release" and not said.isdecimal():
        raise ValueError(f"mfsdp: {folder / NEWEST} holds {said[:40]!r}, not the number of an iteration")
    return folder / (said if said == "release" else f"iter_{int(said):07d}")


def is_torch_dist(folder: Path) -> bool:
    """Whether Megatron-Core's ``dist_checkpointing`` wrote ``folder``, in its format "torch_dist".

    Raises:
        ValueError: it did, in another format ("zarr").
    """
    try:
        said = json.loads((folder / CONFIG).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    written = said.get("sharded_backend") if isinstance(said, dict) else None
    if written not in (None, "torch_dist"):
        raise ValueError(f"mfsdp: {folder} is a checkpoint of Megatron-Core in its format {written!r}, which is not "
                         "read here; load it with Megatron-Core and save it with --ckpt-format torch_dist")  # fmt: skip
    return written is not None


def without_optimizer(entries: Mapping[str, TensorStorageMetadata]) -> dict[str, TensorStorageMetadata]:
    """Returns the model's tensors of a "torch_dist" checkpoint, which are at the top level, beside the optimizer's."""
    return {name: entry for name, entry in entries.items() if not _BESIDE.match(name)}


def optimizer_states(entries: Mapping[str, TensorStorageMetadata]) -> dict[str, dict[str, Stored]]:
    """Returns optimizer state of a "torch_dist" checkpoint that is stored by parameter: by kind (``exp_avg``,
    ``fp32_param``, ...), then by the parameter's name.
    """
    out: dict[str, dict[str, Stored]] = {}
    for name, entry in entries.items():
        found = _STATE.fullmatch(name)
        if found is not None:
            out.setdefault(found["state"], {})[found["param"]] = as_it_is(name, entry)
    return {kind: layer_by_layer(stored) for kind, stored in out.items()}


def layer_by_layer(entries: Mapping[str, Stored]) -> dict[str, Stored]:
    """Splits tensors that stack all layers: ``decoder.layers.mlp.weight`` of shape ``[layers, ...]`` becomes
    ``decoder.layers.0.mlp.weight`` of shape ``[...]``, and so on.

    Raises:
        ValueError: their numbers of layers differ.
    """
    out: dict[str, Stored] = {}
    counts: dict[str, int] = {}
    for name, stored in entries.items():
        found = _STACKED.fullmatch(name)
        if found is None:
            out[name] = stored
            continue
        layers = stored.shape[0] if stored.shape else 0
        if counts.setdefault(found["before"], layers) != layers or not layers:
            raise ValueError(f"mfsdp: {name} of shape {list(stored.shape)} is not one part for each of "
                             f"{counts[found['before']]} layers")  # fmt: skip
        ((inside, box),) = stored.boxes
        for i in range(layers):
            part = ChunkStorageMetadata(
                torch.Size([box.offsets[0] + i, *box.offsets[1:]]), torch.Size([1, *box.sizes[1:]])
            )
            named = f"{found['before']}.{i}.{found['after']}"
            out[named] = Stored(((inside, part),), stored.shape[1:], stored.dtype)
    return out


def joined(entries: Mapping[str, Stored]) -> dict[str, Stored]:
    """Joins the two halves of a gated ``linear_fc1``, which "fsdp_dtensor" writes as ``weight_w`` and ``weight_v``."""
    out = dict(entries)
    for name, w in entries.items():
        found = _GATE.fullmatch(name)
        if found is None or found["whole"] in entries:
            continue
        v = entries.get(f"{found['whole']}_v")
        if v is not None and (w.shape, w.dtype) == (v.shape, v.dtype):
            del out[name], out[f"{found['whole']}_v"]
            out[found["whole"]] = Stored(w.boxes + v.boxes, torch.Size([2 * w.shape[0], *w.shape[1:]]), w.dtype)
    return out
