"""Probes: whether what programs read, compute and give is finite, and whether replicas are alike, every so many steps.

Note [Runtime checks]
Under ``check_finite`` and ``check_replicas`` a program has probes in its lines (`mfsdp.passes.insert_checks`). In most
steps they return at once. In every so many of them each takes the largest magnitude of what it looks at, parameter by
parameter, and of weights a checksum; nothing is waited for. Behind the program one small tensor says what was wrong
where: on the CPU it is there already, from a device it is copied, and looked at when a later program begins and finds
it there.

What is not finite goes with the next gather or sum to all ranks, and from then on is everywhere; the first line of
the first program that has found it is the news, and the rank whose line it is. So a rank tells all ranks (through the
watch) when a model that was well the last time is not any more, once. Weights and arguments of the call are a rank's
own, and told at once; results and gradients may follow from what others have, and sums over ranks do: they are told a
second or two later, if until then nobody has told of what comes before.

A step ends with a backward that synchronises gradients: that is the same on all ranks (invariant 13), and all microbatches
of a step are looked at. Nothing is changed and nothing raised: a GradScaler's steps may have Inf in gradients, and go
on.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import execution, groups, sync_collectives, watchdog
from .buffer_registry import owner
from .checksums import checksum

NAMED = 4
"""Places of which a report has the names, and ranks that tell of what is their own."""


@dataclass(frozen=True)
class Place:
    """What was looked at."""

    what: str
    """``"weights"``, ``"argument NAME"``, ``"result"``, ``"gradient"``, ``"sum"``; or ``"over AXIS"`` of replicas."""
    name: str
    """The path of a parameter, or of a unit."""
    line: str = ""
    number: int = 0
    """In the order of the program."""

    def told(self) -> tuple[int, int]:
        """How far from what was wrong first it may be, and how many ranks tell of it."""
        if self.what == "weights" or self.what.startswith("argument"):
            return 0, NAMED
        return (1, NAMED) if self.what in ("result", "gradient") else (2, 1)

    def __str__(self) -> str:
        if self.what == "result":
            return f"the result of {self.line} in unit {self.name!r}"
        if self.what.startswith("argument"):
            return f"{self.what} of the call"
        of = {"weights": "weights", "gradient": "this rank's own gradient", "sum": "the sum over ranks of gradients"}
        return f"{of.get(self.what, 'weights')} of {self.name}" + ("" if self.what in of else f" {self.what}")


@dataclass(eq=False)
class Health:
    """What is known of a model."""

    number: int = 0
    """The same on all ranks, once a program of it has looked; models may have one name."""
    wrong: dict[tuple[str, ...], int] = field(default_factory=dict)
    """The last step in which something was wrong, by kind."""


_models = itertools.count(1)


class Looking:
    """A run whose probes look."""

    def __init__(self, model: str, health: Health, phase: str, step: int, finite: int, compares: int):
        self.model, self.health, self.phase, self.step = model, health, phase, step
        self.finite, self.compares = finite, compares
        self.found: dict[torch.dtype, list[tuple[Place, torch.Tensor]]] = {}
        """Largest magnitudes."""
        self.sums: dict[str, list[tuple[str, torch.Tensor]]] = {}
        """Checksums of weights, by the group whose ranks should have the same."""

    def look(
        self, run: execution.Execution, value: torch.Tensor, source: torch.Tensor | None, starts: Sequence[int],
        sizes: Sequence[int], names: str, what: str,
    ) -> None:  # fmt: skip
        """Looks at what a probe is given (`kernels.probe`)."""
        buffer = None if source is None else owner(source)
        path, line = run.place.partition(" ")[2], run.line_of_listing.rpartition("probe ")[2]
        path = path if buffer is None else buffer.unit.fqn
        parts = [("", value)]
        if starts:
            flat = [value[start : start + size] for start, size in zip(starts, sizes, strict=True)]
            parts = list(zip(names.split(","), flat, strict=True))
        elif what in ("weights", "sum"):
            if buffer is None or value.data_ptr() in run.held:
                return
            flat_rows = buffer.weights.main if what == "weights" else value
            slots = enumerate(buffer.layout.slots)
            parts = [(slot.name, buffer.weights.view(flat_rows, i)) for i, slot in slots]
            if what == "weights" and self.compares:
                for i, (name, rows) in enumerate(parts):
                    for group in buffer.copies(i):
                        self.sums.setdefault(group, []).append((_path(path, name), checksum(rows)))
        for name, part in parts if self.finite else ():
            if part.numel():
                place = Place(what, _path(path, name), line, sum(map(len, self.found.values())))
                self.found.setdefault(part.dtype, []).append((place, _largest(part)))

    def close(self) -> None:
        """Behind the program: what was wrong, told at once or, on a device, when it is known."""
        with torch.inference_mode(False), torch.no_grad():
            for group, members in self.sums.items():
                apart = self._compared(group, [total for _, total in members])
                axis, over = groups.axis_of(group).name, groups.ranks(group)
                places = [Place(f"over {axis}, ranks {over}", name) for name, _ in members]
                _bring(self._outcome(self.compares, ("apart", group), places), apart)
            if self.finite:
                places = [place for some in self.found.values() for place, _ in some]
                codes = [_codes(torch.stack([largest for _, largest in some])) for some in self.found.values()]
                outcome = self._outcome(self.finite, ("not finite",), places)
                _bring(outcome, torch.cat(codes) if codes else torch.zeros(0))

    def _outcome(self, every: int, kind: tuple[str, ...], places: list[Place]) -> CheckOutcome:
        return CheckOutcome(self.model, self.health, self.phase, self.step, every, kind, places)

    def _compared(self, group: str, sums: list[torch.Tensor]) -> torch.Tensor:
        """1 where ranks of a group have other sums: the largest is not the smallest."""
        mine = (torch.stack(sums) & (2**50 - 1)).double()  # exact
        with execution.announced(f"comparison of {len(sums)} weights of {self.model}", group):
            high, low = sync_collectives.reduced(torch.cat([mine, -mine]), "max", group).chunk(2)
        return (high + low != 0).to(torch.uint8)


def _path(unit: str, name: str) -> str:
    return name if name and unit == "(root)" else ".".join(filter(None, (unit, name)))


def _largest(part: torch.Tensor) -> torch.Tensor:
    """NaN if there is one, Inf if there is one. On a CPU the norm takes ten times as long."""
    with torch.no_grad():
        if part.device.type != "cpu":
            largest: torch.Tensor = torch.linalg.vector_norm(part, float("inf"))
            return largest
        low, high = torch.aminmax(part.detach())
        return torch.maximum(high, -low)


def _codes(largest: torch.Tensor) -> torch.Tensor:
    """0: finite; 1: Inf; 2: NaN."""
    return largest.isinf().to(torch.uint8) + 2 * largest.isnan().to(torch.uint8)


# When a program looks


class RuntimeChecks:
    """Those of a compiled program.

    Args:
        phase: the program's.
        finite: every how many steps it looks for what is not finite, 0 for never.
        compares: every how many steps it compares replicas.
    """

    def __init__(self, phase: str, finite: int, compares: int):
        self.phase, self.finite, self.compares = phase, finite, compares if phase != "backward" else 0
        self._own = Health()
        """Of a model that is not sharded, as far as it is in this program."""
        self._steps: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        """By whose parameters it reads: how often gradients had been synchronised, and which step that was."""

    def begin(self, run: execution.Execution, buffers: Sequence[Any]) -> Looking | None:
        """What a run is looked at with; ``None`` where it is not."""
        poll()
        first = next((buffer for buffer in buffers if buffer is not None), None)
        step, health = self._step(first), self._own if first is None else first.unit.outermost.health
        finite, compares = (every if every and (step - 1) % every == 0 else 0 for every in (self.finite, self.compares))
        if first is not None and first.spec.any_optional:
            compares = 0  # ranks may run other programs
        model = run.name.removesuffix(f" {self.phase}")
        if not (finite or compares):
            return None
        health.number = health.number or next(_models)
        return Looking(model, health, self.phase, step, finite, compares)

    def _step(self, buffer: Any) -> int:
        key = self if buffer is None else buffer
        syncs, step = self._steps.get(key, (-1, 0))
        now = syncs if buffer is None else buffer.unit.outermost.syncs[0]
        if now != syncs or buffer is None or self.phase == "inference":
            step += 1
        self._steps[key] = now, step
        return step


# What is told


@dataclass
class CheckOutcome:
    """What a run has found, or a comparison."""

    model: str
    health: Health
    phase: str
    step: int
    every: int
    """Steps from one look to the next."""
    kind: tuple[str, ...]
    """``("not finite",)``, or ``("apart", GROUP)``."""
    places: list[Place]

    def tell(self, codes: Sequence[int]) -> None:
        """Has all ranks told, if something is wrong that was not when the model was looked at before."""
        wrong = [(place, code) for place, code in zip(self.places, codes, strict=True) if code]
        wrong.sort(key=lambda found: found[0].number)
        if not wrong:
            return
        last = self.health.wrong.get(self.kind)
        self.health.wrong[self.kind] = self.step
        if last is None or last < self.step - self.every:
            event = f"probes/{self.health.number}/{'/'.join(self.kind)}/{self.step}"
            watchdog.tell_all(self._text(wrong), event, *wrong[0][0].told())

    def _text(self, wrong: list[tuple[Place, int]]) -> str:
        (first, code), *more = wrong
        rest = [str(place) for place, _ in more[: NAMED - 1]]
        rest += [f"{len(more) - len(rest)} more"] if len(more) > len(rest) else []
        said = f"mfsdp: rank {groups.rank()}, step {self.step}, {self.model} {self.phase}: "
        if self.kind[0] == "apart":
            said += f"{first} differ" + (f"; and {'; '.join(rest)}" if rest else "")
            return (
                f"{said}\n  mfsdp.check_replicas(model) says more; sync_module_states=True, or a checkpoint, mends it."
            )
        said += f"{'Inf' if code == 1 else 'NaN'} in {first}" + (f"\n  then in {'; '.join(rest)}" if rest else "")
        if first.what in ("gradient", "sum"):
            said += "\n  A GradScaler skips such a step; without one the next forward has it in all weights."
        return said


_pending: deque[tuple[CheckOutcome, torch.Tensor, torch.Event]] = deque()
"""What a device has not brought yet."""


def _bring(outcome: CheckOutcome, codes: torch.Tensor) -> None:
    """Tells of it, as soon as that can be without waiting. On a device this has not run yet."""
    if codes.device.type == "cpu":
        outcome.tell(codes.tolist())
        return
    here = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=True)
    here.copy_(codes, non_blocking=True)
    event = torch.Event(codes.device)
    event.record()
    _pending.append((outcome, here, event))


def poll() -> None:
    """Tells of what has come."""
    while _pending and _pending[0][2].query():
        outcome, codes, _ = _pending.popleft()
        outcome.tell(codes.tolist())
