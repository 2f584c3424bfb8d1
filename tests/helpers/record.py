"""A record of a test run, to be kept: ``pytest --record FOLDER`` writes record.json and record.txt there."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch


class Record:
    """Notes every test: its outcome, seconds, why it was skipped, and its figures (``record_property``)."""

    def __init__(self, folder: Path):
        self.folder, self.begun = folder, time.time()
        self.tests: dict[str, dict[str, Any]] = {}
        """In the order in which they ran."""
        self.about: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            test["why"] = report.longrepr[2].removeprefix("Skipped: ")
        if report.failed:
            test["why"] = str(report.longrepr).strip().splitlines()[-1]
        if report.when == "teardown" and report.user_properties:
            test["figures"] = dict(report.user_properties)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        about = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "devices": torch.cuda.device_count(),
            "day": time.strftime("%Y-%m-%d", time.gmtime(self.begun)),
            "minutes": round((time.time() - self.begun) / 60, 1),
            "status": int(exitstatus),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "record.json").write_text(json.dumps({**about, "tests": self.tests}, indent=1) + "\n")
        (self.folder / "record.txt").write_text("\n".join(self._lines(about)) + "\n")
        self.about = about

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The same table, behind pytest's own output."""
        for line in self._lines(self.about):
            terminalreporter.write_line(line)

    def _lines(self, about: dict[str, Any]) -> list[str]:
        counts = Counter(test["outcome"] for test in self.tests.values())
        about = {**about, "tests": ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))}
        lines = [f"{name:8} {value}" for name, value in about.items()]
        for name, test in self.tests.items():
            more = "; ".join([test.get("why", ""), *(f"{k} {v}" for k, v in test.get("figures", {}).items())]).strip(
                "; "
            )
            lines.append(f"{test['outcome']:8} {test['seconds']:8.1f} s  {name}  {more}".rstrip())
        return lines
