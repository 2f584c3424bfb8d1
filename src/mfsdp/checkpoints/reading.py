"""Reads torch.distributed.checkpoint's folders as data only; torch's own reader loads any class that a pickle names.

``.metadata`` is a pickle, and so is every value that is not a tensor (learning rates, step counts). For ``.metadata``
only known classes are allowed; the values are read with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from .files import inside

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_KNOWN = {
    (_METADATA, "BytesStorageMetadata"), (_METADATA, "ChunkStorageMetadata"), (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"), (_METADATA, "StorageMeta"), (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"), (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_PLANNER, "BytesIOWriteData"), (_PLANNER, "SavePlan"), (_PLANNER, "TensorWriteData"), (_PLANNER, "WriteItem"),
    (_PLANNER, "WriteItemType"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("pathlib", "PurePath"), ("pathlib", "PurePosixPath"), ("pathlib", "PureWindowsPath"),
}  # fmt: skip
"""Classes and functions in a ``.metadata``, also Megatron-Core's. Private in torch; tried on 2.13, not on the others of
2.11 to 2.15."""

_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_INSTEAD = {
    ("pathlib", "Path"): ("pathlib", "PurePath"),
    ("pathlib", "PosixPath"): ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"): ("pathlib", "PureWindowsPath"),
    (_MEGATRON, "MCoreMetadata"): (_METADATA, "Metadata"),
    (_MEGATRON, "MCoreSavePlan"): (_PLANNER, "SavePlan"),
}
"""Replacements: paths of any system, and classes of Megatron-Core before 0.16."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        asked = _INSTEAD.get((module, name), (module, name))
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if asked not in _KNOWN and not dtype:
            raise ValueError(
                f"mfsdp: .metadata asks for {module}.{name}, which torch.distributed.checkpoint does not write: it is "
                "damaged, or made to run code. Nothing was read"
            )
        return super().find_class(*asked)


class Reader(dcp.FileSystemReader):
    """Reads a folder, and no file outside it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads ``.metadata``.

        Raises:
            ValueError: it is no metadata, or names a file outside the folder.
        """
        with open(Path(self.path, ".metadata"), "rb") as file:
            try:
                found = _Unpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, KeyError) as error:
                raise ValueError(f"mfsdp: {self.path}/.metadata is damaged: {error}") from error
        if not isinstance(found, Metadata):
            raise ValueError(f"mfsdp: {self.path}/.metadata is damaged: it holds {type(found).__name__}")
        for info in (found.storage_data or {}).values():
            inside(info.relative_path)
        found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class Planner(DefaultLoadPlanner):
    """torch's planner, for values that are tensors, numbers, strings and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads a value that is not a tensor.

        Raises:
            UnpicklingError: the value has another class; the message names it, and how to allow it
                (``torch.serialization.add_safe_globals``).
        """
        content = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), content)
        content.seek(0)
        super().load_bytes(read_item, content)
