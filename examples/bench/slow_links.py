"""Ranks of a benchmark behind links of a given rate (slowlink.sh); needs root and Linux."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def result_of(script: str, world: int, rate: str, **environment: str) -> Any:
    """Returns what rank 0 of a script writes as JSON to its argument ``--result``. The script has this process's other
    arguments, and an environment variable that is set already keeps its value.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        slow = Path(__file__).with_name("slowlink.sh")
        command = [sys.executable, script, *sys.argv[1:], "--result", str(result)]
        subprocess.run(["bash", slow, str(world), rate, "--", *command], check=True, env={**environment, **os.environ})
        return json.loads(result.read_text())
