"""What one rank keeps: for each unit flat buffers of main weights and gradients, and parameters that are views."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..config.layout import Layout
from ..config.options import MixedPrecisionPolicy, Precision
from ..config.plans import Plan
from ..runtime import buffer_registry
from ..runtime.join import OptionalUnits, SkippedUnit
from ..runtime.runtime_checks import Health
from ..runtime.step_prefetch import StepPrefetch
from .gradients import Gradients
from .optimizer_hooks import refuse_elsewhere
from .shard_spec import ShardSpec
from .sharded_dtensor import carry_attributes
from .sharded_parameter import ShardedParameter
from .sharding_plan import ShardingPlan
from .tp_shards import TPShard
from .unsupported import refuse_inputs
from .weights import Weights


@dataclass(frozen=True)
class Outermost:
    """Names for listings: of the module that was sharded, and of its forward's parameters."""

    name: str
    inputs: tuple[str, ...]
    syncs: list[int] = field(default_factory=lambda: [0], compare=False)
    """How often gradients of any unit have been synchronised."""
    ahead: StepPrefetch = field(default_factory=StepPrefetch, compare=False, repr=False)
    """What optimizers launch ahead of its forward."""
    health: Health = field(default_factory=Health, compare=False, repr=False)
    """What probes have found."""
    half: list[str] = field(default_factory=list, compare=False)
    """What has been begun to load and not finished."""
    loose: OptionalUnits = field(default_factory=OptionalUnits, compare=False, repr=False)
    """What its ranks may leave out of a step."""
    plan: Plan | None = field(default=None, compare=False, repr=False)
    """What the programs that read it follow."""
    sharding: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """How it was sharded, for plans that are made for it."""


class FlatBuffer:
    """The parameters of one unit that share dtypes, device and whether they train.

    ``weights`` and ``gradients`` are flat; ``params[i]`` is parameter i as a DTensor, its local tensor a view into the
    main weights.

    Args:
        unit: the module's unit that it belongs to.
        layout: where each parameter lies; over all ranks that cut the main weights.
        placement: the strategy, and the ranks.
        precision: dtypes.
        trainable: whether the parameters require gradients, at first (`set_trains`).
        reshard: whether forward frees the gathered buffer.
        device: where the shard lives.
        pieces: what another parallelism had left of each parameter; by default they are all whole.
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
        self.unit, self.layout, self.placement, self.precision = unit, layout, placement, precision
        self._main = unit.policy.resolve(precision.main).main
        """The dtype of main weights that train."""
        self.trains = [trainable] * len(layout.slots)
        """Which parameters require gradients; Dynamo reads it where they are read."""
        self.trainable = self.born_trainable = trainable
        """Whether any does; whether they did at first."""
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
        """Lets this rank take part where another one uses it, in a model whose ranks may leave units out."""
        self.places: dict[tuple[int, str], tuple[dict[str, Any], int]] = {}
        """Where its parameters hang: a module's ``_parameters`` and the slot, by ``id`` of the dict and name in it."""

    @property
    def path(self) -> str:
        """What errors call it: the model, the unit, and which of the unit's buffers it is."""
        number = self.unit.buffers.index(self)
        which = f", buffer {number}" if number else ""
        return f"unit {self.unit.fqn!r} of {self.unit.outermost.name}{which}  ({self.spec.sizes})"

    def copies(self, slot: int) -> tuple[str, ...]:
        """Names of the process groups whose ranks hold the same part of a parameter as this one."""
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

    def place(self, params: dict[str, Any], name: str, slot: int) -> None:
        """Says where a parameter hangs."""
        self.places[id(params), name] = params, slot

    def in_place(self) -> None:
        """Makes sure that modules still have these parameters: a compiled program reads them, whatever hangs there.

        Raises:
            RuntimeError: another tensor is in the place of one: `summon_full_params` is open, or somebody has put it
                there (``torch.func.functional_call``).
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
        """Makes what programs read known as this buffer's."""
        source = self.weights.source.requires_grad_()  # nobody may register a hook otherwise
        buffer_registry.register(source, self)
        self.gradients.watch(source)
        source.requires_grad_(self.trainable)

    def widen(self) -> None:
        """Gives parameters that were frozen when the model was sharded the main weights of those that train. Views of
        the former ones are views of the model no more.
        """
        if self._main is self.precision.main:
            return
        self.gradients.arrive()
        former = self.weights.source
        self.weights.widen(self._main)
        self.precision = replace(self.precision, main=self._main)
        self.respec(precision=self.precision)
        if self.weights.source is not former:
            self._former = StorageWeakRef(former.untyped_storage())  # keeps its address, by which `owners` knows it
            self._own_source()
        for slot, param in enumerate(self.params):
            param.take_rows(self.weights.view(self.weights.main, slot))

    def set_trains(self, slot: int, trains: bool) -> None:
        """Freezes or unfreezes a parameter; compiled graphs that read it recompile. A buffer in which any parameter
        trains reduces whole gradients, with zeros for those that do not.
        """
        self.gradients.arrive()
        self.trains[slot] = trains
        self.gradients.slots.clear()
        self.trainable = any(self.trains)
        self.weights.source.requires_grad_(self.trainable)


