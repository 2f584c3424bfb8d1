"""schedule_offload: saved activations are copied to the host while later layers compute, and reloaded before use.

Before, copies are launched when no compute is left:

    * . . .  addmm                  = addmm u0_bias, x, u0_weight.T         bf16[256,1024]
    * . . .  relu                   = relu addmm                            bf16[256,1024]
    ...
    >-----*  relu_host              = offload relu                          bf16[256,1024]
    <-----o                           wait relu_host

After:

    * . . .  relu                   = relu addmm                            bf16[256,1024]
    >-----*  relu_host              = offload relu                          bf16[256,1024]
    * . . |  addmm_1                = addmm u1_bias, relu, u1_weight.T      bf16[256,1024]
    <-----o                           wait relu_host

and in backward, where the reload that is needed last is placed first:

    . . . *  relu_back              = reload relu_host                      bf16[256,1024]
    * . . |  mm                     = mm tangents_1, u1_weight              bf16[256,1024]
    <-----o                           wait relu_back

Why: the link to the host works while compute does, and memory is freed as soon as a copy completes. Only launches and
    waits move; every value stays bitwise equal.
Needs: launches and waits in the graphs, inserted where the joint graph is partitioned (`compiler.activation_offload`);
    the final places of collectives and their waits (`prefetch`, `defer`).
Costs: the time of copies that compute does not hide: forward waits for them at its end. A reloaded value takes memory
    from its launch on.

A copy is launched after its value and the pointwise compute that follows, which a compiler fuses with it. Its wait is
placed where the cost model predicts completion, after the last reader of the value. Reloads are launched one after
another on their link, as late as they still arrive in time. Without a cost model, ``lag`` units lie between a launch
and its wait.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping

from torch.fx import Node

from mfsdp.config.best_effort import only_tells
from mfsdp.ir import ops
from mfsdp.ir.byte_costs import nbytes, size
from mfsdp.ir.fp8_patterns import pointwise
from mfsdp.ir.program import Program, base_of, view_of
from mfsdp.ir.roles import Kind, role

Pace = Callable[[Program], Mapping[Node, float]]
"""Returns, for a program, the seconds that compute spends at each node and the seconds of each copy."""


def schedule_offload(p: Program, *, lag: int = 1, pace: Pace | None = None) -> None:
    """Moves the launches of copies to the host, their waits, and the launches of copies back.

    Args:
        lag: units of compute between a launch and its wait, used without ``pace``.
        pace: returns the times of compute and copies.
    """
    out, back = p.calls(ops.offload), p.calls(ops.reload)
    if not out and not back:
        p.note("nothing goes to the host")
        return
    waits: dict[Node, Node] = {n.args[0]: n for n in p.find(Kind.WAIT)}  # type: ignore[misc]
    clock = _Clock(p, lag, pace)
    for launch in out:
        _launch(p, launch, waits)
    clock.start(p)
    for launch in sorted(out):
        _await(p, launch, waits[launch], clock)
    _fetch(p, back, waits, clock)
    for copies, way in ((out, "to"), (back, "from")):
        if copies:
            p.changed(f"{len(copies)} values, {size(sum(nbytes(n.meta['val']) for n in copies))}, {way} the host")
    p.note("by the clock" if pace is not None else f"lag {lag}")


class _Clock:
    """Predicts when nodes begin and copies complete: in seconds, or, without times, in units of compute."""

    def __init__(self, p: Program, lag: int, pace: Pace | None):
        missing = f"times by which copies to the host are placed, lag {lag} is taken"
        self.known = only_tells(missing, None, pace, p) if pace is not None else None
        self.lag, self.free = lag, 0.0
        self.firsts = set() if self.known is not None else _firsts(p)

    def start(self, p: Program) -> None:
        now, self.lines, self.begins, self.at = 0.0, list[Node](), list[float](), dict[Node, float]()
        for node in p.nodes:
            if node.op == "placeholder":
                continue
            now += node in self.firsts
            self.at[node] = now
            if not _copies(node):
                self.lines.append(node)
                self.begins.append(now)
                now += self.known.get(node, 0.0) if self.known is not None else 0.0

    def takes(self, launch: Node) -> float:
        return self.lag + 1 if self.known is None else self.known.get(launch, 0.0)

    def complete(self, launch: Node) -> float:
        """Returns when a copy completes that starts after all earlier ones."""
        begin = self.at[launch] if self.known is None else max(self.at[launch], self.free)
        self.free = begin + self.takes(launch)
        return self.free

    def later(self, when: float) -> Node | None:
        """Returns the first node that begins at ``when`` or later."""
        i = bisect_left(self.begins, when)
        return self.lines[i] if i < len(self.lines) else None

    def last(self, when: float) -> Node:
        """Returns the last node that has begun at ``when``; the first node if none has."""
        return self.lines[max(bisect_right(self.begins, when) - 1, 0)]


def _copies(node: Node) -> bool:
    """Whether a node is a copy or a wait for one; these move."""
    launch = node.args[0] if node.target is ops.wait else node
    return isinstance(launch, Node) and launch.target in ops.HOST


def _firsts(p: Program) -> set[Node]:
    """Returns, for each module whose parameters are gathered together, the first node that reads one of them."""
    found: dict[str, Node] = {}
    for unit, params in p.by_unit(Kind.PARAM).items():
        readers = [r for param in params for r in p.readers(param) if r is not p.output]
        if readers:
            found[unit.fqn] = min([*readers, *([found[unit.fqn]] if unit.fqn in found else [])])
    return set(found.values())


def _launch(p: Program, launch: Node, waits: Mapping[Node, Node]) -> None:
    """Moves the launch of a copy behind its value, once that is complete."""
    value: Node = launch.args[0]  # type: ignore[assignment]
    after = max(value, waits.get(base_of(value), value))
    p.move([launch], _behind_fused(p, after.next))


def _behind_fused(p: Program, node: Node) -> Node:
    """Returns the first node from ``node`` on that is neither a view nor pointwise compute."""
    while node is not p.output and role(node) is None and (view_of(node) is not None or pointwise(node)):
        node = node.next
    return node


def _await(p: Program, launch: Node, wait: Node, clock: _Clock) -> None:
    """Moves the wait for a copy to where the copy is complete and the value has been read."""
    value: Node = launch.args[0]  # type: ignore[assignment]
    read = [r for r in p.readers(value) if r not in (launch, wait, p.output)]
    complete = clock.later(clock.complete(launch)) or p.output
    p.move([wait], _behind_fused(p, max([complete, launch.next, *(r.next for r in read)])))


def _fetch(p: Program, launches: list[Node], waits: Mapping[Node, Node], clock: _Clock) -> None:
    """Moves the launches of reloads up, starting with the one that is needed last."""
    due, behind = float("inf"), p.output
    for launch in sorted(launches, key=waits.__getitem__, reverse=True):
        needed = clock.at[waits[launch]]
        due = min(due, needed) - clock.takes(launch) if clock.known is not None else needed - clock.takes(launch)
        behind = min(clock.last(due), behind, launch)
        if behind is not launch:
            p.move([launch], behind)
        behind = launch
