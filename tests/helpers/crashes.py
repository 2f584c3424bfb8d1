"""Processes that die while they save, in every way of saving; counts what is lost.

python -m tests.helpers.crashes FOLDER --injected 900 --random 100

Injected: a process ends at its first file operation, at its second and so on until one survives; and then where a file
grows beyond some byte, killed by the system. Random: it is killed from outside at some moment; of runs that save
checkpoints one of two ranks or both, and all are started again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from mfsdp import Checkpoints
from tests.helpers.parity import compiled, whole


class Loader:
    """Random data; its place is its state."""

    def __init__(self, seed: int):
        self.random = torch.Generator().manual_seed(seed)

    def next(self) -> torch.Tensor:
        return torch.randn(4, 8, generator=self.random)

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.set_state(state["random"])


class Run:
    """A training run with dropout, a scheduler and a loader."""

    def __init__(self, seed: int, lowering: str = "none"):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 33), nn.Dropout(0.3), nn.Linear(33, 8))
        self.model = mfsdp.fully_shard(model, units=["0"])
        self.call = compiled(self.model, lowering)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.loader = Loader(seed + rank)
        torch.manual_seed(seed + 100 + rank)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.call(self.loader.next()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}

    def values(self) -> list[torch.Tensor]:
        return [whole(p).detach().clone() for p in self.model.parameters()]

    def has(self, values: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.values(), values, strict=True))


# Ways of saving


class Way:
    """Saves a run after its first step, and then after its second: whoever dies in between leaves one of them."""

    def __init__(self, folder: Path):
        self.folder, self.runs, self.other = folder, [Run(0), Run(0)], Run(3)
        for steps, run in enumerate(self.runs, 1):
            run.train(steps)
        self.want = [run.values() for run in self.runs]
        self.put(1)

    def put(self, step: int) -> None:
        """What is killed with step 2."""
        raise NotImplementedError

    def get(self) -> None:
        """Loads what is there into ``other``."""
        raise NotImplementedError

    def found(self) -> int:
        """The step that is there, 0 for neither."""
        self.get()
        return next((step for step, values in enumerate(self.want, 1) if self.other.has(values)), 0)

    def begin_again(self) -> None:
        shutil.rmtree(self.folder)
        self.put(1)


class Synchronous(Way):
    def put(self, step: int) -> None:
        checkpoints = Checkpoints(self.folder, keep=1)
        checkpoints.save(step, **self.runs[step - 1].parts)
        checkpoints.wait()

    def get(self) -> None:
        Checkpoints(self.folder).load(**self.other.parts)


class Behind(Synchronous):
    def put(self, step: int) -> None:
        checkpoints = Checkpoints(self.folder, keep=1)
        checkpoints.save(step, **self.runs[step - 1].parts, blocking=False)
        checkpoints.wait()


class Safetensors(Way):
    """Of one file and of several, in turns."""

    limits = (1 << 20, 600, 900, 600, 1 << 20)
    turn = 0

    def put(self, step: int) -> None:
        limit = self.limits[self.turn % len(self.limits)]
        mfsdp.save_safetensors(self.runs[step - 1].model, self.folder, max_file_bytes=limit)

    def get(self) -> None:
        mfsdp.load_safetensors(self.other.model, self.folder)

    def begin_again(self) -> None:
        self.turn += 1
        super().begin_again()
        self.turn += 1


class Conversion(Way):
    """To safetensors; the target is there, or its source is, unharmed."""

    def put(self, step: int) -> None:
        if step == 1:
            Checkpoints(self.folder / "source").save(1, **self.runs[0].parts)
        else:
            mfsdp.convert(self.folder / "source", self.folder / "target", max_file_bytes=600)

    def get(self) -> None:
        mfsdp.load_safetensors(self.other.model, self.folder / "target")

    def found(self) -> int:
        if not (self.folder / "target").exists():
            Checkpoints(self.folder / "source").load(**self.other.parts)
            return int(self.other.has(self.want[0]))
        self.get()
        return 2 * self.other.has(self.want[0])


class ConversionBack(Conversion):
    """To torch's format."""

    def put(self, step: int) -> None:
        if step == 1:
            super().put(1)
            mfsdp.save_safetensors(self.runs[0].model, self.folder / "files")
        else:
            mfsdp.convert(self.folder / "files", self.folder / "target")

    def get(self) -> None:
        state = {"model": self.other.model.state_dict()}
        torch.distributed.checkpoint.load(state, checkpoint_id=self.folder / "target")


WAYS: dict[str, type[Way]] = {
    "synchronous": Synchronous, "blocking=False": Behind, "safetensors": Safetensors, "convert": Conversion,
    "convert back": ConversionBack,
}  # fmt: skip

# Injected

EVENTS = ("open", "os.", "shutil.")


