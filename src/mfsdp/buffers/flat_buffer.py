"""The flat buffers of a unit: main weights, gradients, and the parameters that are views into them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..config.layout import Layout
from ..config.options import MixedPrecisionPolicy, Precision
from ..dtensor.optimizer_hooks import refuse_elsewhere
from ..dtensor.shard_spec import ShardSpec
from ..dtensor.sharded_dtensor import ShardedDTensor, carry_attributes
from ..dtensor.sharded_parameter import ShardedParameter
from ..dtensor.tp_shards import TPShard
from ..dtensor.unsupported import refuse_inputs, suggest_backend
from ..runtime import buffer_registry
from ..runtime.buffer_api import Buffer, Outermost
from ..runtime.join import SkippedUnit
from .gradients import Gradients
from .sharding_plan import ShardingPlan
from .weights import Weights


class FlatBuffer:
    """The parameters of one unit that share dtypes, device and ``requires_grad``.

    ``weights`` and ``gradients`` are flat; ``params[i]`` is parameter i as a DTensor whose local tensor is a view into
    the main weights. It has 17 attributes: what identifies a buffer (unit, layout, placement, dtypes, spec) and what
    belongs to it (weights, gradients, parameters) are read together everywhere.

    Args:
        unit: the unit that owns it.
        layout: where each parameter lies, over all ranks that shard the main weights.
        placement: the strategy and the ranks.
        precision: dtypes.
        trainable: whether the parameters require gradients at first (`set_trains`).
        reshard: whether forward frees the gathered buffer.
        device: where the shard lives.
        pieces: each parameter's local shard under another parallelism; by default all are full.
    """

    def __init__(
        self,
        unit: UnitState,
        layout: Layout,
        placement: ShardingPlan,
        precision: Precision,
        *,
        trainable: bool,
        reshard: bool,
        device: torch.device,
        pieces: Sequence[TPShard | None] = (),
    ):
        refuse_elsewhere()
        refuse_inputs()
        suggest_backend()
        self.unit, self.layout, self.placement, self.precision = unit, layout, placement, precision
        self._trained_main = unit.policy.resolve(precision.main).main
        """The dtype of main weights that train. Stored: while a copy is made, its unit has no policy yet."""
        self.trains = [trainable] * len(layout.slots)
        """Which parameters require gradients; Dynamo guards on it where they are read."""
        self.trainable = self.born_trainable = trainable
        """Whether any parameter trains; whether any did at first."""
        self.spec = placement.spec(layout, precision, reshard)
        self.text = self.spec.encode()
        """The spec as markers carry it."""
        self.weights = Weights(self, device)
        self.gradients = Gradients(self)
        self._own_source()
        home = weakref.ref(self)
        slots = range(len(layout.slots))
        self.pieces = tuple(pieces) or (None,) * len(slots)
        shardings = [ShardSpec(layout, i, placement.mesh, placement.copies, home, self.pieces[i]) for i in slots]
        rows = [self.weights.view(self.weights.main, i) for i in slots]
        self.params = [ShardedParameter(r, s, trainable, self) for r, s in zip(rows, shardings, strict=True)]
        self.left_out: SkippedUnit | None = None
        """Joins other ranks' collectives with zeros, in a model whose ranks may leave units out."""
        self.places: dict[tuple[int, str], tuple[Mapping[str, torch.Tensor | None], int]] = {}
        """Where its parameters are registered: a module's ``_parameters`` and the slot, by ``id`` of that dict and the
        name in it."""

    @property
    def path(self) -> str:
        """Its name in errors: the model, the unit, and which of the unit's buffers."""
        number = self.unit.buffers.index(self)
        which = f", buffer {number}" if number else ""
        return f"unit {self.unit.fqn!r} of {self.unit.outermost.name}{which}  ({self.spec.sizes})"

    def copies(self, slot: int) -> tuple[str, ...]:
        """Returns the names of the process groups whose ranks hold the same part of a parameter."""
        replicas = (self.spec.outer_group,) if self.spec.outer > 1 and not self.spec.outer_optim else ()
        piece = self.pieces[slot]
        return tuple(dict.fromkeys([*replicas, *(self.placement.beside if piece is None else piece.copied_by)]))

    def respec(self, **changes: object) -> None:
        """Changes the spec; programs that carry the old one recompile."""
        self.spec = replace(self.spec, **changes)  # type: ignore[arg-type]
        self.text = self.spec.encode()

    def __deepcopy__(self, memo: dict[int, object]) -> FlatBuffer:
        if self.weights.summoned is not None:
            raise RuntimeError(f"mfsdp: {self.path} is summoned; leave mfsdp.summon_full_params before copying")
        twin = FlatBuffer(
            self.unit, self.layout, self.placement, self.precision,
            trainable=False, reshard=self.spec.reshard, device=self.weights.main.device, pieces=self.pieces,
        )  # fmt: skip
        memo[id(self)] = twin
        twin.unit = copy.deepcopy(self.unit, memo)
        twin.respec(
            divide=self.spec.divide,
            hold=self.spec.hold,
            optional=self.spec.optional,
            any_optional=self.spec.any_optional,
        )
        if twin.spec.any_optional:
            twin.unit.outermost.loose.join(twin)
        with torch.no_grad():
            twin.gradients.like(self.gradients)
            twin.weights.main.copy_(self.weights.main)
            for mine, its in zip(self.params, twin.params, strict=True):
                carry_attributes(mine, its)
                its.requires_grad_(mine.requires_grad)
                memo[id(mine)] = its
        return twin

    def sharded_view(self, flat: torch.Tensor, slot: int) -> ShardedDTensor:
        """Returns this rank's rows of a parameter in a flat shard, a view."""
        return ShardedDTensor(self.weights.view(flat, slot), self.params[slot].sharding)

    def place(self, params: Mapping[str, torch.Tensor | None], name: str, slot: int) -> None:
        """Records where a parameter is registered."""
        self.places[id(params), name] = params, slot

    def in_place(self) -> None:
        """Checks that modules still hold these parameters: a compiled program reads them whatever the module holds.

        Raises:
            RuntimeError: another tensor replaces one: `summon_full_params` is open, or the user put it there
                (``torch.func.functional_call``).
        """
        for (_, name), (params, slot) in self.places.items():
            there = params.get(name)
            if there is not None and there is not self.params[slot]:
                raise RuntimeError(
                    f"mfsdp: a compiled model reads sharded parameters, and another tensor is in the place of {name} "
                    f"of {self.path}. "
                    + (
                        "Values that are put there (torch.func.functional_call) are seen by uncompiled code only: call "
                        "it under torch.compiler.set_stance('force_eager')."
                        if self.weights.summoned is None
                        else "Leave mfsdp.summon_full_params first, or call the model uncompiled."
                    )
                )

    def _own_source(self) -> None:
        """Registers the source of programs as this buffer's."""
        source = self.weights.source
        buffer_registry.register(source, self)
        if not source.is_floating_point():
            return  # bytes of quantized weights, which have no gradients
        source.requires_grad_()  # hooks can only be registered if it requires grad
        self.gradients.watch(source)
        source.requires_grad_(self.trainable)

    def widen(self) -> None:
        """Gives parameters that were frozen when the model was sharded the main-weight dtype of those that train. Views
        of the old weights no longer show the model's.
        """
        if self._trained_main is self.precision.main:
            return
        self.gradients.arrive()
        old = self.weights.source
        self.weights.widen(self._trained_main)
        self.precision = replace(self.precision, main=self._trained_main)
        self.respec(precision=self.precision)
        if self.weights.source is not old:
            self._old_source = StorageWeakRef(old.untyped_storage())  # keeps its address, the key of `buffer_registry`
            self._own_source()
        for slot, param in enumerate(self.params):
            param.take_rows(self.weights.view(self.weights.main, slot))

    def set_trains(self, slot: int, trains: bool) -> None:
        """Freezes or unfreezes a parameter; compiled graphs that read it recompile. If any parameter trains, the buffer
        reduces its full gradient, with zeros for frozen ones.
        """
        self.gradients.arrive()
        self.trains[slot] = trains
        self.gradients.slots.clear()
        self.trainable = any(self.trains)
        if self.weights.source.is_floating_point():
            self.weights.source.requires_grad_(self.trainable)


