"""Host time of a step's operations, and of whole steps beside FSDP2's: ``python examples/bench/host.py [--steps]``.

Two programs, as the backend would drive them: every unit is gathered in forward; gathered, packed, reduced and
accumulated in backward. Gradients go through the dispatcher into the bucket, as from a compiled body. Tensors are tiny.
The process group is fake: with ``--transport none`` nothing is launched, with ``torch`` torch's own collectives are.

With ``--steps``: a GPT of tiny blocks, one per unit; forward and backward, then clipping, AdamW and ``zero_grad``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from gpt import GPT, fsdp2
from gpt import Block as Layer
from torch import fx, nn
from torch.fx import Node

import mfsdp
from mfsdp.compiler.stitched import Stitched, driver
from mfsdp.compiler.subgraphs import Subgraph, split
from mfsdp.ir import ops
from mfsdp.runtime import compiled_program as running
from mfsdp.runtime.c10d_transport import C10dTransport
from mfsdp.runtime.fake_transport import FakeTransport
from mfsdp.runtime.program_info import Outline, Outlined
from mfsdp.runtime.transport import End
from mfsdp.runtime.transport_registry import carried_by

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Silent(FakeTransport):
    """Carries nothing."""

    def gather(self, *args: Any) -> End:
        return _done

    def scatter(self, *args: Any) -> End:
        return _done


class Launching(FakeTransport):
    """Launches torch's own collectives, as on a device."""

    _at_once = C10dTransport._at_once
    gather = C10dTransport.gather  # type: ignore[assignment]
    scatter = C10dTransport.scatter  # type: ignore[assignment]


def _done() -> None: ...


class Writer:
    """Writes a program, operation by operation."""

    def __init__(self, model: nn.Module):
        self.buffers = [block._mfsdp_unit.buffers[0] for block in model.children()]  # type: ignore[union-attr, index]
        self.graph = fx.Graph()
        self.shards = [self.graph.placeholder(f"u{i}_shard") for i in range(len(self.buffers))]
        self.given: list[torch.Tensor] = []
        self.count = 0

    def input(self, name: str, value: torch.Tensor) -> Node:
        self.given.append(value)
        return self.graph.placeholder(name)

    def call(self, target: Any, *args: Any) -> Node:
        self.count += target in ops.SHOWN
        return self.graph.call_function(target, args)

    def run(self) -> Callable[[], None]:
        """The program, as the backend returns it; called with the model's shards."""
        self.graph.output(())
        steps: list[Any] = []
        for step in split(fx.GraphModule(nn.Module(), self.graph)):
            if getattr(step, "target", None) is ops.pack:  # behind the product, in one body
                step = Subgraph([steps.pop(), step], [], [])
                step.inputs = list(dict.fromkeys(n for node in step.nodes for n in node.all_input_nodes))
            steps.append(step)
        names = {step: "Body0" for step in steps if isinstance(step, Subgraph)}
        bodies = {"Body0": _body(next(iter(names)))} if names else {}
        code = Stitched(driver(self.graph, steps, names), bodies, {"Body0": []}, {})
        shown = [n for n in self.graph.nodes if n.target in ops.SHOWN]
        verbs = [n.target._schema.name.removeprefix("mfsdp::") for n in shown]
        outline = Outline("Host", "forward", tuple(Outlined(v, v, "blocks.0", v, 1.0) for v in verbs))
        paths = {i: (f"u{i}", b.unit.fqn) for i, b in enumerate(self.buffers)}
        lines = [f"{verb} {running.PATH.format('u0')}" for verb in verbs]
        group = self.buffers[0].spec.group
        program = running.compiled_program(outline, code, {group: lines}, paths, (), list(paths), [group], {})
        sources = [b.weights.source for b in self.buffers]
        return lambda: program([*sources, *self.given])


def _body(stretch: Subgraph) -> Callable[[list[Any]], Any]:
    """A stretch that only calls operations, much as Inductor writes it."""
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in stretch.inputs}
    for node in stretch.nodes:
        graph.node_copy(node, copies.__getitem__)
    graph.output(())
    call = fx.GraphModule(nn.Module(), graph).forward
    return lambda given: call(*given)


