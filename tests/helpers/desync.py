"""What a rank raises, groups that may break, and a wire that answers late."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers.ranks import here


def throwaway() -> DeviceMesh:
    """A mesh whose groups may break: no other test has them."""
    group = dist.new_group(list(range(dist.get_world_size())))
    return DeviceMesh.from_group(group, here().type, mesh_dim_names=("dp_shard",))


def said(run: Callable[[], Any]) -> str:
    """The error that something raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except RuntimeError as error:
            return str(error)
    return "no error"


class Wire:
    """Words by hand."""

    ranks, me, prompt = (0, 1), 0, False

    def __init__(self, theirs: list[int | None]):
        self.theirs, self.told = theirs, {}

    def exchange(self, word: int) -> Any:
        theirs = self.theirs.pop(0)
        answers = [word, word if theirs is None else theirs]

        class Answers:
            here = False

            def ready(self) -> bool:
                return self.here

            def wait(self) -> list[int]:
                return answers

        self.last = Answers()
        return self.last

    def tell(self, key: str, text: str) -> None:
        self.told[key] = text

    def ask(self, key: str, seconds: float) -> str | None:
        return self.told.get(key)

    def sever(self) -> None: ...
