"""Lets ``torch.compile(backend="mfsdp")`` find the backend wherever ``mfsdp`` was imported from.

torch looks up a backend by name among registered backends and among entry points of installed packages. An installed
mfsdp has an entry point; sources on ``PYTHONPATH`` have none, so this module answers ``importlib.metadata`` as an
installed package would. It works before torch is imported, and imports nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, EntryPoint
from os import PathLike
from pathlib import Path
from typing import Any

_ENTRY = EntryPoint("mfsdp", "mfsdp.compiler.backend:mfsdp", "torch_dynamo_backends")


class _Sources(Distribution):
    """The package as ``importlib.metadata`` sees it, without installed files."""

    def __init__(self, version: str):
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: mfsdp\nVersion: {version}\n",
            "entry_points.txt": f"[{_ENTRY.group}]\n{_ENTRY.name} = {_ENTRY.value}\n",
            "top_level.txt": "mfsdp\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(__file__).parent.parent / path


class _Finder(DistributionFinder):
    """Comes last on ``sys.meta_path``, so that an installed mfsdp is found first."""

    def __init__(self, version: str):
        self.version = version

    def find_spec(self, *_: Any) -> None:
        """Finds no modules."""

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterable[Any]:  # noqa: B008
        return [_Sources(self.version)] if context.name in (None, "mfsdp") else []


def register(version: str) -> None:
    """Registers the backend. If torch has read all entry points already, adds it to the backends that torch knows.
    Private in torch (``torch._dynamo.backends.registry._BACKENDS``); tried on 2.13, of 2.11 to 2.15 that are supported.
    """
    sys.meta_path.append(_Finder(version))
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None:
        registry._BACKENDS.setdefault(_ENTRY.name, _ENTRY)