def programs(model: nn.Module) -> dict[str, tuple[Callable[[], None], int]]:
    """Programs by name, and how many operations each has."""

    def gathers(w: Writer, i: int) -> None:
        full = w.call(ops.all_gather, w.shards[i], w.buffers[i].text, i % 2)
        w.call(ops.wait, full, [w.shards[i]])

    def bucket(w: Writer, i: int) -> Node:
        buffer = w.buffers[i]
        holes = [x for start, n in buffer.layout.gaps() for x in (start, start + n)]
        return w.call(ops.bucket, w.shards[i], holes, buffer.text, i % 2)

    def fills(w: Writer, i: int, gfull: Node) -> None:
        at = [slot.offset for slot in w.buffers[i].layout.slots]
        w.call(ops.mm, gfull, at[0], [WIDTH, WIDTH], [WIDTH, 1], *more["mm"])
        w.call(ops.pack, gfull, [more["bias"][0]], at[1:], 1.0)

    def reduces(w: Writer, i: int, gfull: Node) -> Node:
        gshard = w.call(ops.reduce_scatter, gfull, w.buffers[i].text, 0)
        w.call(ops.wait, gshard, [gfull])
        return gshard

    def accumulates(w: Writer, i: int, gshard: Node) -> None:
        at = [slot.offset for slot in w.buffers[i].layout.slots]
        w.call(ops.accumulate, w.shards[i], gshard, at, 1 / w.buffers[i].spec.divide)

    def backward(w: Writer, i: int) -> None:
        gathers(w, i)
        gfull = bucket(w, i)
        fills(w, i, gfull)
        accumulates(w, i, reduces(w, i, gfull))

    def filled(w: Writer, i: int) -> None:
        fills(w, i, bucket(w, i))

    more: dict[str, list[Node]] = {}
    made: dict[str, tuple[Callable[[], None], int]] = {}
    for name, each in {
        "nothing": lambda w, i: None,
        "forward": gathers,
        "backward": backward,
        "all_gather, wait": gathers,
        "bucket": bucket,
        "bucket, mm, pack": filled,
        "bucket, reduce_scatter, wait": lambda w, i: reduces(w, i, bucket(w, i)),
        "accumulate": lambda w, i: accumulates(w, i, more["gshard"][0]),
    }.items():
        w = Writer(model)
        spec = w.buffers[0].spec
        more["mm"] = [w.input(x, torch.randn(WIDTH, WIDTH)) for x in ("a", "b")]
        more["bias"] = [w.input("bias", torch.randn(WIDTH))]
        more["gshard"] = [w.input("gshard", torch.zeros(spec.shard_numel))]
        for i in range(len(w.buffers)):
            each(w, i)
        made[name] = w.run(), w.count
    return made


def seconds(runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Processor time of each, the median over rounds in which all take their turn."""
    clock = time.thread_time
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 3):
        for run, its in zip(runs, times, strict=True):
            begun = clock()
            run()
            its.append(clock() - begun)
    return [statistics.median(its[3:]) for its in times]


def report(units: int, world: int, transport: str, rounds: int) -> None:
    kinds: dict[str, Any] = {"none": Silent, "torch": Launching}
    carried: AbstractContextManager[Any] = nullcontext()
    if transport in kinds:
        carried = carried_by(lambda group, kind: kinds[transport](group))
    with mfsdp.fake_ranks(world), carried, torch.no_grad():
        model = mfsdp.fully_shard(nn.Sequential(*(Block() for _ in range(units))), units=[Block])
        made = programs(model)
        took = dict(zip(made, seconds([run for run, _ in made.values()], rounds), strict=True))
    count = sum(made[name][1] for name in ("forward", "backward"))
    total = took["forward"] + took["backward"]
    print(f"{units} units, {world} ranks, transport {transport}: {count} operations, {1e6 * total / count:.2f} us each")
    nothing = took.pop("nothing")
    print(f"    {'two programs, without operations':<32}{2e6 * nothing / count:7.2f}")
    alone = took["bucket"]
    for name in ("all_gather, wait", "bucket", "bucket, mm, pack", "bucket, reduce_scatter, wait", "accumulate"):
        before = alone if name.startswith("bucket,") else nothing
        print(f"    {name.removeprefix('bucket, '):<32}{1e6 * (took[name] - before) / units:7.2f}")


def contender(name: str, layers: int) -> list[Callable[[], Any]]:
    """A model's forward and backward, and what follows them in a step."""
    torch.manual_seed(0)
    model = GPT(layers, 2 * WIDTH, heads=2, vocabulary=64, length=16)
    run: Any = model
    if name == "torch.compile":
        run = torch.compile(model, dynamic=False)
    elif name.startswith("FSDP2"):
        fsdp2(model, compiled=name != "FSDP2")
    else:
        run = torch.compile(mfsdp.fully_shard(model, units=[Layer]), backend="mfsdp", dynamic=False)
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    if name == "mfsdp, its optimizer":
        optimizer = mfsdp.fully_shard_optimizer(optimizer)
    ids = torch.randint(0, 64, (1, 4))

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return [lambda: run(ids).backward(), update]


def steps(layers: int, world: int, rounds: int) -> None:
    names = ("torch.compile", "FSDP2", "FSDP2, layers compiled", "mfsdp", "mfsdp, its optimizer")
    with mfsdp.fake_ranks(world):
        took = seconds([part for name in names for part in contender(name, layers)], rounds)
    print(f"{layers} layers, {world} ranks, ms{'forward, backward':>31}{'clip, step, zero':>18}")
    for name, compute, update in zip(names, took[::2], took[1::2], strict=True):
        print(f"    {name:<28}{1e3 * compute:17.2f}{1e3 * update:18.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--transport", choices=("none", "torch", "mirror"), default="torch")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.steps:
        steps(args.units, args.world, args.rounds)
    else:
        report(args.units, args.world, args.transport, args.rounds)
