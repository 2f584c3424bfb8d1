"""Questions: the checked arguments of `explain`."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import pipeline
from ..config.hardware import KNOWN, Hardware
from ..config.hardware import hardware as find_hardware
from ..config.options import PLANNED, Options
from ..cost_model.estimate import Schedule
from ..cost_model.kernel_timings import Kernels
from ..cost_model.machine import measure
from ..cost_model.memory_model import check_names
from ..cost_model.op_cost import Measured, Measurements
from ..cost_model.pipeline_schedule import SCHEDULES, SINGLE, SPLITTING, V_SHAPED
from ..ir.program import Program

File = str | os.PathLike[str]

HardwareLike = Hardware | Mapping[str, object] | File
"""Hardware, its fields, its name, ``"this"``, or a JSON file."""

Prices = Mapping[str, float] | File
"""Of a rank and an hour by name of the hardware, or a JSON file of these."""


@dataclass(frozen=True)
class _MeasuredKernels:
    """Measured kernels with the interface of a profile."""

    kernels: Kernels
    fused: bool

    def given(self, program: Program) -> Measured:
        return {"measured": self.kernels.of(program, self.fused)}


@dataclass(frozen=True, eq=False)
class Question:
    """One training step to predict."""

    world: int | None
    mesh_shape: tuple[int, int] | None
    hardware: Hardware
    schedule: Schedule
    options: Options
    sharding: dict[str, Any]
    optimizer: str = "adamw"
    stepping: str | None = None
    """How the optimizer steps; ``None``: as the model's plan says."""
    measured: Measurements | None = None
    """A profile or measured kernels; ``None``: estimates."""
    price: float = 0.0
    """Of a rank and an hour; 0: unknown."""
    planned: bool = True
    """Whether the options of the model's plan apply: no option that a plan chooses was given."""

    @property
    def trace_key(self) -> tuple[object, ...]:
        """Questions with the same key share a trace."""
        shared = tuple((k, id(v)) for k, v in self.sharding.items())
        piped = self.schedule.schedule is not None
        code = self.options.lowering, self.options.cuda_graph
        return self.world, self.mesh_shape, self.schedule.together, piped, code, shared


def question(
    *, world: int | None, mesh_shape: Sequence[int] | None, hardware: HardwareLike, microbatches: int | None,
    together: int, overlapped: bool, stages: int, schedule: str | None, stages_per_rank: int | None,
    slowest: float, prices: Prices | None,
    options: Mapping[str, object] | None, optimizer: str, stepping: str | None, profile: Measurements | None,
    kernels: Kernels | File | None, sharding: Mapping[str, object],
) -> Question:  # fmt: skip
    """A checked question from the arguments of `explain`.

    Raises:
        ValueError: bad arguments.
    """
    for name, value in (("optimizer", optimizer), ("stepping", stepping)):
        if isinstance(value, list):
            raise ValueError(f"explain: {name}={value!r}: give one value")
    check_names(optimizer, stepping or "whole")
    if profile is not None and kernels is not None:
        raise ValueError("explain: profile= and kernels= were both given: a profile has measured the kernels already")
    known = None if kernels is None else kernels_of(kernels)
    if mesh_shape is not None and world is not None:
        raise ValueError(f"explain: world={world!r} and mesh_shape={mesh_shape!r}: give one of them")
    _one_value(world=world, hardware=hardware, microbatches=microbatches, together=together, overlapped=overlapped,
               stages=stages, schedule=schedule, stages_per_rank=stages_per_rank, slowest=slowest,
               **{name: value for name, value in sharding.items() if name not in LISTS})  # fmt: skip
    if mesh_shape is not None and not _is_mesh_shape(mesh_shape):
        raise ValueError(f"explain: mesh_shape={mesh_shape!r}: give (outer, shard) numbers of ranks")
    if world is not None and not _is_positive(world):
        raise ValueError(f"explain: world={world!r}: give a positive number of ranks")
    given = dict(options or {})
    _one_value(**{name: value for name, value in given.items() if name != "passes"})
    parsed = Options.parse(given)
    pipeline.chosen(parsed)
    how = _schedule(microbatches, together, overlapped, stages, slowest)
    if schedule is not None or stages_per_rank is not None:
        how = _pipeline(how, schedule, stages_per_rank)
        if schedule in SPLITTING and "split_backward" not in given:
            parsed = replace(parsed, split_backward=True)
    machine = machine_of(hardware)
    return Question(
        world,
        None if mesh_shape is None else (mesh_shape[0], mesh_shape[1]),
        machine,
        how,
        replace(parsed, interleave=True) if how.together > 1 else parsed,
        dict(sharding),
        optimizer,
        stepping,
        profile if known is None else _MeasuredKernels(known, parsed.lowering != "eager"),
        _price(machine, prices_of(prices)),
        planned=not set(PLANNED) & given.keys(),
    )


