"""What a framework's own configuration has no field for, where somebody else makes the configuration: two variables.

``MFSDP_OPTIONS`` holds the backend's options, ``MFSDP_SHARDING`` arguments of `mfsdp.fully_shard`; each is an
object in JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..config.options import Options

OPTIONS, SHARDING = "MFSDP_OPTIONS", "MFSDP_SHARDING"


def options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The backend's options: those of the environment, before them those that were given.

    Raises:
        ValueError: one that the backend does not have.
    """
    found = {**read(OPTIONS), **(given or {})}
    Options.parse(found)
    return found


def read(name: str) -> dict[str, Any]:
    """What a variable holds; nothing, where there is none.

    Raises:
        ValueError: it is no object in JSON.
    """
    text = os.environ.get(name) or "{}"
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{name}={text!r}: give an object in JSON, such as {name}='{{\"prefetch\": 2}}'")
    return found
