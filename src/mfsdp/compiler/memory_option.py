"""The option ``memory``: makes a plan while a model is compiled, and says what to do if none fits."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..buffers.flat_buffer import owner_of
from ..config.hardware import Hardware
from ..config.options import Options
from ..config.plans import DoesNotFit
from ..cost_model.machine import measure, this_machine
from ..ir.byte_costs import nbytes, size
from ..runtime import groups
from . import joint_graph
from .capture import Capture
from .plan_score import Scorer
from .plan_search import Planner
from .plan_space import Setting, Space

log = logging.getLogger("mfsdp")

RUNNING = ("gathered", "recompute", "offload", "prefetch")
"""What the option may choose, of `plan_space.ALLOWED`; the optimizer exists already and is not known here."""

SAVINGS = {
    "recompute": "layers computed again", "offload": "activations on the host",
    "optimizer": "optimizer state on the host", "prefetch": "prefetch and reduce_lag of 0",
}  # fmt: skip
"""Texts for choices that take less memory where they are allowed."""


def decide(capture: Capture, options: Options, inputs: Sequence[object], machine: Hardware) -> None:
    """Plans a program that is being compiled, for the option ``memory``. All ranks follow the first rank's choice.

    Raises:
        DoesNotFit: nothing fits.
    """
    assert isinstance(options.memory, int)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    buffers = list({id(b): b for x in tensors if (b := owner_of(x)) is not None}.values())
    others = [x for x in tensors if owner_of(x) is None]
    plain = sum(nbytes(x) for x in others if isinstance(x, nn.Parameter) and x.requires_grad)
    space = Space(capture, options, machine)
    scorer = Scorer(space, buffers, other=sum(nbytes(x) for x in others), plain=plain)
    joint = [f"{kind.name} {len(kind.layers)}" for kind in space.kinds]
    units = [f"{u.name} {u.fqn} {u.spec.ranks}" for u in capture.units]
    key = hashlib.sha256(repr((capture.name, options.memory, joint, units)).encode()).hexdigest()
    chosen = json.loads(groups.agreed(f"plan/{key}", _text(Planner(scorer, RUNNING), options.memory)))
    if "error" in chosen:
        raise DoesNotFit(chosen["error"])
    choices = tuple(
        replace(c, **found | {"saved": tuple(found["saved"]), "offloaded": tuple(found["offloaded"])})
        for c, found in zip(space.kinds, chosen["choices"], strict=True)
    )
    capture.treated = joint_graph.treatments(choices)
    capture.options = chosen["options"]
    log.info("mfsdp: %s: %s", capture.name, chosen["text"])
    mine = scorer.score(Setting(choices, **chosen["options"]))
    if mine.peak > options.memory:  # the plan was made for smaller inputs
        log.warning(
            "mfsdp: %s: planned for %s, but what is compiled here takes %s: the plan was made for smaller inputs, "
            "and ranks have to follow one", capture.name, size(options.memory), size(mine.peak),
        )  # fmt: skip


@cache
def planned_machine() -> Hardware:
    """Returns the hardware that programs run on: the vendor's figures if known, else measured ones (all ranks measure
    together, as they compile). Private in torch (``unset_fake_temporarily``); tried on 2.13, there in 2.11 to 2.15.
    """
    with unset_fake_temporarily():
        return this_machine() or measure()


def refusal(planner: Planner, budget: int) -> str:
    """Returns why nothing fits, and the cheapest changes that would make it fit."""
    scorer, space = planner.scorer, planner.space
    floor = scorer.score(planner.floor)
    where = "at the optimizer" if floor.peak == scorer.peak_in_optimizer(planner.floor) else "in forward or backward"
    ways = []
    for name, words in SAVINGS.items():
        if name not in planner.allow:
            more = replace(planner, allow=(*planner.allow, name))
            other = scorer.score(more.floor)
            if more.fits(other, budget):
                ways.append((other.seconds - floor.seconds, words))
    entries = {e.name: e.nbytes for e in scorer.ledger.entries}
    cut = sum(entries.get(n, 0) for n in ("main weights", "optimizer state", "gradients", "shards in what travels"))
    missing = floor.peak - budget
    times = next((2**k for k in range(1, 13) if cut - cut // 2**k >= missing), 0)
    layers = {path for kind in space.kinds for path in kind.layers}
    whole = len(layers) > 1 and layers.isdisjoint(unit.fqn for unit in space.capture.units)
    texts = ['layers that are units (units="auto")'] if whole else []
    texts += [f"{text} ({1e3 * seconds:+.1f} ms)" for seconds, text in sorted(ways)]
    texts += [f"{times} times as many ranks"] if times else []
    texts += ["smaller microbatches"]
    return (
        f"plan: does not fit {size(budget)}: the least is {size(floor.peak)} ({where}). Cheapest that would make it "
        f"fit: {', or '.join(texts)}"
    )


def _text(planner: Planner, budget: int) -> str:
    best = planner.best(budget)
    if best is None:
        return json.dumps({"error": refusal(planner, budget)})
    score = planner.scorer.score(best)
    choices = [
        {"gathered": c.gathered, "recomputed": c.recomputed, "saved": c.saved, "offloaded": c.offloaded}
        for c in best.choices
    ]
    found = {
        "choices": choices,
        "options": {"prefetch": best.prefetch, "reduce_lag": best.reduce_lag},
        "text": f"{best}: {1e3 * score.seconds:.2f} ms, {size(score.peak)} of {size(budget)}",
    }
    return json.dumps(found)
