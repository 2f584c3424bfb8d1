"""Measures machines and kernels with few rounds."""

from __future__ import annotations

import pytest

from mfsdp.cost_model import kernel_timings


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_timings, "LEAST", 1e-9)
    monkeypatch.setattr(kernel_timings, "ROUNDS", 1)
