"""Runs functions on gloo ranks: a pool of processes that starts once and serves many tests.

def work(x):                       # a top-level function of a test module, runs on every rank
    dist.all_reduce(x)
    return x.item()

@pytest.mark.dist
def test_it(two_ranks):            # or four_ranks
    assert two_ranks.run(work, torch.ones(1)) == [2.0, 2.0]
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing as mp

SELDOM = (20_000, 10, 10)
"""Of garbage collection: with Python's own 700 it is a quarter of what compiling takes."""


class Ranks:
    """``world`` processes with a default group, gloo unless told otherwise; with ``"nccl"`` each has a GPU, which some
    share where there are fewer (`on_a_gpu`), with ``""`` there is no group. Rebuilt after a failure, so that every test
    finds them sound. Those that a ``"forkserver"`` starts are warm (`tests.helpers.preload`). A function that raises
    ``SystemExit`` answers with its code, and the process ends.
    """

    def __init__(self, world: int, backend: str = "gloo", start: str = "spawn"):
        self.world, self.backend, self.start = world, backend, start
        self._workers: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """The function's results, by rank.

        Raises:
            AssertionError: a rank raised (with its traceback), or did not answer in time (with its stack).
        """
        answers = self.answers(function, *args, timeout=timeout, **kwargs)
        faults = [f"rank {r}:\n{a[1]}" for r, a in enumerate(answers) if a is not None and not a[0]]
        if not faults:
            stuck = [r for r, a in enumerate(answers) if a is None]
            faults = [f"rank {r} did not answer in {timeout} s:\n{self._stack(r)}" for r in stuck]
        if faults:
            self.stop()
            raise AssertionError("\n".join(faults))
        return [a[1] for a in answers if a is not None]

    def answers(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120,
        patience: float = 2,
        bad: Callable[[tuple[bool, Any]], bool] = lambda answer: not answer[0],
        **kwargs: Any,
    ) -> list[tuple[bool, Any] | None]:
        """By rank: whether it returned, with the result or a traceback; ``None`` from those that did not answer.

        After a ``bad`` answer the others, which may wait for that rank in vain, have ``patience`` seconds.
        """
        if not all(worker.is_alive() for worker in self._workers):  # of what the last one left behind
            self.stop()
        if not self._workers:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        deadline = time.monotonic() + timeout
        answers: list[tuple[bool, Any] | None] = [None] * self.world
        while time.monotonic() < deadline and None in answers:
            for rank, pipe in enumerate(self._pipes):
                if answers[rank] is None and pipe.poll(0.005):
                    try:
                        answers[rank] = pipe.recv()
                    except (EOFError, ConnectionResetError):
                        answers[rank] = (False, "the process died")
                    if bad(answers[rank]):
                        deadline = min(deadline, time.monotonic() + patience)
        return answers

    def stop(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        self._workers, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = mp.get_context(self.start)
        if self.start == "forkserver":
            context.set_forkserver_preload(["tests.helpers.preload"])
        self._folder = tempfile.TemporaryDirectory(prefix="mfsdp-ranks-")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            args = (rank, self.world, self.backend, self._folder.name, theirs, dict(os.environ))
            worker = context.Process(target=_serve, args=args, daemon=True)
            worker.start()
            self._workers.append(worker)
            self._pipes.append(ours)

    def _stack(self, rank: int) -> str:
        assert self._folder is not None
        os.kill(self._workers[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return Path(self._folder.name, f"stack{rank}").read_text()


def _serve(rank: int, world: int, backend: str, folder: str, pipe: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the fork server's is that of when it started
    gc.set_threshold(*SELDOM)
    stack = open(Path(folder, f"stack{rank}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        os.environ.update(on_a_gpu(rank, world, torch.cuda.device_count()))
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    _share_one_loop()
    if backend:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    while True:
        function, args, kwargs = pipe.recv()
        try:
            answer = (True, function(*args, **kwargs))
        except SystemExit as end:
            pipe.send((True, end.code))
            return
        except BaseException:
            answer = (False, traceback.format_exc())
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        gc.collect()
        gc.freeze()  # half a million objects of imported packages, a quarter of a second each time
        if (
            "mfsdp.runtime.static_buffers" in sys.modules
        ):  # what a test leaves behind uses no static buffer of the next one
            sys.modules["mfsdp.runtime.static_buffers"].reset()
        pipe.send(answer)


def on_a_gpu(rank: int, world: int, gpus: int) -> dict[str, str]:
    """A rank's environment for NCCL. Where ranks share a GPU each says that it is a host of its own, or NCCL refuses
    the device ("Duplicate GPU detected"); bytes go over loopback sockets. Tried with NCCL 2.28.9.
    """
    found = {"LOCAL_RANK": str(rank % gpus)}
    if gpus < world:
        found |= {
            "NCCL_HOSTID": f"host{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # for `devices.alone_on`
        }
    return found


def here() -> torch.device:
    """Where a rank's tensors live: on its GPU, if NCCL connects the ranks, else on the CPU."""
    nccl = dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _share_one_loop() -> None:
    """Process groups over gloo share one device: its thread wakes a hundred times in a second, and tests make many
    groups. Private in torch (``_Options``); tried on 2.13.
    """
    if not dist.is_gloo_available():
        return
    device = dist.ProcessGroupGloo.create_device(interface="lo")

    class Gloo(dist.ProcessGroupGloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any):  # 2.14 gives more
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = Gloo  # type: ignore[misc]


@contextmanager
def collectives_told(told: Callable[[str, str], object]) -> Iterator[None]:
    """Calls something for every collective that is launched inside of the ``with``: ``"gather"``, ``"scatter"`` or
    ``"all_reduce"``, and its group.
    """
    from mfsdp.runtime.execution import Execution

    own = {kind: getattr(Execution, kind) for kind in ("gather", "scatter", "all_reduce")}

    def telling(kind: str) -> Callable[..., Any]:
        def launch(self: Execution, *args: Any) -> Any:
            told(kind, args[-1])
            return own[kind](self, *args)

        return launch

    for kind in own:
        setattr(Execution, kind, telling(kind))
    try:
        yield
    finally:
        for kind, function in own.items():
            setattr(Execution, kind, function)
