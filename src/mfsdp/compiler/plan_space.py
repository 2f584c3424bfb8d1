"""What a plan may choose for a captured model: its settings."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from ..config.hardware import Hardware, Transfer, host_copy
from ..config.layer_choices import Choice, Choices
from ..config.options import Options
from ..cost_model import op_cost
from ..cost_model.layer_model import PARTS
from ..ir import ops
from ..ir.byte_costs import nbytes
from ..ir.program import Program, is_element
from ..ir.roles import Kind, role
from . import joint_graph
from .capture import Capture
from .joint_graph import Treatment
from .layer_match import described_by, layer_of, operator_of

ALLOWED = ("gathered", "recompute", "offload", "optimizer", "prefetch")
"""What a plan may choose."""

OVERLAPS = (((0, 0),), ((1, 0), (0, 1), (1, 1)), ((2, 1), (1, 2), (2, 2)))
"""Pairs (prefetch depth, reduce lag) that a plan may choose, in groups by memory. If the last pair of a group gains
nothing, the planner skips the group and all later groups. (`mfsdp.cost_model.auto_prefetch.DEPTHS` has more depths.)
"""

LEVELS = 5
"""How many levels of saving there are if many layers are recomputed, from nothing to all that is worth it."""


@dataclass(frozen=True)
class Setting:
    """One combination of all choices."""

    choices: Choices
    prefetch: int = 1
    reduce_lag: int = 1
    state_on_host: bool = False
    """Whether the optimizer's state is on the host."""

    def __str__(self) -> str:
        parts = [str(c) for c in self.choices if str(c)]
        parts += [f"prefetch {self.prefetch}", f"reduce_lag {self.reduce_lag}"]
        return ", ".join(parts + ["optimizer state on the host"] * self.state_on_host)

    @property
    def border(self) -> int:
        """How many layers at either end of a run of equal ones differ from those in its middle."""
        return _border(self.prefetch, self.reduce_lag)

    def with_choice(self, place: int, choice: Choice) -> Setting:
        """Returns the setting with another choice for one kind of layers."""
        return replace(self, choices=(*self.choices[:place], choice, *self.choices[place + 1 :]))

    def without(self, place: int, name: str) -> Setting:
        """Returns the setting without one part of the choice for a kind of layers."""
        return self.with_choice(place, replace(self.choices[place], **{name: getattr(Choice, name)}))


def _border(depth: int, lag: int) -> int:
    return max(depth, lag) + 1


