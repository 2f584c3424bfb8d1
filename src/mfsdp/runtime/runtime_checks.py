"""Runtime checks: every n steps, whether values in programs are finite, and replicas equal.

Note [Runtime checks]
Under ``check_finite`` and ``check_replicas``, programs contain probes (`mfsdp.passes.insert_checks`). In most steps
they return at once. In every n-th, each takes the largest magnitude of its value, per parameter, and of weights a
checksum; nothing waits. After the program, one small tensor tells what failed. The CPU reads it at once; from a device
it is copied, and read when a later program begins and it has arrived.

The next gather or sum spreads a non-finite value to all ranks. So a rank reports the first line of the first program
that found one: once, to all ranks (through the watchdog), when a model fails that passed its last check. Weights and
arguments are a rank's own, and are reported at once. Results and gradients may follow from other ranks' values, and
sums do: they are reported one or two seconds later, unless a rank has reported an earlier cause.

A step ends with a backward that synchronizes gradients, which is the same on all ranks (invariant 13); all its
microbatches are checked. Checks change and raise nothing: a GradScaler's steps may have Inf in gradients.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from . import capturing, execution, groups, sync_collectives, watchdog
from .buffer_registry import owner
from .checksums import checksum

if TYPE_CHECKING:
    from .buffer_api import Buffer

NAMED = 4
"""Places that a report names, and ranks that report their own values."""


@dataclass(frozen=True)
class Place:
    """What was checked."""

    what: str
    """``"weights"``, ``"argument NAME"``, ``"result"``, ``"gradient"``, ``"sum"``; or ``"over AXIS"`` for replicas."""
    name: str
    """Path of a parameter or a unit."""
    line: str = ""
    number: int = 0
    """Position in the program."""

    def told(self) -> tuple[int, int]:
        """How far from the original fault it may be, and how many ranks report it."""
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
    """What checks know of a model."""

    number: int = 0
    """Equal on all ranks after a program's first check; models may share a name."""
    wrong: dict[tuple[str, ...], int] = field(default_factory=dict)
    """The last step with a failure, by kind: ``("not finite",)``, or ``("apart", GROUP)``."""


_models = itertools.count(1)


