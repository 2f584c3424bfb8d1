"""Two environment variables for settings that a framework's configuration has no field for.

They serve where other code creates the configuration. ``MFSDP_OPTIONS`` holds the backend's options, ``MFSDP_SHARDING``
arguments of `mfsdp.fully_shard`; each is a JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..config.options import Options


def options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the backend's options: those of the environment, overridden by ``given``.

    Raises:
        ValueError: one that the backend does not have.
    """
    found = {**_read("MFSDP_OPTIONS"), **(given or {})}
    Options.parse(found)
    return found


def sharding(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns arguments of `mfsdp.fully_shard`: those of the environment, overridden by ``given``."""
    return {**_read("MFSDP_SHARDING"), **(given or {})}


def _read(name: str) -> dict[str, Any]:
    text = os.environ.get(name) or "{}"
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{name}={text!r}: give an object in JSON, such as {name}='{{\"prefetch\": 2}}'")
    return found