@dataclass
class Ref:
    """How a module finds one of its parameters. Plain attributes: Dynamo reads them."""

    buffer: FlatBuffer
    slot: int
    offset: int
    shape: tuple[int, ...]
    unit: UnitState
    index: int
    """Which of the unit's buffers."""
    piece: TPShard | None = None
    """What another parallelism had left of it."""
    style: Any = None
    """What knows whether its module sees what is on this rank now, where it would see a DTensor: ``style.inside``."""

    def seen(self, value: torch.Tensor) -> torch.Tensor:
        """What its module sees of what was gathered."""
        if self.piece is None or (self.style is not None and self.style.inside):
            return value
        return self.piece.seen(value)


@dataclass(eq=False)
class UnitState:
    """A unit at run time: its module's buffers, and what the eager path has gathered."""

    fqn: str
    """Path of the module from the outermost one that was sharded, ``"(root)"`` for that one."""
    outermost: Outermost
    policy: MixedPrecisionPolicy
    buffers: list[FlatBuffer] = field(default_factory=list)
    open: bool = False
    """Whether a forward of the unit runs in plain Python now; Dynamo guards on it where parameters are read."""
    full: dict[int, Sequence[torch.Tensor]] = field(default_factory=dict)
    """Eager path: parameters of gathered buffers, by index of the buffer."""
    kept: bool = False
    """Whether `unshard()` asked to keep them."""
    reshard: Callable[[], None] = lambda: None
    """Lets go of them then."""
    ranks: int = 1
    """How many ranks' losses are averaged, also where fewer hold its parameters."""
    divides: bool = False
    """Whether somebody has said what its gradients are divided by."""
    may_be_unused: bool = False
    """Whether ranks may leave it out of a step."""
    root_keeps: bool = False
    """Whether it does not reshard after forward because it is the outermost, until there is one around it."""


@contextmanager
def half_loaded(model: nn.Module, what: str) -> Iterator[None]:
    """Around what writes values over a model's: unless it ends, the model does not compute any more."""
    sharded = [ref.buffer.unit.outermost for module in model.modules() for ref in refs(module).values()]
    for outermost in sharded:
        outermost.half[:] = [what]
    yield
    for outermost in sharded:
        outermost.half.clear()


def shared_over(model: nn.Module) -> tuple[str, ...]:
    """Names of the groups of all ranks that the sharded parts of a model are shared with."""
    buffers = (ref.buffer for module in model.modules() for ref in refs(module).values())
    return tuple(dict.fromkeys(group for buffer in buffers for group in buffer.spec.peer_groups))


def refs(module: nn.Module) -> dict[str, Ref]:
    """The sharded parameters that the module itself owns."""
    return cast(dict[str, Ref], module.__dict__.get("_mfsdp_refs", {}))
