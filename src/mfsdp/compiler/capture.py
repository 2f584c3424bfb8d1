"""Turns Dynamo's graphs into programs: names placeholders, gives markers roles, tags nodes for the partitioner."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.node import Argument

from ..buffers.flat_buffer import FlatBuffer, UnitState, owner_of
from ..config.layout import plan
from ..config.options import Precision
from ..config.units import Unit, UnitSpec
from ..ir import ops
from ..ir.byte_costs import nbytes, size
from ..ir.program import (
    AXIS,
    GIVEN,
    INPUT,
    LAYER,
    READ,
    STORAGE,
    Phase,
    Program,
    Storage,
    base_of,
    is_functional_collective,
    storage_of,
)
from ..ir.roles import Kind, Role, is_kind, mark, role
from ..ir.symbolic_sizes import expect, shape_of, symbolic
from ..runtime import buffer_registry, groups
from . import joint_graph, optional_tangents, outlining
from .activation_offload import offload_activations

log = logging.getLogger("mfsdp")


class Capture(CustomPartitionerFn):
    """One frame that Dynamo traced: which of its inputs are shards, and of which units. It partitions the joint graph.

    Over 15 attributes: they describe its inputs, and carry choices for layers from planning to the partitioner.

    Args:
        inputs: the frame's example inputs, in order: real tensors, as Dynamo passes them to a backend.
        names: the inputs' names in the frame.
        name: the programs' name in listings.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], names: Sequence[str], name: str | None = None):
        self.wrapped = any(isinstance(t, DTensor) for t in inputs)
        """Whether an input is a DTensor, for which graphs have several placeholders."""
        buffers = [b for t in inputs if (b := owner_of(t)) is not None]
        units = {b.unit for b in buffers}
        roots = {u.outermost for u in units}
        one_root = len(roots) == 1 and sum(u.fqn == "(root)" for u in units) <= 1
        root = roots.pop() if one_root else None
        self.name = name or (root.name if root else "model")
        self.input_names = [_readable(n, root.inputs if root else ()) for n in names]
        self.shards: dict[int, Unit] = {}
        """Index of an input that is a shard -> its unit."""
        self.whole = {
            i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and buffer_registry.read_by(t) is not None
        }
        """Indices of inputs that are shards, or parameters gathered by the eager fallback."""
        self.given = {
            i: "buffer" if re.search(r"_(?:modules|buffers)\[", n) else "argument"
            for i, n in enumerate(names)
            if i not in self.whole and "_parameters[" not in n
        }
        """Index of an input that is no parameter -> ``"argument"`` of the call, or ``"buffer"`` of a module."""
        self.plain: dict[int, tuple[Unit, int]] = {}
        """Index of an input that is an unsharded trainable parameter -> its unit and offset in the flat buffer."""
        self.plan = root.plan if root else None
        """The plan that the model follows."""
        self.treated = joint_graph.treatments(self.plan.choices) if self.plan is not None else {}
        """Treatment of layers when the joint graph is partitioned, by path (Note [Partition tags])."""
        self.decide: Callable[[Capture], None] | None = None
        """Chooses `treated` and `options` once the joint graph exists."""
        self.options: dict[str, int] = {}
        """Backend options that `decide` has chosen."""
        self.keeps = False
        """Whether to keep the joint graph, in ``joint``, to partition it again."""
        self.joint: joint_graph.JointGraph | None = None
        self.returned = 0
        """How many results of forward are for its caller, once the joint graph is partitioned."""
        self.cut = False
        """Whether there is a forward or inference graph."""
        self.key = ""
        """Identifies, with the graph, what becomes of it (Note [Warm starts]); ``""``: caches keep nothing."""
        self.optional_tangents = True
        """Whether backward may leave tangents out (Note [Optional tangents])."""
        self.overwrites_results = False
        """Whether backward may overwrite large results of forward (Note [Overwritten results])."""
        self.notes: list[str] = []
        """Texts for listings: what was done to the graph before capture."""
        self._names(inputs, names)

    def _names(self, inputs: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        seen: dict[UnitState, list[FlatBuffer]] = {}
        for i, tensor in enumerate(inputs):
            buffer = owner_of(tensor)
            if buffer is None:
                continue
            same = seen.setdefault(buffer.unit, [])
            same.append(buffer)
            number = list(seen).index(buffer.unit)
            letter = "" if len(same) == 1 else "bcdefghijklmnopqrstuvwxyz"[len(same) - 2]
            self.shards[i] = Unit(f"u{number}{letter}", buffer.unit.fqn, buffer.spec, buffer.layout, buffer.trainable)
        if groups.world() > 1:
            self._plain_units(inputs, names, len(seen))

    def _plain_units(self, inputs: Sequence[torch.Tensor], names: Sequence[str], start: int) -> None:
        """Groups unsharded trainable parameters by layer and dtype."""
        alike: dict[tuple[str, torch.dtype], list[int]] = {}
        for i, tensor in enumerate(inputs):
            if trains(tensor):
                tensor._mfsdp_averaged = torch.is_grad_enabled()  # type: ignore[attr-defined]
                alike.setdefault((_layer(names[i]), tensor.dtype), []).append(i)
        world = groups.world()
        for number, ((fqn, dtype), members) in enumerate(alike.items(), start):
            params = [(path_of(names[i]), tuple(inputs[i].shape)) for i in members]
            unique = [(f"{n}.{k}" if n in dict(params[:k]) else n, s) for k, (n, s) in enumerate(params)]
            layout = plan(unique, 1)
            spec = UnitSpec(
                world, *groups.lanes_of(groups.default_group(), inputs[members[0]].device.type), (layout.shard_numel,),
                Precision(dtype, dtype, dtype, dtype, dtype), float(world), True,
            )  # fmt: skip
            unit = Unit(f"u{number}", fqn, spec, layout, sharded=False)
            for slot, i in zip(layout.slots, members, strict=True):
                self.plain[i] = (unit, slot.offset)

    @property
    def units(self) -> list[Unit]:
        """All units of the frame, in order of first use."""
        return list(dict.fromkeys([*self.shards.values(), *(u for u, _ in self.plain.values())]))

    def label(self, gm: fx.GraphModule) -> None:
        """Gives roles to placeholders and markers of a joint or inference graph.

        Its first placeholders are the frame's inputs, in order; AOTAutograd keeps that order when no inputs alias.
        Forward and backward inherit the roles when the joint graph is partitioned.
        """
        if self.wrapped and all("desc" not in n.meta for n in gm.graph.find_nodes(op="placeholder")):
            raise NotImplementedError("mfsdp: DTensors as inputs of a compiled model need torch 2.13 or newer")
        for i, node in _numbered(gm):
            if i < len(self.input_names):
                node.meta[INPUT] = self.input_names[i]
                node.meta[READ] = i in self.whole
                node.meta[GIVEN] = self.given.get(i)
            unit = self.shards.get(i)
            if unit is not None:
                shape = tuple(node.meta["val"].shape)
                assert shape == (unit.spec.source_numel,), f"{node.name}{shape} is no shard of {unit}"
                mark(node, Role(Kind.SHARD, unit.name))
        self.label_markers(gm)

    def label_markers(self, gm: fx.GraphModule) -> None:
        """Gives roles to the markers of units whose shards have roles."""
        for node in gm.graph.nodes:
            if node.target is ops.param:
                mark(node, Role(Kind.PARAM, node.args[0].meta["mfsdp"].unit))
            elif node.target is ops.param_grad:
                mark(node, Role(Kind.GRAD, node.args[1].meta["mfsdp"].unit))

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partitions the joint graph with torch's min-cut partitioner, told what to gather again (invariant 6).

        AOTAutograd calls it for each kind of layers (Note [Layer outlining]), without inputs, and then for the graph
        that calls them.
        """
        if not joint_inputs:
            outlining.check_functional(gm)
            body = joint_graph.Body(joint_graph.copied(gm), dict(kwargs))
            return joint_graph.cut(body, joint_graph.Treatment())
        self.label(gm)
        return_own_meshes(gm, kwargs["num_fwd_outputs"])
        return_copies(gm, kwargs["num_fwd_outputs"])
        joint_graph.name_layers(gm)
        self._warn_unfollowed(gm)
        if self.keeps or self.decide is not None:
            self.joint = joint_graph.JointGraph(gm, joint_inputs, kwargs)
        if self.decide is not None:
            self.cut = True  # its errors are not about how layers are captured
            self.decide(self)
            if not self.keeps:
                self.joint = None
        forward, backward = self.divide(gm, joint_inputs, kwargs, self.overwrites_results)
        for graph in (forward, backward) if self.keeps else ():
            vars(graph)["print_readable"] = _unread
        return forward, backward

    def __deepcopy__(self, memo: dict[int, object]) -> Capture:
        """Returns itself: Inductor copies its configuration."""
        return self

    def uuid(self) -> str:
        return f"mfsdp {self.key}"

    def _warn_unfollowed(self, joint: fx.GraphModule) -> None:
        """Warns about layers of the plan that have another path here: their choices are not applied."""
        layers = {node.meta.get(LAYER) for node in joint.graph.nodes}
        units = [f"{unit.fqn}." for unit in self.units]
        missing = [p for p in self.treated if p not in layers and any(u.startswith(f"{p}.") for u in units)]
        if missing:
            log.warning(
                "mfsdp: %s: the plan is not followed for %s: what was compiled is not the module that was sharded, and "
                "calls it otherwise. Compile that one: torch.compile(model, backend='mfsdp')",
                self.name,
                ", ".join(missing),
            )

    def divide(
        self, joint: fx.GraphModule, inputs: Sequence[object], kwargs: Mapping[str, Any], overwrites: bool = False
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partitions a joint graph that has roles, with the treatments chosen for its layers. ``overwrites``: whether
        backward may overwrite results of forward; plans must fit if it may not.
        """
        gathered = joint_graph.apply_treatments(joint, self.treated)
        for i, unit in self.shards.items():
            if unit.name in gathered:
                self.shards[i] = replace(unit, spec=replace(unit.spec, reshard=not gathered[unit.name]))
        joint_graph.recompute_parameters(joint)
        outlining.layer_boundaries(joint)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        self.cut, self.returned = True, kwargs["num_fwd_outputs"]
        inner = outlining.inline(forward, backward)
        results: Any = forward.graph.output_node().args[0]
        given = {n.name: n for n in results if isinstance(n, fx.Node)} | inner
        saved = {n: given[n.name] for n in backward.graph.find_nodes(op="placeholder") if n.name in given}
        if inner:
            for node, source in saved.items():
                node.meta["val"] = source.meta["val"]
                node._rename(source.name)
                node.target = node.name
            outlining.inline(backward)
            self.label_markers(forward)
            self.label_markers(backward)
        note_storages(saved, results[: kwargs["num_fwd_outputs"]], overwrites)
        paths = {path for path, treatment in self.treated.items() if treatment.offloaded}
        offload_activations(forward, backward, kwargs["num_fwd_outputs"], lambda node: node.meta.get(LAYER) in paths)
        return forward, backward

    def program(self, gm: fx.GraphModule, phase: Phase) -> Program:
        if phase == "inference":
            self.cut = True
            joint_graph.name_layers(gm)
            outlining.inline(gm)
            self.label(gm)
            return_copies(gm)
        read = {r.unit for n in gm.graph.nodes if (r := role(n)) is not None}
        plain = self.plain if phase == "backward" else {}
        read |= {unit.name for unit, _ in plain.values()}
        program = Program(gm, phase, [u for u in self.units if u.name in read], self.name)
        for node in gm.graph.find_nodes(op="placeholder"):
            if is_kind(node, Kind.SHARD):
                unit = program.unit(role(node).unit)  # type: ignore[union-attr]
                whole = unit.spec.persistent and unit.spec.source_numel == unit.spec.full_numel
                program.rename(node, f"{unit.name}_{'full' if whole else 'shard'}")
            elif name := node.meta.get(INPUT):
                program.rename(node, name)
        if phase == "backward" and self.optional_tangents:
            optional_tangents.make_optional(program)
        program.gradients = {i: (unit.name, offset) for i, (unit, offset) in plain.items()}
        program.trained = _trained(program)
        program.returned = self.returned if phase == "forward" else None
        program.remarks = _overwritten(gm.graph) if phase == "backward" else self.notes
        program.fill()
        _annotate_collectives(program)
        for node in gm.graph.find_nodes(op="call_function", target=ops.param):
            unit = program.unit(role(node).unit)  # type: ignore[union-attr]
            program.rename(node, f"{unit.name}_{unit.offset_name(node.args[1])}")  # type: ignore[arg-type]
        return program


def _unread(**how: object) -> str:
    """Returns no text, in place of ``GraphModule.print_readable``: AOTAutograd prints every graph for a trace of its
    own, which takes long and is of compiled code only.
    """
    return ""


def _numbered(gm: fx.GraphModule) -> Iterator[tuple[int, fx.Node]]:
    """Yields placeholders with the index of the frame's input that they belong to: a DTensor has several, its local
    tensor and its other components. Private in torch (``desc``); tried on 2.13.
    """
    number, before = -1, None
    for node in gm.graph.find_nodes(op="placeholder"):
        whole = getattr(node.meta.get("desc"), "base", None)
        if whole is None or whole != before:
            number += 1
        before = whole
        yield number, node


def _annotate_collectives(program: Program) -> None:
    """Records the ranks of torch's own collectives, and the expected sum of their data-dependent sizes."""
    for node in program.nodes:
        if is_functional_collective(node) and isinstance(node.args[-1], str):
            node.meta[AXIS] = groups.axis_of(node.args[-1])
            if node.target is torch.ops._c10d_functional.all_to_all_single.default:
                rows = shape_of(node.args[0].meta["val"])[0]  # type: ignore[union-attr]
                for sizes in node.args[1:3]:
                    expect([n.meta["val"] for n in sizes if isinstance(n, fx.Node)], rows)  # type: ignore[union-attr]


def _trained(program: Program) -> dict[str, frozenset[int]]:
    """Returns the units that have gradients in a program, and the offsets of their parameters."""
    found: dict[str, set[int]] = {}
    for marker in program.find(Kind.GRAD):
        if marker.args[0].meta["val"].numel():  # type: ignore[union-attr]
            found.setdefault(role(marker).unit, set()).add(marker.args[2])  # type: ignore[union-attr, arg-type]
    results = program.results()
    for i, (name, offset) in program.gradients.items():
        if isinstance(results[i], fx.Node):
            found.setdefault(name, set()).add(offset)
    return {name: frozenset(offsets) for name, offsets in found.items()}


def return_own_meshes(gm: fx.GraphModule, outputs: int) -> None:
    """Replaces tangents' meshes among forward's first ``outputs`` results by equal meshes of its inputs.

    A DTensor is a result as its local tensor and its mesh. DTensor's caches may give it an equal mesh made earlier, by
    another `init_device_mesh`, which only the tangent brings into the joint graph; torch cannot partition that. Private
    in torch (``FakeScriptObject``); tried on 2.13.
    """
    output = gm.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    inputs = gm.graph.find_nodes(op="placeholder")
    meshes = {n: mesh for n in inputs if isinstance(mesh := getattr(n.meta.get("val"), "real_obj", None), DeviceMesh)}
    own = {mesh: n for n, mesh in meshes.items() if not n.name.startswith("tangents")}
    for i, node in enumerate(results[:outputs]):
        if node in meshes:
            results[i] = own.get(meshes[node], node)
    output.args = (tuple(results),)


def return_copies(gm: fx.GraphModule, outputs: int | None = None) -> None:
    """Copies parameters among forward's first ``outputs`` results: gathered buffers do not outlive a program."""
    output = gm.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(results[:outputs]):
        if isinstance(node, fx.Node) and base_of(node).target is ops.param:
            if node not in copies:
                with gm.graph.inserting_before(output):
                    copies[node] = gm.graph.call_function(ops.returned, (node,))
                copies[node].meta["val"] = node.meta["val"]
            results[i] = copies[node]
    output.args = (tuple(results),)


MIN_OVERWRITTEN = 2**20
"""Bytes of the smallest result of forward that backward may overwrite."""


def note_storages(saved: Mapping[fx.Node, fx.Node], results: Sequence[Argument], overwrites: bool = False) -> None:
    """Records in backward which of the values saved by forward share storage (slices of one product, a value and its
    view, parameters of a unit that stays gathered): they live and die together. Views of the caller's inputs cost
    nothing.

    Args:
        saved: placeholders of backward, and the values that forward saves in them.
        results: what forward returns to its caller.
        overwrites: whether backward may overwrite large results, saved in full and read outside of layers: each such
            subgraph is compiled twice.
    """
    returned = {storage_of(n) for n in results if isinstance(n, fx.Node)}
    numbers: dict[fx.Node, int] = {}
    for node, source in saved.items():
        owner, value = _storage(storage_of(source))
        number = numbers.setdefault(owner, len(numbers))
        node.meta[STORAGE] = Storage(number, value, "no" if owner in returned else "yes")
        if overwrites and owner in returned and value is not None and _worth_overwriting(node, value):
            node.meta[STORAGE] = Storage(number, value, "if unheld")


def _worth_overwriting(node: fx.Node, value: torch.Tensor) -> bool:
    """Returns whether a saved value is all of a large storage, and no layer reads it."""
    whole = not symbolic(value) and nbytes(value) == nbytes(node.meta["val"])
    return whole and nbytes(value) >= MIN_OVERWRITTEN and not any(LAYER in reader.meta for reader in node.users)


def _overwritten(graph: fx.Graph) -> list[str]:
    """Returns a text for the listing if backward may overwrite results of forward."""
    saved = [n.meta[STORAGE] for n in graph.find_nodes(op="placeholder") if STORAGE in n.meta]
    sizes = {s.number: nbytes(s.value) for s in saved if s.overwrite == "if unheld"}
    told = f"backward overwrites {size(sum(sizes.values()))} of forward's results unless the caller still holds them"
    return [told] if sizes else []


def _storage(owner: fx.Node) -> tuple[fx.Node, torch.Tensor | None]:
    """Returns the node that identifies a storage, and a tensor as large as the storage; ``None`` if forward does not
    own it. A parameter lies in its unit's flat buffer once `gather` has run, unless it is cast to the compute dtype.
    """
    value = None if INPUT in owner.meta else owner.meta.get("val")
    if owner.target is not ops.param:
        return owner, value
    spec, shard = UnitSpec.decode(owner.args[3]), owner.args[0]  # type: ignore[arg-type]
    assert isinstance(value, torch.Tensor) and isinstance(shard, fx.Node)
    if spec.precision.comm is not spec.precision.compute:
        return owner, value
    ours = spec.gathers or not (spec.persistent or spec.precision.main is spec.precision.comm)
    return shard, value.new_empty(spec.full_numel) if ours else None


def _readable(source: str, parameters: Sequence[str]) -> str:
    """Returns a name for an input of the frame: ``x`` for ``L['x']``, ``L['args'][0]`` and ``L['kwargs']['x']``, a path
    for attributes of the model.
    """
    positional = re.match(r"L\['args'\]\[(\d+)\]", source)
    if positional and int(positional[1]) < len(parameters):
        rest = source[positional.end() :]
        source = f"L['{parameters[int(positional[1])]}']{rest}"
    text = path_of(source) if "_modules" in source else re.sub(r"L\['(?:kwargs'\]\[')?", "", source, count=1)
    return re.sub(r"\W+", "_", text).strip("_").lower()


def trains(tensor: torch.Tensor) -> bool:
    """Returns whether an input is a parameter whose gradient mfsdp has to average."""
    ignored = getattr(tensor, "_mfsdp_ignored", False)
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad and not ignored


_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


def path_of(source: str) -> str:
    """Returns ``layers.0.weight`` for ``L['self']._modules['layers']._modules['0']._parameters['weight']``."""
    return ".".join(re.findall(r"_(?:modules|parameters)\['([^']+)'\]", source)) or source


def _layer(source: str) -> str:
    """Returns the layer of a parameter: its path up to the first number, else the root."""
    match = _LAYER.match(path_of(source).rpartition(".")[0])
    return match[1] if match else "(root)"


def sources(gm: fx.GraphModule) -> list[str]:
    """Returns the source of each input, as Dynamo's guards write it. Private in torch; tried on 2.11 to 2.15."""
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", None)
        names.append(name if isinstance(name, str) else node.name)
    return names
