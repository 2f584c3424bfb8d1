"""Scripts of examples/, run by ranks that tests have: an interpreter that imports torch anew takes ten CPU seconds."""

from __future__ import annotations

import importlib
import io
import sys
from contextlib import redirect_stdout
from unittest import mock

import torch.distributed as dist


def printed(path: str, *arguments: object) -> str:
    """What a function of a script prints on this rank, which has its process group already.

    Args:
        path: such as ``"examples.pipeline.train.main"``.
        arguments: of the command line.
    """
    module, _, function = path.rpartition(".")
    text = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [module, *map(str, arguments)]), redirect_stdout(text),
        mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT),
    ):  # fmt: skip
        script = importlib.import_module(module)
        getattr(script, function)(*([script.arguments()] if hasattr(script, "arguments") else []))
    return text.getvalue()