LISTS = ("units", "ignored_params")
"""Arguments of `fully_shard` that are lists themselves."""


def _is_mesh_shape(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def kernels_of(given: Kernels | File) -> Kernels:
    """Measured kernels, from their file or as they are."""
    return given if isinstance(given, Kernels) else Kernels.load(given)


def _one_value(**given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, (list, range)):
            raise ValueError(
                f"explain: {name}={reprlib.repr(value)}: give one value, or call mfsdp.compare, which takes several"
            )


def _schedule(microbatches: int | None, together: int, overlapped: bool, stages: int, slowest: float) -> Schedule:
    many = together if microbatches is None else microbatches
    for name, value in (("together", together), ("microbatches", many), ("stages", stages)):
        if not _is_positive(value):
            raise ValueError(f"explain: {name}={value!r}: give a positive number")
    if not isinstance(overlapped, bool):
        raise ValueError(f"explain: overlapped={overlapped!r}: choose True or False")
    if many % together:
        raise ValueError(
            f"explain: microbatches={microbatches}, together={together}: give a multiple of together: all programs of "
            "a step are equal here"
        )
    if isinstance(slowest, bool) or not isinstance(slowest, (int, float)) or not 1 <= slowest < math.inf:
        raise ValueError(f"explain: slowest={slowest!r}: give how many times as long the slowest rank computes, 1.1")
    if stages > 1 and overlapped:
        raise ValueError(f"explain: stages={stages}, overlapped=True: a pipeline overlaps by itself; leave one out")
    return Schedule(many, together, overlapped, stages, slowest)


def _pipeline(how: Schedule, schedule: str | None, per_rank: int | None) -> Schedule:
    """Returns a schedule of microbatches as one of torch's over the stages.

    Raises:
        ValueError: bad arguments.
    """
    if schedule not in SCHEDULES:
        why = "" if schedule is not None else f" (stages_per_rank={per_rank!r} was given)"
        raise ValueError(f"explain: schedule={schedule!r}{why}: choose one of {', '.join(SCHEDULES)}")
    if how.together > 1:
        raise ValueError(f"explain: schedule={schedule!r}, together={how.together}: a pipeline takes one microbatch")
    least, most = (1, 1) if schedule in SINGLE else (2, 2) if schedule in V_SHAPED else (1, how.stages)
    per_rank = max(least, min(2, most)) if per_rank is None else per_rank
    if not _is_positive(per_rank) or not least <= per_rank <= most:
        which = f"{least}" if least == most else f"{least} to {most}"
        raise ValueError(f"explain: stages_per_rank={per_rank!r}: {schedule} takes {which} on each rank")
    if how.stages % per_rank:
        raise ValueError(
            f"explain: stages={how.stages}, schedule={schedule!r}: give a multiple of the {per_rank} stages of a rank"
        )
    return replace(how, schedule=schedule, stages_per_rank=per_rank)


def prices_of(given: Prices | None) -> dict[str, float]:
    """Prices of a rank and an hour by name of hardware, from a mapping or a file."""
    if given is None:
        return {}
    try:
        found = dict(given if isinstance(given, Mapping) else json.loads(Path(given).read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"explain: prices={str(given)!r} is no JSON: {error}") from error
    wrong = [name for name, x in found.items() if isinstance(x, bool) or not isinstance(x, (int, float)) or not x > 0]
    if wrong or not found:
        raise ValueError(f"explain: prices of {', '.join(wrong) or 'nothing'}: give positive numbers, by hardware")
    return found


def _price(machine: Hardware, prices: Mapping[str, float]) -> float:
    names = [name for name in prices if name == machine.name or KNOWN.get(name.lower()) == machine]
    if prices and not names:
        raise ValueError(f"explain: prices are of {', '.join(prices)}, and not of {machine.name}: add it by that name")
    return prices[names[0]] if names else 0.0


def machine_of(what: HardwareLike) -> Hardware:
    """Hardware by name, from a file, measured, or as it is."""
    return measure() if what == "this" else find_hardware(what)
