"""A plan: the fastest step within a memory budget, its choices, and what more memory would gain."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .hardware import Hardware
from .hardware import hardware as parsed
from .layer_choices import Choice, Choices

FORMAT = 3


class DoesNotFit(ValueError):
    """No step fits the available memory."""


@dataclass(frozen=True)
class Price:
    """Approximate cost or gain of a change."""

    nbytes: int
    """Additional memory at the peak; negative: less."""
    seconds: float
    """Additional time of a step; negative: less."""
    text: str


@dataclass(frozen=True)
class Point:
    """The best step within another budget."""

    memory: int
    step: float
    peak: int
    text: str


@dataclass(frozen=True)
class Plan:
    """The choices of `mfsdp.plan`. ``print(plan)`` shows the marginal-cost table. `mfsdp.fully_shard` (``plan=``) and
    the compilation after it follow the plan. Its fields are the keys of the saved file.
    """

    model: str
    """Name of the model's class."""
    world: int
    """Ranks whose losses are averaged."""
    hardware: str
    memory: int
    """Bytes of live device memory that a rank may take."""
    step: float
    """Seconds of a step, by the cost model."""
    peak: int
    """Bytes on the device, by the memory ledger."""
    host: int
    """Bytes of host memory."""
    floor: int
    """Smallest peak in bytes on the device that any choice reaches."""
    top: int
    """Bytes beyond which more memory gains nothing."""
    choices: Choices
    options: Mapping[str, int]
    """Of the backend: ``prefetch`` and ``reduce_lag``."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Elements of each layer's parameters."""
    sharding: Mapping[str, Any] = field(default_factory=dict)
    """Chosen arguments of `fully_shard`, where alternatives were given."""
    made_for: Mapping[str, Any] = field(default_factory=dict)
    """Sharding of the model that the plan is for: strategies, precision, mesh, number of units."""
    optimizer: str = "device"
    """Location of the optimizer's state: ``"device"`` or ``"host"``."""
    prices: Sequence[Price] = ()
    curve: Sequence[Point] = ()
    """Results of other budgets, the smallest first."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of torch and mfsdp that made the plan."""
    machine: Hardware | None = None
    """Hardware whose cost model placed host copies; compilation on any hardware places them there too."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that `load` reads."""
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan from a file.

        Raises:
            ValueError: the file is not a plan.
        """
        try:
            return Plan.parse(json.loads(Path(path).read_text()))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"plan: {path} is no JSON: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"plan: {path} is no plan: {error!r}") from error

    @staticmethod
    def parse(given: dict[str, Any]) -> Plan:
        """Returns a plan from what `save` writes."""
        if given.get("format") != FORMAT:
            raise ValueError(f"plan: format {given.get('format')!r}, this version reads {FORMAT}: make a new plan")
        known = {f.name: given[f.name] for f in fields(Plan)}
        choices = [
            {**c, "layers": tuple(c["layers"]), "saved": tuple(c["saved"]), "offloaded": tuple(c["offloaded"])}
            for c in known.pop("choices")
        ]
        prices, curve = known.pop("prices"), known.pop("curve")
        machine = known.pop("machine")
        return Plan(
            **known, choices=tuple(Choice(**c) for c in choices), prices=tuple(Price(**p) for p in prices),
            curve=tuple(Point(**p) for p in curve), machine=None if machine is None else parsed(machine),
        )  # fmt: skip

    def fits(
        self, model: str, world: int, sizes: Mapping[str, int], classes: Mapping[str, str], sharding: Mapping[str, Any]
    ) -> None:
        """Checks that the plan was made for this model.

        Args:
            model: name of its class.
            world: number of ranks.
            sizes: parameter elements of every module, by path.
            classes: class names of the modules, by path.
            sharding: as `made_for`.

        Raises:
            ValueError: it was made for another model; the message names the difference.
        """
        for choice in self.choices:
            mine = sum(name == choice.name for name in classes.values())
            there = all(classes.get(path) == choice.name for path in choice.layers)
            same = all(self.sizes.get(path, n) == n for path in choice.layers if (n := sizes.get(path, 0)))
            if not there or mine < len(choice.layers) or world != self.world or not same:
                raise ValueError(
                    f"plan: made for {len(choice.layers)} x {choice.name} over {self.world} ranks, this {model} has "
                    f"{mine}{'' if same else ' of another size'} and {world} ranks: make a new plan"
                )

        unlike = [name for name, value in self.made_for.items() if sharding.get(name) != value]
        if unlike:
            theirs, mine_is = (", ".join(f"{n} {x.get(n)}" for n in unlike) for x in (self.made_for, sharding))
            raise ValueError(
                f"plan: made for a model sharded with {theirs}, this {model} has {mine_is}: give fully_shard what "
                "mfsdp.plan was given, or make a new plan"
            )

    def __str__(self) -> str:
        chosen = [str(c) for c in self.choices if str(c)] or ["all layers as they are"]
        chosen += [f"prefetch {self.options['prefetch']}, reduce_lag {self.options['reduce_lag']}"]
        chosen += (
            ["optimizer state on the host: mfsdp.fully_shard_optimizer(optimizer)"] if self.optimizer == "host" else []
        )
        host = f", {_size(self.host)} of host memory" if self.host else ""
        lines = [
            f"mfsdp plan  {self.model}  {self.world} ranks  {self.hardware}",
            f"budget      {_size(self.memory)}; the minimum is {_size(self.floor)}, and more than {_size(self.top)} "
            "gains nothing",
            f"step        {1e3 * self.step:.2f} ms, peak {_size(self.peak)}{host}",
            *(f"{'chosen' if i == 0 else '':<12}{text}" for i, text in enumerate(chosen)),
        ]
        for more in (True, False):
            found = [p for p in self.prices if (p.nbytes > 0) is more]
            if found:
                lines.append("estimated gain of more memory" if more else "estimated cost of less memory")
                lines += [
                    f"  {_size(abs(p.nbytes)):>9}  {abs(1e3 * p.seconds):8.2f} ms  "
                    f"{abs(1e3 * p.seconds) / max(abs(p.nbytes) / 2**30, 1e-9):8.2f} ms/GiB  {p.text}"
                    for p in found
                ]
        if self.curve:
            lines.append("other budgets")
            lines += [
                f"  {_size(p.memory):>9}  {1e3 * p.step:8.2f} ms  {_size(p.peak):>9}  {p.text}" for p in self.curve
            ]
        return "\n".join(lines)


def _size(n: int) -> str:
    unit, size = ("GiB", 2**30) if n >= 2**30 else ("MiB", 2**20) if n >= 2**20 else ("KiB", 2**10)
    return f"{n / size:.2f} {unit}"


def nbytes_of(memory: object, what: str = "memory") -> int:
    """Returns bytes from a number or a text: ``70e9``, ``"70GB"``, ``"64GiB"``.

    Raises:
        ValueError: the value is none of these.
    """
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    if isinstance(memory, (int, float)) and not isinstance(memory, bool) and memory >= 1:
        return int(memory)
    if isinstance(memory, str):
        text = memory.strip().upper()
        unit = next((u for u in sorted(units, key=len, reverse=True) if text.endswith(u)), "")
        try:
            number = float(text.removesuffix(unit))
        except ValueError:
            number = 0.0
        if unit and 1 <= number * units[unit] < 2**62:
            return int(number * units[unit])
    raise ValueError(f"{what}={memory!r}: give bytes, or a text such as '70GB' or '64GiB'")