class Space:
    """The layers of a captured model, and what can be chosen for them. Lists have one entry for each kind of layers.

    Args:
        capture: has kept its joint graph.
        options: the backend's options; a plan's choices replace theirs.
        machine: the hardware.
    """

    def __init__(self, capture: Capture, options: Options, machine: Hardware):
        assert capture.joint is not None, "nothing was kept to be cut again"
        self.capture, self.options, self.machine, self.joint = capture, options, machine, capture.joint
        self.fused = options.lowering != "eager"
        self.kinds: Choices = tuple(self.joint.kinds())
        """Kinds of equal layers, with nothing chosen for them."""
        self.removable = joint_graph.removable(self.joint.graph)
        """Layers that can be left out."""
        depth = options.prefetch if isinstance(options.prefetch, int) else 1
        self.plain = Setting(self.kinds, depth, options.reduce_lag)
        """The setting without a plan."""
        self._graphs: dict[frozenset[str], fx.GraphModule] = {}

    @cached_property
    def owners(self) -> dict[str, str]:
        """The layer that reads a unit's parameters, by the unit's name."""
        return joint_graph.owners(self.joint.graph)

    @cached_property
    def order(self) -> list[str]:
        """Paths of all layers, in forward's order."""
        known = {path for kind in self.kinds for path in kind.layers}
        return [path for path in joint_graph.ordered(self.joint.graph) if path in known]

    def sample(self, choice: Choice) -> tuple[str, ...]:
        """Returns the layers in the layer model, the same for all `OVERLAPS`: each number of layers is another
        partition.
        """
        count = 2 * max(_border(*pair) for pairs in OVERLAPS for pair in pairs) + 1
        return choice.layers[:count] if self.removable.issuperset(choice.layers) else choice.layers

    def treated_sample(self, choices: Choices) -> dict[str, Treatment]:
        """Returns the treatments of the layers in the layer model."""
        treated = joint_graph.treatments(choices)
        return {path: treated[path] for choice in choices for path in self.sample(choice)}

    def others(self, paths: Collection[str]) -> frozenset[str]:
        """Returns all other layers."""
        return frozenset(path for kind in self.kinds for path in kind.layers).difference(paths)

    def equal_modules(self, kept: Collection[str]) -> dict[str, str]:
        """Maps units' modules in layers that are left out to the equal module in the kind's first layer.

        Args:
            kept: the other layers.
        """
        first = {path: kind.layers[0] for kind in self.kinds for path in kind.layers if path not in kept}
        units = {unit.name: unit.fqn for unit in self.capture.units}
        layers = {units[name]: path for name, path in self.owners.items() if path in first and name in units}
        return {fqn: first[path] + fqn.removeprefix(path) for fqn, path in layers.items() if fqn.startswith(path)}

    def programs(self, treated: Mapping[str, Treatment], without: frozenset[str]) -> tuple[Program, ...]:
        """Returns forward and backward with these treatments, without some layers, before all passes."""
        capture = copy.copy(self.capture)
        capture.shards, capture.treated = dict(capture.shards), dict(treated)
        with self.joint.settings():
            if without not in self._graphs:
                self._graphs[without] = joint_graph.copied(self.joint.graph)
                done = joint_graph.without(self._graphs[without], without)
                assert done, "a layer that cannot be left out"
            cut = capture.divide(joint_graph.copied(self._graphs[without]), self.joint.inputs, self.joint.options)
            return capture.program(cut[0], "forward"), capture.program(cut[1], "backward")

    @cached_property
    def copies(self) -> list[tuple[Transfer, Transfer, int] | None]:
        """The copies of one of `PARTS` parts of a layer's values to the host and back, and the part's bytes; ``None``
        if nothing would be offloaded.
        """
        moved = {choice.layers[:2][-1]: Treatment(offloaded=True) for choice in self.kinds}
        few = dict.fromkeys((path for kind in self.kinds for path in kind.layers[:3]), Treatment()) | moved
        forward, _ = self.programs(few, self.others(few) & self.removable)
        offloaded = Counter[str]()
        for launch in forward.find(Kind.OFFLOAD):
            offloaded[role(launch).unit] += nbytes(launch.meta["val"])  # type: ignore[union-attr]
        return [self._host_copies(offloaded[path] // PARTS) for path in moved]

    def _host_copies(self, part: int) -> tuple[Transfer, Transfer, int] | None:
        return (host_copy(part, self.machine), host_copy(part, self.machine, back=True), part) if part else None

    @cached_property
    def levels(self) -> list[list[tuple[str, ...]]]:
        """What may be saved of layers that are recomputed: nothing, then more and more operators, those with the most
        seconds in backward per byte of their results first. Levels that a mix of two others equals are left out.
        """
        return [self._levels(kind) for kind in self.kinds]

    def _levels(self, choice: Choice) -> list[tuple[str, ...]]:
        forward, backward = self._layer(choice, Treatment(again=True))
        again = self._recomputed(choice, backward)
        names = sorted(again, key=lambda name: again[name][0] / max(1, again[name][1]), reverse=True)
        levels = [tuple(names[:i]) for i in range(len(names) + 1)]
        costs = [(sum(_saved(forward)), self._seconds(backward))]
        for seconds, taken in map(again.__getitem__, names):
            costs.append((costs[-1][0] + taken, costs[-1][1] - seconds))
        forward, backward = self._layer(choice, Treatment())
        hull = _hull([*costs, (sum(_saved(forward)), self._seconds(backward))])
        kept = [i for i in range(len(levels)) if i in hull or i == 0]
        if any(map(self._many, self.kinds)):  # each is another partition of all layers
            step = (costs[kept[-1]][0] - costs[0][0]) / (LEVELS - 1)
            even = [costs[0][0] + n * step for n in range(LEVELS)]
            kept = [min(kept, key=lambda i: abs(costs[i][0] - taken)) for taken in even]
        return list(dict.fromkeys(levels[i] for i in kept))

    def _many(self, choice: Choice) -> bool:
        """Returns whether there are enough layers that a few of them determine the cost of all."""
        return len(choice.layers) >= 3 * (2 * _border(1, 1) + 1) and self.removable.issuperset(choice.layers)

    def _recomputed(self, choice: Choice, backward: Program) -> dict[str, tuple[float, int]]:
        """Returns operators of layers that backward recomputes: their seconds, and bytes of their results."""
        behind, times = joint_graph.differentiated(backward.gm), self._times(backward)
        found: dict[str, tuple[float, int]] = {}
        for node in backward.nodes:
            own = node not in behind and layer_of(described_by(node)) in choice.layers
            if own and (name := operator_of(node)):
                seconds, taken = found.get(name, (0.0, 0))
                results = [x.meta["val"] for x in node.users if is_element(x)] or node.meta["val"]
                found[name] = seconds + times[node].seconds, taken + nbytes(results)
        return found

    def _layer(self, choice: Choice, treatment: Treatment) -> tuple[Program, ...]:
        """Returns the programs of a layer, partitioned as it is treated; those of all layers that cannot be left out,
        if layers are not traced once for all.
        """
        pair = next((p for p in joint_graph.pairs(self.joint.graph) if p.path == choice.layers[0]), None)
        if pair is None:
            later = frozenset(path for kind in self.kinds for path in kind.layers[1:])
            return self.programs(dict.fromkeys(choice.layers, treatment), later & self.removable)
        with self.joint.settings():
            forward, backward = (Program(gm, "backward", []) for gm in joint_graph.cut(pair.body, treatment))
        forward.returned = pair.body.options["num_fwd_outputs"]
        return forward, backward

    def _times(self, program: Program) -> dict[fx.Node, op_cost.OpTime]:
        return op_cost.op_times(_WithoutUnits(program), self.machine, fused=self.fused)

    def _seconds(self, program: Program) -> float:
        return sum(t.seconds for t in self._times(program).values() if t.transfer is None)


class _WithoutUnits(Program):
    """The partitioned graph of a layer, without units: markers cost nothing."""

    def __init__(self, program: Program):
        super().__init__(program.gm, program.phase, program.units)

    @property
    def nodes(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.target not in (ops.param, ops.param_grad)]


def _saved(forward: Program) -> list[int]:
    """Returns bytes of each value that forward saves."""
    kept = [n for n in forward.results()[forward.returned or 0 :] if isinstance(n, fx.Node) and n.op != "placeholder"]
    return [nbytes(n.meta["val"]) for n in dict.fromkeys(kept)]


def _hull(points: Sequence[tuple[float, float]]) -> set[int]:
    """Returns indices of the points on the lower convex hull: no mix of two others is below and left of them."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    hull: list[int] = []
    for i in order:
        while hull and points[i][1] >= points[hull[-1]][1] and points[i][0] >= points[hull[-1]][0]:
            break
        else:
            while len(hull) > 1 and _above(points[hull[-2]], points[hull[-1]], points[i]):
                hull.pop()
            hull.append(i)
    return set(hull)


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Returns whether b lies above the line from a to c."""
    this, that = (b[1] - a[1]) * (c[0] - a[0]), (c[1] - a[1]) * (b[0] - a[0])
    return this > that and not math.isclose(this, that, rel_tol=1e-9)