@dataclass(eq=False)
class Check:
    """The checks of one execution."""

    model: str
    health: Health
    phase: str
    step: int
    finite: int
    """Steps between checks for Inf and NaN; 0: not in this execution."""
    compares: int
    """The same for comparisons of replicas."""
    found: dict[torch.dtype, list[tuple[Place, torch.Tensor]]] = field(default_factory=dict)
    """Largest magnitudes, by dtype."""
    sums: dict[str, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    """Checksums of weights, by the group whose ranks should have equal ones."""

    def probe(
        self, run: execution.Execution, value: torch.Tensor, source: torch.Tensor | None, starts: Sequence[int],
        sizes: Sequence[int], names: str, what: str,
    ) -> None:  # fmt: skip
        """Checks a probe's value (`kernels.probe`)."""
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
        """Reports failures after the program: at once, or on a device when they are known."""
        found, sums, self.found, self.sums = self.found, self.sums, {}, {}
        with torch.inference_mode(False), torch.no_grad():
            for group, members in sums.items():
                apart = self._compared(group, [total for _, total in members])
                axis, over = groups.axis_of(group).name, groups.ranks(group)
                places = [Place(f"over {axis}, ranks {over}", name) for name, _ in members]
                _bring(partial(self._tell, self.compares, ("apart", group), places), apart)
            if self.finite:
                places = [place for some in found.values() for place, _ in some]
                codes = [_codes(torch.stack([largest for _, largest in some])) for some in found.values()]
                tell = partial(self._tell, self.finite, ("not finite",), places)
                _bring(tell, torch.cat(codes) if codes else torch.zeros(0))

    def _compared(self, group: str, sums: list[torch.Tensor]) -> torch.Tensor:
        """1 where ranks of a group have different checksums: the largest is not the smallest."""
        mine = (torch.stack(sums) & (2**50 - 1)).double()  # exact in float64
        with execution.announced(f"comparison of {len(sums)} weights of {self.model}", group):
            high, low = sync_collectives.reduced(torch.cat([mine, -mine]), "max", group).chunk(2)
        return (high + low != 0).to(torch.uint8)

    def _tell(self, every: int, kind: tuple[str, ...], places: Sequence[Place], codes: Sequence[int]) -> None:
        """Reports failures to all ranks, unless the check of this kind ``every`` steps ago failed too."""
        wrong = [(place, code) for place, code in zip(places, codes, strict=True) if code]
        wrong.sort(key=lambda found: found[0].number)
        if not wrong:
            return
        last = self.health.wrong.get(kind)
        self.health.wrong[kind] = self.step
        if last is None or last < self.step - every:
            event = f"probes/{self.health.number}/{'/'.join(kind)}/{self.step}"
            watchdog.tell_all(self._text(wrong, kind[0] == "apart"), event, *wrong[0][0].told())

    def _text(self, wrong: Sequence[tuple[Place, int]], replicas: bool) -> str:
        (first, code), *more = wrong
        rest = [str(place) for place, _ in more[: NAMED - 1]]
        rest += [f"{len(more) - len(rest)} more"] if len(more) > len(rest) else []
        said = f"mfsdp: rank {groups.rank()}, step {self.step}, {self.model} {self.phase}: "
        if replicas:
            said += f"{first} differ" + (f"; and {'; '.join(rest)}" if rest else "")
            return (
                f"{said}\n  mfsdp.check_replicas(model) says more; sync_module_states=True, or a checkpoint, mends it."
            )
        said += f"{'Inf' if code == 1 else 'NaN'} in {first}" + (f"\n  then in {'; '.join(rest)}" if rest else "")
        if first.what in ("gradient", "sum"):
            said += "\n  A GradScaler skips such a step; without one the next forward has it in all weights."
        return said


def _path(unit: str, name: str) -> str:
    return name if name and unit == "(root)" else ".".join(filter(None, (unit, name)))


def _largest(part: torch.Tensor) -> torch.Tensor:
    """The largest magnitude; NaN or Inf if there is one. On the CPU, the norm would take ten times as long."""
    with torch.no_grad():
        if part.device.type != "cpu":
            largest: torch.Tensor = torch.linalg.vector_norm(part, float("inf"))
            return largest
        low, high = torch.aminmax(part.detach())
        return torch.maximum(high, -low)


def _codes(largest: torch.Tensor) -> torch.Tensor:
    """0: finite; 1: Inf; 2: NaN."""
    return largest.isinf().to(torch.uint8) + 2 * largest.isnan().to(torch.uint8)


# When a program checks


class RuntimeChecks:
    """The checks of a compiled program.

    Args:
        phase: the program's.
        finite: steps between checks for Inf and NaN; 0: never.
        compares: steps between comparisons of replicas; 0: never.
    """

    def __init__(self, phase: str, finite: int, compares: int):
        self.phase, self.finite, self.compares = phase, finite, compares if phase != "backward" else 0
        self._own = Health()
        """Of an unsharded model, in this program only."""
        self._steps: weakref.WeakKeyDictionary[Buffer | RuntimeChecks, tuple[int, int]] = weakref.WeakKeyDictionary()
        """By the buffer that it reads: how often gradients had been synchronized, and the step then."""

    def begin(self, run: execution.Execution, buffers: Sequence[Buffer | None]) -> Check | None:
        """The checks of an execution; ``None`` if none are due."""
        capturing.obstacle("options check_finite and check_replicas look at values on the host")
        poll()
        first = next((buffer for buffer in buffers if buffer is not None), None)
        step, health = self._step(first), self._own if first is None else first.unit.outermost.health
        finite, compares = (every if every and (step - 1) % every == 0 else 0 for every in (self.finite, self.compares))
        if first is not None and first.spec.any_optional:
            compares = 0  # ranks may run different programs
        model = run.name.removesuffix(f" {self.phase}")
        if not (finite or compares):
            return None
        health.number = health.number or next(_models)
        return Check(model, health, self.phase, step, finite, compares)

    def _step(self, buffer: Buffer | None) -> int:
        key = self if buffer is None else buffer
        syncs, step = self._steps.get(key, (-1, 0))
        now = syncs if buffer is None else buffer.unit.outermost.syncs[0]
        if now != syncs or buffer is None or self.phase == "inference":
            step += 1
        self._steps[key] = now, step
        return step


# Reports


Tell = Callable[[Sequence[int]], None]

_pending: deque[tuple[Tell, torch.Tensor, torch.Event]] = deque()
"""Results not yet here from a device."""


def _bring(tell: Tell, codes: torch.Tensor) -> None:
    """Reports results as soon as possible without waiting. Not run on a device yet."""
    if codes.device.type == "cpu":
        tell(codes.tolist())
        return
    here = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=True)
    here.copy_(codes, non_blocking=True)
    event = torch.Event(codes.device)
    event.record()
    _pending.append((tell, here, event))


def poll() -> None:
    """Reports results that have arrived."""
    while _pending and _pending[0][2].query():
        tell, codes, _ = _pending.popleft()
        tell(codes.tolist())
