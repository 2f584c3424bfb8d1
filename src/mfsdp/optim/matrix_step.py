"""The step of a whole-matrix optimizer on rows: elementwise parts on ranges, matrices on their owners (Note [Owners]).

An exception in the middle ends the step as it ends a program: launched exchanges are kept until all ranks begin anew,
which they do if all left at the same operation. Waves whose matrices were under way have new state and old weights.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ..buffers.flat_buffer import FlatBuffer
from ..runtime import execution
from ..runtime.desync import Fingerprint
from .muon import Muon
from .owners import Box, Cut, Matrix, Plan, Ring, Route, Wave, describe, plan
from .rings import matrices_of

if TYPE_CHECKING:
    from .parameter_ranges import ParameterRange, _StepPrefetch

log = logging.getLogger("mfsdp")

MAX_STAGING = 1 << 30
"""Default bound of staging memory, in bytes."""

SLOW = 1.5
"""How much longer the critical path has to be than with any staging memory, to be worth a warning."""

BATCH = 1 << 27
"""Bytes of equal matrices that one batch takes, or one matrix: Newton-Schulz needs about three times as much."""

Place = tuple[FlatBuffer, int]
"""A parameter: its buffer and slot."""


class MatrixStep:
    """The step of one optimizer. Making it checks the optimizer's parameters, and makes process groups that they need.

    Args:
        optimizer: the optimizer.
        recipe: what it does.
        max_staging: bound of staging memory in bytes (`Plan.staging`).

    Raises:
        ValueError, NotImplementedError: see `matrices_of`; a plain parameter needs what only sharded ones have.
    """

    def __init__(self, optimizer: Optimizer, recipe: Muon, max_staging: int):
        self.recipe, self.max_staging = recipe, max_staging
        self._key: object = None
        self.plan = Plan((), recipe.wire.itemsize)
        self.buffers: list[FlatBuffer] = []
        """The units of the plan."""
        self.lines: tuple[str, ...] = ()
        """What ranks compare."""
        self._routes: dict[tuple[Wave, Ring], tuple[Route, Route]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                owner = getattr(param, "_mfsdp_owner", None)
                if owner is not None:
                    matrices_of(owner, 0, param.sharding.slot, number, group, recipe)
                elif param.dim() != 2 or group.get("split_sizes") is not None:
                    raise ValueError(
                        f"fully_shard_optimizer: an unsharded parameter of {list(param.shape)} steps as torch's "
                        f"{type(optimizer).__name__} does: matrices only, without split_sizes. Shard it, or give it "
                        "to another optimizer"
                    )

    def describe(self, name: str) -> str:
        """Returns the last step as text (`mfsdp.optim.owners.describe`)."""
        several = len({id(b.unit.outermost) for b in self.buffers}) > 1
        units = [f"{b.unit.outermost.name} {b.unit.fqn}" if several else b.unit.fqn for b in self.buffers]
        return describe(self.plan, name, units)

    def step(
        self,
        optimizer: Optimizer,
        runs: Sequence[ParameterRange],
        state: dict[torch.Tensor, dict[str, Any]],
        prefetch: _StepPrefetch | None,
        on_device: Callable[[Optimizer, list[ParameterRange]], AbstractContextManager[None]],
    ) -> None:
        """Takes a step on ranges. All ranks exchange the same, in the same order.

        Args:
            optimizer: gives the settings of its parameter groups.
            runs: the ranges, with gradients; those of one buffer are adjacent, and buffers have the same order on all
                ranks.
            state: of the ranges.
            prefetch: called after the step of each range.
            on_device: wraps the use of a range's state, in the order of ranges.
        """
        self._replan(optimizer, runs)
        name = f"step of {type(optimizer).__name__}"
        rings = self.plan.loads
        meets = dict.fromkeys(group for b in self.buffers for group in b.spec.peer_groups)
        operations = [f"{verb} {k}" for k in range(len(self.plan.waves)) for verb in _VERBS]
        run = execution.Execution(name, lambda: operations, meets)
        over = dict.fromkeys(ring.announced for ring in rings if ring.size > 1)
        run.announce(dict.fromkeys(over, Fingerprint(name, self.lines)))
        doing = _Doing(self, optimizer, state, prefetch, on_device, run)
        for each in runs:
            doing.runs[each.buffer].append(each)
            doing.of.update({(each.buffer, slot): each for slot in each.slots})
        with execution.inside(run), torch.no_grad():
            try:
                doing.waves()
            except BaseException as error:
                if prefetch is not None:
                    prefetch.abandon(error, run)
                error.add_note(
                    f"mfsdp: {name} was interrupted: state may be new where weights are old; load a checkpoint"
                )
                raise

    def _replan(self, optimizer: Optimizer, runs: Sequence[ParameterRange]) -> None:
        """Deals out again if other parameters have gradients, or settings or the order have changed."""
        slots: dict[FlatBuffer, list[tuple[int, int]]] = {}
        for each in runs:
            slots.setdefault(each.buffer, []).extend((slot, each.group) for slot in each.slots)
        splits = tuple(str((g.get("split_sizes"), g.get("blockwise"))) for g in optimizer.param_groups)
        members = {buffer: tuple(sorted(some)) for buffer, some in slots.items()}
        key = (tuple(members.items()), splits)
        if key == self._key:
            return
        units = [
            [
                m
                for slot, group in some
                for m in matrices_of(buffer, i, slot, group, optimizer.param_groups[group], self.recipe)
            ]
            for i, (buffer, some) in enumerate(members.items())
        ]
        self.plan = plan(units, self.recipe.wire.itemsize, self.max_staging)
        self._key, self.buffers = None, list(members)
        self._routes = {(w, ring): w.routes(ring) for w in self.plan.waves for ring in w.rings}
        self.lines = tuple(
            f"all_to_all of matrices in wave {k}, and back: {self.buffers[i].path}: "
            + ", ".join(f"{m.name} [{m.rows}, {m.columns}] to {wave.owner[m]}" for m in wave.matrices if m.unit == i)
            for k, wave in enumerate(self.plan.waves)
            for i in wave.units
        )
        self._advise(units)
        self._key = key

    def _advise(self, units: Sequence[Sequence[Matrix]]) -> None:
        """Warns if waves are so small that owners wait for each other."""
        free = plan(units, self.recipe.wire.itemsize, 1 << 62)
        if self.plan.critical > SLOW * free.critical:
            log.warning(
                "mfsdp: max_staging=%s makes the step of whole matrices %.1f times longer than it need be, since the "
                "owners of %s waves wait for each other; max_staging=%s would need %s",
                self.max_staging, self.plan.critical / free.critical, len(self.plan.waves), free.staging,
                len(free.waves),
            )  # fmt: skip


_VERBS = ("momentum and all_to_all of wave", "matrices and all_to_all back of wave", "decay and add of wave")
"""The operations of a wave, for errors."""


@dataclass(eq=False)
class _Doing:
    """One step while it runs."""

    whole: MatrixStep
    optimizer: Optimizer
    state: dict[torch.Tensor, dict[str, Any]]
    prefetch: _StepPrefetch | None
    on_device: Callable[[Optimizer, list[ParameterRange]], AbstractContextManager[None]]
    run: execution.Execution
    runs: dict[FlatBuffer, list[ParameterRange]] = field(default_factory=lambda: defaultdict(list))
    of: dict[Place, ParameterRange] = field(default_factory=dict)
    """The range of every parameter."""
    arrived: dict[tuple[Wave, Ring], torch.Tensor] = field(default_factory=dict)
    """What is under way, or there."""

    def waves(self) -> None:
        waves = self.whole.plan.waves
        for k in range(-1, len(waves) + 1):
            if k + 1 < len(waves):
                self._to_owners(k + 1, waves[k + 1])
            if 0 <= k < len(waves):
                self._compute(k, waves[k])
            if k >= 1:
                self._add(k - 1, waves[k - 1])

    def _group(self, number: int) -> dict[str, Any]:
        return self.optimizer.param_groups[number]

    def _runs_of(self, wave: Wave) -> list[ParameterRange]:
        return [run for i in wave.units for run in self.runs[self.whole.buffers[i]]]

    def _to_owners(self, k: int, wave: Wave) -> None:
        """Updates state, and launches rows to their owners."""
        self.run.at = len(_VERBS) * k
        into: dict[Place, list[tuple[torch.Tensor, Cut]]] = defaultdict(list)
        sent = {}
        for ring in wave.rings:
            route, _ = self.whole._routes[wave, ring]
            sent[ring] = self._room(wave, sum(route.splits))
            for part, cut in _parts(sent[ring], route.sends):
                into[self.whole.buffers[cut[0].unit], cut[0].slot].append((part, cut))
        for run in self._runs_of(wave):
            with self.on_device(self.optimizer, [run]):
                assert run.flat.grad is not None
                made = self.whole.recipe.begin(self._group(run.group), run.flat.grad, self.state[run.flat])
                parts = [each for slot in run.slots for each in into[run.buffer, slot]]
                if parts:
                    rows = [_rows(run, made, cut) for _, cut in parts]
                    torch._foreach_copy_([part for part, _ in parts], rows)
        for ring in wave.rings:
            self._launch(wave, ring, sent[ring], self.whole._routes[wave, ring][0])

    def _room(self, wave: Wave, numel: int) -> torch.Tensor:
        """Allocates memory that travels: not empty, since executions know results by their address."""
        device = self.whole.buffers[wave.units[0]].weights.main.device
        return torch.empty(max(numel, 1), dtype=self.whole.recipe.wire, device=device)[:numel]

    def _launch(self, wave: Wave, ring: Ring, sent: torch.Tensor, route: Route) -> None:
        """Launches an exchange; without other ranks, what is sent has arrived."""
        self.arrived[wave, ring] = sent
        if ring.size > 1:
            self.arrived[wave, ring] = out = self._room(wave, sum(route.received))
            self.run.launch(out, self.run.all_to_all(out, sent, route.received, route.splits, ring.group))

    def _take(self, wave: Wave, ring: Ring) -> torch.Tensor:
        """Waits for an exchange, and returns what has arrived."""
        out = self.arrived.pop((wave, ring))
        if ring.size > 1:
            self.run.wait(out)
        return out

    def _compute(self, k: int, wave: Wave) -> None:
        """Makes updates of the matrices that this rank owns, and launches their rows back."""
        self.run.at = len(_VERBS) * k + 1
        for ring in wave.rings:
            there, back = self.whole._routes[wave, ring]
            mine = [m for m in wave.matrices if m.ring == ring and wave.owner[m] == ring.me]
            updates = self._updated(mine, list(_parts(self._take(wave, ring), there.receives)))
            sent = self._room(wave, sum(back.splits))
            if back.sends:
                parts = list(_parts(sent, back.sends))
                rows = [_box(updates[m], box) for m, box in back.sends]
                torch._foreach_copy_([part.view(row.shape) for (part, _), row in zip(parts, rows, strict=True)], rows)
            self._launch(wave, ring, sent, back)

    def _updated(self, mine: Sequence[Matrix], arrived: list[tuple[torch.Tensor, Cut]]) -> dict[Matrix, torch.Tensor]:
        """Returns the updates of matrices, [rows, columns], in batches of equal ones."""
        alike: dict[tuple[int, int, int], list[Matrix]] = defaultdict(list)
        for m in mine:
            alike[m.group, m.rows, m.columns].append(m)
        whole: dict[Matrix, torch.Tensor] = {}
        stacks = []
        for (group, rows, columns), some in alike.items():
            wire = self.whole.recipe.wire
            stack = torch.empty(len(some), rows, columns, dtype=wire, device=arrived[0][0].device)
            whole.update(zip(some, stack, strict=True))
            stacks.append((group, some, stack))
        if arrived:
            into = [_box(whole[m], box) for _, (m, box) in arrived]
            torch._foreach_copy_(into, [part.view(at.shape) for (part, _), at in zip(arrived, into, strict=True)])
        for group, some, stack in stacks:
            step = max(1, BATCH // max(stack[0].nbytes, 1))
            for at in range(0, len(some), step):
                made = self.whole.recipe.whole(self._group(group), stack[at : at + step])
                whole.update(zip(some[at : at + step], made, strict=True))
        return whole

    def _add(self, k: int, wave: Wave) -> None:
        """Adds updates to this rank's rows."""
        self.run.at = len(_VERBS) * k + 2
        runs, recipe = self._runs_of(wave), self.whole.recipe
        taken = [(ring, self._take(wave, ring)) for ring in wave.rings]
        for run in runs:
            recipe.decay(self._group(run.group), run.flat)
        for ring, arrived in taken:
            for part, (m, box) in _parts(arrived, self.whole._routes[wave, ring][1].receives):
                run = self.of[self.whole.buffers[m.unit], m.slot]
                recipe.add(self._group(m.group), _rows(run, run.flat, (m, box)), part, m.rows, m.columns)
        if self.prefetch is not None:
            for run in runs:
                self.prefetch(run)


def _parts(flat: torch.Tensor, cuts: Sequence[Cut]) -> Iterator[tuple[torch.Tensor, Cut]]:
    """Yields the part of each cut, in order, [elements]."""
    at = 0
    for cut in cuts:
        end = at + cut[1].numel
        yield flat[at:end], cut
        at = end


def _rows(run: ParameterRange, flat: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Returns this rank's elements of a matrix in a tensor as long as the range."""
    m, box = cut
    return run.part(flat, m.slot).view(-1)[box.start : box.start + box.numel]


def _box(matrix: torch.Tensor, box: Box) -> torch.Tensor:
    return matrix[box.row : box.row + box.rows, box.column : box.column + box.columns]
