"""`plan`: finds the fastest training step that fits a memory budget, before anything runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import mfsdp

from ..compiler.memory_option import refusal
from ..compiler.plan_score import Score, Scorer, uncollected
from ..compiler.plan_search import Planner
from ..compiler.plan_space import ALLOWED, Setting, Space
from ..compiler.tracing import trace
from ..config.best_effort import doing
from ..config.layer_choices import numbered
from ..config.options import PLANNED, Options
from ..config.plans import DoesNotFit, Plan, Point, Price, nbytes_of
from ..cost_model.memory_model import OPTIMIZER_STATES
from ..cost_model.op_cost import Measurements
from ..sharding.module import FSDPModule
from .explain import buffers_of, unsharded
from .question import HardwareLike, machine_of

BUDGETS = 8
"""Number of other budgets in a plan's curve."""

PRICES = 6
"""Maximum number of changes in each direction in a plan's marginal-cost table."""


def plan(
    model: nn.Module,
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    memory: int | str,
    world: int | None = None,
    mesh_shape: Sequence[int] | Sequence[Sequence[int]] | None = None,
    hardware: HardwareLike = "h100",
    microbatches: int = 1,
    options: Mapping[str, object] | None = None,
    optimizer: str = "adamw",
    profile: Measurements | None = None,
    allow: Collection[str] = ALLOWED,
    curve: bool = True,
    **sharding: Any,
) -> Plan:
    """Returns the fastest plan that fits a memory budget. A plan chooses which layers to recompute and which of their
    operators to save, which layers stay gathered, which to offload, the prefetch depth and the reduce lag. Nothing
    runs, and no process group, GPU or memory for the model is needed.

    The cost model and the memory ledger (`mfsdp.explain`) score each setting; `mfsdp.compiler.plan_search` searches.

    Args:
        model: any module, on any device, sharded or not; it is not changed.
        args, kwargs: example inputs of one rank for one microbatch (values do not matter).
        memory: device bytes that a rank may take, or a text (``"70GB"``, ``"64GiB"``): live bytes as in the ledger.
        world, mesh_shape, hardware, microbatches, optimizer, profile: as for `mfsdp.explain`. ``mesh_shape`` may
            be a list of shapes; the plan takes the best one.
        options: backend options, except those that the plan chooses.
        allow: what the plan may choose: some of ``gathered``, ``recompute``, ``offload``, ``optimizer`` (state on the
            host), ``prefetch`` (with ``reduce_lag``).
        curve: whether to plan for other budgets too.
        **sharding: arguments of `mfsdp.fully_shard`; none if the model is already sharded. ``strategy`` and
            ``outer_strategy`` may be lists; the plan takes the best combination. Each one is traced separately.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: arguments are invalid.
        DoesNotFit: no setting fits; a ``ValueError`` that names the missing bytes and the cheapest change that fits.
        RuntimeError: Dynamo finds a graph break in the model (Dynamo's own error, which names the place).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan: model is a {type(model).__name__}: give one module; explain takes a pipeline's stages")
    budget = nbytes_of(memory, "plan: memory")
    given, axes = dict(options or {}), {"mesh_shape": mesh_shape, **sharding}
    _check(world, hardware, microbatches, given, optimizer, allow)
    chosen, machine = Options.parse(given), machine_of(hardware)
    batch = [x for x in pytree.tree_leaves((args, dict(kwargs or {}))) if isinstance(x, torch.Tensor)]
    found: list[tuple[Score, Setting, Planner, nn.Module, dict[str, Any]]] = []
    why = ""
    for asked in _combinations(axes):
        doing(f"tracing {type(model).__name__}")
        with uncollected():
            programs = trace(model, args, kwargs, world=world, lowering=chosen.lowering, **asked)
        if programs.capture is None or programs.capture.joint is None or programs.model is None:
            raise ValueError(f"plan: {type(model).__name__} is not trained: nothing requires gradients")
        other, plain = unsharded(programs.model)
        scorer = Scorer(
            Space(programs.capture, chosen, machine), buffers_of(programs.model), inputs=sum(x.nbytes for x in batch),
            other=other, plain=plain, optimizer=optimizer, rounds=microbatches, profile=profile,
        )  # fmt: skip
        planner = Planner(scorer, tuple(allow))
        best = planner.best(budget)
        if best is None:
            why = why or refusal(planner, budget)
        else:
            several = {k: v for k, v in asked.items() if isinstance(axes[k], list) and k != "units"}
            found.append((planner.scorer.score(best), best, planner, programs.model, several))
    if not found:
        raise DoesNotFit(why)
    return _plan(type(model).__name__, budget, *min(found, key=lambda x: x[0]), curve)


def _check(
    world: object,
    hardware: object,
    microbatches: object,
    options: Mapping[str, object],
    optimizer: str,
    allow: Collection[str],
) -> None:
    """Checks arguments of `plan`.

    Raises:
        ValueError: names the argument.
    """
    wrong = sorted(set(allow) - set(ALLOWED))
    if wrong or isinstance(allow, str):
        raise ValueError(f"plan: allow={allow!r}: choose some of {', '.join(ALLOWED)}")
    if optimizer not in OPTIMIZER_STATES:
        raise ValueError(f"plan: optimizer={optimizer!r}: choose one of {', '.join(OPTIMIZER_STATES)}")
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"plan: microbatches={microbatches!r}: give a positive number")
    if isinstance(world, (list, range)) or isinstance(hardware, list):
        raise ValueError(f"plan: world={world!r}, hardware={hardware!r}: give one of each, and make a plan for each")
    both = next((n for n in (*PLANNED, "memory") if n in options and ("prefetch" in allow or n == "memory")), None)
    if both is not None:
        raise ValueError(f"plan: memory= and option {both}= were both given: the plan chooses {both}; leave one out")


def _plan(
    model: str, budget: int, score: Score, best: Setting, planner: Planner, meta: nn.Module, sharding: dict[str, Any],
    curve: bool,
) -> Plan:  # fmt: skip
    """Returns the plan of the best setting of a model (``meta``) that was sharded in one way (``sharding``: arguments
    of `fully_shard` that had alternatives), with its prices and its curve.
    """
    machine = planner.space.machine
    top = planner.scorer.score(planner.top).peak
    floor = planner.scorer.score(planner.floor).peak
    modules, units = dict(meta.named_modules()), planner.space.capture.units
    return Plan(
        model=model,
        world=units[0].spec.ranks if units else 1,
        hardware=machine.name,
        memory=budget,
        step=score.seconds,
        peak=score.peak,
        host=score.host,
        floor=floor,
        top=top,
        choices=best.choices,
        options={"prefetch": best.prefetch, "reduce_lag": best.reduce_lag},
        sizes={
            p: sum(x.numel() for x in modules[p].parameters()) for p, _, _ in numbered(best.choices) if p in modules
        },
        optimizer="host" if best.state_on_host else "device",
        sharding=sharding,
        made_for=meta._mfsdp_unit.outermost.sharding if isinstance(meta, FSDPModule) else {},
        prices=tuple(_prices(planner, best)),
        curve=tuple(_curve(planner, floor, _most(top, max(budget, machine.memory), floor))) if curve else (),
        versions={"torch": torch.__version__, "mfsdp": mfsdp.__version__},
        machine=machine,
    )


def _combinations(axes: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """Yields arguments of `fully_shard`, with one of the values where a list gives alternatives."""
    lists = ("mesh_shape", "strategy", "outer_strategy")
    values = [v if k in lists and isinstance(v, list) else [v] for k, v in axes.items()]
    for row in itertools.product(*values):
        yield dict(zip(axes, row, strict=True))


def _prices(planner: Planner, best: Setting) -> Iterator[Price]:
    """Yields the estimated costs of single changes (Note [Layer model]). It omits changes that another one beats or
    that exceed the host's memory.
    """
    here = planner.scorer.estimate(best)
    near = [(s, x) for s in planner.near(best) if planner.fits(x := planner.scorer.estimate(s), math.inf)]
    more = [(s, x) for s, x in near if x.peak > here.peak and x.seconds < here.seconds]
    less = [(s, x) for s, x in near if x.peak < here.peak]
    for side in (_undominated(more)[:PRICES], _undominated(less)[-PRICES:]):
        for setting, x in side:
            yield Price(x.peak - here.peak, x.seconds - here.seconds, _difference(best, setting))


def _undominated(found: list[tuple[Setting, Score]]) -> list[tuple[Setting, Score]]:
    """Returns the settings that are faster than every setting with less memory."""
    out: list[tuple[Setting, Score]] = []
    for setting, score in sorted(found, key=lambda x: (x[1].peak, x[1].seconds)):
        if not out or score.seconds < out[-1][1].seconds:
            out.append((setting, score))
    return out


def _difference(a: Setting, b: Setting) -> str:
    """Returns text that lists what differs in ``b``."""
    parts = [str(y) or f"{y.name}: as it is" for x, y in zip(a.choices, b.choices, strict=True) if x != y]
    parts += [f"prefetch {b.prefetch}"] if a.prefetch != b.prefetch else []
    parts += [f"reduce_lag {b.reduce_lag}"] if a.reduce_lag != b.reduce_lag else []
    if a.state_on_host != b.state_on_host:
        parts.append(f"optimizer state on the {'host' if b.state_on_host else 'device'}")
    return ", ".join(parts)


def _most(top: int, there: int, floor: int) -> int:
    """Returns the curve's largest budget: the memory ``top`` of the fastest setting, or less if less is there."""
    return min(top, there) if there > floor else top


def _curve(planner: Planner, floor: int, most: int) -> Iterator[Point]:
    """Yields the best step for budgets from ``floor`` to ``most``."""
    for i in range(BUDGETS + 1):
        budget = floor + (most - floor) * i // BUDGETS
        best = planner.best(budget)
        if best is not None:
            score = planner.scorer.score(best)
            yield Point(budget, score.seconds, score.peak, str(best))