def dies(function: Callable[[], object], operation: int | None = None, byte: int | None = None) -> bool:
    """Whether a process that calls this ends at that file operation, counted from 0, or beyond that byte of a file."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, args: Any) -> None:
            nonlocal seen
            if event.startswith(EVENTS):
                seen += 1
                if operation is not None and seen > operation:
                    os._exit(9)

        sys.addaudithook(count)
        if byte is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (byte, resource.RLIM_INFINITY))
        try:
            function()
        except BaseException as error:
            print(f"not killed, but {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9, -signal.SIGXFSZ), f"it ended with {code}"
    return code != 0


def injected(way: Way, points: int, stride: int = 1) -> dict[str, int]:
    """Ends a process at every ``stride``-th file operation, and at bytes, until there are so many points."""
    counts = {"operations": 0, "bytes": 0, "published": 0, "losses": 0}
    chance = random.Random(0)

    def killed(kind: str, **where: int) -> bool:
        died = dies(lambda: way.put(2), **where)
        counts[kind] += died
        step = way.found()
        counts["losses"] += step == 0 or step < 2 - died
        counts["published"] += died and step == 2
        if step != 1:  # killed behind the moment at which it is there
            way.begin_again()
        return died

    operation = 0
    while killed("operations", operation=operation):
        operation += stride
    way.put(2)
    largest = max(path.stat().st_size for path in way.folder.rglob("*") if path.is_file())
    way.begin_again()
    while counts["operations"] + counts["bytes"] < points:
        killed("bytes", byte=chance.randrange(largest))
    return counts


# At random


def saving(folder: str, seconds: float, blocking: bool) -> None:
    """Trains and saves, over and over."""
    run, checkpoints = Run(0), Checkpoints(folder, keep=3)
    step = checkpoints.load(**run.parts) or 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run.train(1)
        step += 1
        checkpoints.save(step, **run.parts, blocking=blocking)


def counted(folder: str) -> tuple[int, bool]:
    """The newest step, and whether it is what so many steps give."""
    run = Run(5)
    step = Checkpoints(folder).load(**run.parts)
    unstopped = Run(0)
    unstopped.train(step)
    return step, run.has(unstopped.values())


def killed_and_resumed(folder: Path, kills: int, blocking: bool) -> dict[str, int]:
    """Kills one of two ranks, or both, at a random moment of a run that saves all the time, and starts it again."""
    from tests.helpers.ranks import Ranks

    chance, checkpoints = random.Random(0), Checkpoints(folder)
    counts = {"kills": 0, "resumes": 0, "losses": 0, "step": 0}
    for kill in range(kills + 1):
        ranks = Ranks(2, start="forkserver")  # starts with what the last ones have left
        thread = threading.Thread(target=lambda r=ranks: _ignored(lambda: r.run(saving, str(folder), 60, blocking)))
        try:
            if kill:
                (step, right), other = ranks.run(counted, str(folder), timeout=600)
                counts["resumes"] += 1
                counts["losses"] += not (right and other == (step, right) and step >= counts["step"])
                counts["step"] = step
            if kill == kills:
                break
            thread.start()
            while thread.is_alive() and checkpoints.steps()[-1:] <= [counts["step"] + 1]:
                time.sleep(0.01)
            time.sleep(0.3 * chance.random())
            for worker in ranks._workers if kill % 2 else [chance.choice(ranks._workers)]:
                os.kill(worker.pid, signal.SIGKILL)
            counts["kills"] += 1
            time.sleep(0.2)
        finally:
            ranks.stop()
            if thread.is_alive():
                thread.join()
    return counts


def _ignored(function: Any) -> None:
    with contextlib.suppress(Exception):
        function()


def killed_at_random(way: Way, kills: int) -> dict[str, int]:
    """Kills a process that saves in one way, at a random moment."""
    counts, chance = {"kills": 0, "published": 0, "losses": 0}, random.Random(0)
    begun = time.monotonic()
    dies(lambda: way.put(2))
    lasts = time.monotonic() - begun
    way.begin_again()
    while counts["kills"] < kills:
        child = os.fork()
        if child == 0:
            way.put(2)
            os._exit(0)
        time.sleep(lasts * chance.random())
        os.kill(child, signal.SIGKILL)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        step = way.found()
        counts["kills"] += died
        counts["published"] += died and step == 2
        counts["losses"] += step == 0 or step < 2 - died
        if step != 1:
            way.begin_again()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--injected", type=int, default=900, help="over all ways of saving")
    parser.add_argument("--random", type=int, default=100, help="likewise")
    args = parser.parse_args()
    torch.set_num_threads(1)
    total: Counter[str] = Counter()

    def tell(name: str, counts: dict[str, int]) -> None:
        print(f"{name}: {counts}", flush=True)
        total.update({kind: n for kind, n in counts.items() if kind != "step"})

    for i, (name, way) in enumerate(WAYS.items()):
        share = (args.injected - total["operations"] - total["bytes"]) // (len(WAYS) - i)
        tell(f"{name}, injected", injected(way(args.folder / f"{name} injected"), share))
    for i, (name, way) in enumerate(reversed(WAYS.items())):
        share, folder = (args.random - total["kills"]) // (len(WAYS) - i), args.folder / f"{name} random"
        if issubclass(way, Synchronous):
            tell(f"{name}, random, two ranks", killed_and_resumed(folder, share, blocking=way is Synchronous))
        else:
            tell(f"{name}, random", killed_at_random(way(folder), share))
    print(dict(total))


if __name__ == "__main__":
    main()
