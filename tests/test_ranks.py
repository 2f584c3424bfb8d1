"""The harness itself: a test that cannot fail is worth nothing."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import Ranks

pytestmark = pytest.mark.dist


def total(x: torch.Tensor) -> float:
    dist.all_reduce(x)
    return x.item() + dist.get_rank()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("one rank only")
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_results_by_rank(two_ranks: Ranks) -> None:
    assert two_ranks.run(total, torch.ones(1)) == [2.0, 3.0]


def test_failures_are_reported_and_survived() -> None:
    ranks = Ranks(2, start="forkserver")
    try:
        with pytest.raises(AssertionError, match=r"rank 1:(.|\n)*one rank only"):
            ranks.run(fail_on_one)
        assert ranks.run(total, torch.ones(1)) == [2.0, 3.0]
        with pytest.raises(AssertionError, match=r"rank 0 did not answer(.|\n)*hang_on_one"):
            ranks.run(hang_on_one, timeout=3)
    finally:
        ranks.stop()