if TYPE_CHECKING:
    _implements: type[Buffer] = FlatBuffer


@dataclass
class Ref:
    """How a module finds one of its parameters. Plain attributes: Dynamo reads them."""

    buffer: FlatBuffer
    slot: int
    offset: int
    shape: tuple[int, ...]
    unit: UnitState
    index: int
    """Index in the unit's buffers."""
    piece: TPShard | None = None
    """Its local shard under another parallelism."""
    style: Any = None
    """``style.inside`` tells whether the module currently sees the local tensor instead of a DTensor."""

    def seen(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the gathered parameter as its module sees it."""
        if self.piece is None or (self.style is not None and self.style.inside):
            return value
        return self.piece.seen(value)


@dataclass(eq=False)
class UnitState:
    """A unit at run time: its module's buffers, and what the eager fallback has gathered."""

    fqn: str
    """Path of the module from the outermost sharded one, ``"(root)"`` for that one."""
    outermost: Outermost
    policy: MixedPrecisionPolicy
    buffers: list[FlatBuffer] = field(default_factory=list)
    open: bool = False
    """Whether an uncompiled forward of the unit is running; Dynamo guards on it where parameters are read."""
    full: dict[int, Sequence[torch.Tensor]] = field(default_factory=dict)
    """Eager fallback: gathered parameters, by index of the buffer."""
    kept: bool = False
    """Whether `unshard()` asked to keep them."""
    reshard: Callable[[], None] = lambda: None
    """Frees the kept parameters."""
    ranks: int = 1
    """How many ranks' losses are averaged, also if fewer ranks hold its parameters."""
    divides: bool = False
    """Whether the user has set the divide factor of its gradients."""
    may_be_unused: bool = False
    """Whether ranks may leave it out of a step."""
    root_keeps: bool = False
    """Whether it does not reshard after forward because it is the outermost unit, until another one contains it."""


def owner_of(shard: Any) -> FlatBuffer | None:
    """Returns the buffer that owns a shard tensor; ``None`` for other values."""
    return cast(FlatBuffer | None, buffer_registry.owner(shard))


@contextmanager
def half_loaded(model: nn.Module, what: str) -> Iterator[None]:
    """Wraps a load into a model. If the load fails, the model refuses to compute."""
    sharded = [buffer.unit.outermost for buffer in buffers_in(model)]
    for outermost in sharded:
        outermost.half[:] = [what]
    yield
    for module in model.modules():
        getattr(module, "_mfsdp_loaded", lambda: None)()
    for outermost in sharded:
        outermost.half.clear()


def buffers_in(model: nn.Module) -> list[FlatBuffer]:
    """Returns the flat buffers of the parameters of a module and its submodules."""
    return list(dict.fromkeys(ref.buffer for module in model.modules() for ref in refs(module).values()))


def shared_over(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the groups of all ranks that share the sharded parts of a model."""
    return tuple(dict.fromkeys(group for buffer in buffers_in(model) for group in buffer.spec.peer_groups))


def refs(module: nn.Module) -> dict[str, Ref]:
    """Returns the sharded parameters that the module itself owns."""
    return cast(dict[str, Ref], module.__dict__.get("_mfsdp_refs", {}))
