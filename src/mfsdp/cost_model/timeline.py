"""Simulates a program in time: compute and one queue per process group, in parallel.

compute   |addmm|relu|wait....|addmm|
gather      |u1_full==========|u2_full====|          launched in program order, one at a time per group
reduce                              |u0_gshard==|    beside it, sharing the link

Collectives of one group run one after another in launch order. Concurrent collectives of several groups share a common
link evenly. Compute stops at a `wait` until its collective is complete; this time is exposed. If moving bytes takes the
processor's time (`Link.cpu`), compute runs slower meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from ..config.hardware import Transfer
from ..ir import ops
from ..ir.byte_costs import is_line
from ..ir.program import Program, base_of, group_of, lane_of, product_of
from ..ir.roles import Lane, role
from ..passes.prefetch import LIMITED
from .op_cost import OpTime

BUSIEST = 0.9
"""Largest fraction of the processor's time that moving bytes takes."""


@dataclass(frozen=True)
class Span:
    """One line in time, in seconds from the start of the program."""

    node: Node
    lane: Lane
    start: float
    end: float
    exposed: float = 0.0
    """Of a wait: seconds that compute stops."""
    why: str = ""
    """Of a wait, its bottleneck: ``"bandwidth"``, ``"latency"``, ``"compute"`` (too little between launch and wait) or
    ``"memory limit"``; of a kernel, what limits its time."""


@dataclass
class Moving:
    """A collective or copy in flight."""

    node: Node | None
    transfer: Transfer
    launched: float
    fixed: float
    left: float
    start: float = -1.0
    end: float = -1.0


class Links:
    """Queues of transfers, and the current time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queues: dict[str, deque[Moving]] = {}
        self.known: tuple[list[tuple[Moving, int]], float] | None = None
        """Cached result of `_heads`; ``None`` after a change."""

    def launch(self, queue: str, transfer: Transfer, node: Node | None = None) -> Moving:
        """Launches a transfer now. One that takes no time is complete at once."""
        moving = Moving(node, transfer, self.now, transfer.fixed, transfer.moving)
        if transfer.seconds <= 0:
            moving.start = moving.end = self.now
            return moving
        waiting = self.queues.setdefault(queue, deque())
        if not waiting:
            moving.fixed += moving.transfer.restart
            self.known = None
        waiting.append(moving)
        return moving

    def compute(self, seconds: float) -> None:
        """Advances time by this many seconds of compute at full speed."""
        while seconds > 1e-12:
            heads, rate = self._heads()
            if not heads:
                self.now += seconds
                return
            seconds -= self._step(heads, seconds / rate) * rate

    def until(self, moving: Moving) -> None:
        """Stops compute until a transfer is complete."""
        while moving.end < 0:
            self._step(self._heads()[0], float("inf"))

    def _heads(self) -> tuple[list[tuple[Moving, int]], float]:
        """Returns the first transfer of each queue with the number of transfers that share its link; and the relative
        speed of compute meanwhile.
        """
        if self.known is None:
            heads = [queue[0] for queue in self.queues.values() if queue]
            for head in heads:
                if head.start < 0:
                    head.start = self.now
            links = [h.transfer.link for h in heads if h.fixed <= 0]
            shared = [(h, links.count(h.transfer.link) or 1) for h in heads]
            self.known = shared, self._rate(shared)
        return self.known

    @staticmethod
    def _rate(heads: list[tuple[Moving, int]]) -> float:
        """Returns the relative speed of compute while bytes move."""
        taken = sum(h.transfer.cpu / h.transfer.moving / n for h, n in heads if h.fixed <= 0 and h.transfer.moving > 0)
        return 1.0 - min(BUSIEST, taken)

    def _step(self, heads: list[tuple[Moving, int]], most: float) -> float:
        """Advances time until a transfer changes state, at most by ``most``. Returns by how much."""
        passed = most
        for h, n in heads:
            left = h.fixed if h.fixed > 0 else h.left * n
            if left < passed:
                passed = left
        assert passed < float("inf"), "compute waits for what nobody has launched"
        self.now += passed
        done = False
        for h, n in heads:
            if h.fixed > 0:
                h.fixed -= passed
                if h.fixed > 1e-15:
                    continue
                h.fixed, self.known = 0.0, None
            else:
                h.left -= passed / n
            if h.left <= 1e-12:
                h.end, done = self.now, True
        if done:
            self.known = None
            for queue in self.queues.values():
                while queue and queue[0].end >= 0:
                    queue.popleft()
        return passed


def simulate(program: Program, times: Mapping[Node, OpTime]) -> list[Span]:
    """Returns the start and end of every line (``times``: `mfsdp.cost_model.op_cost.op_times`), in program order."""
    links = Links()
    in_flight: dict[Node, Moving] = {}
    order: list[tuple[Node, Span | Moving]] = []
    limits = {n for n in program.nodes if LIMITED in n.meta}
    for node in program.nodes:
        if not is_line(node) or (node not in times and node.target is not ops.free):
            continue
        start = links.now
        if node.target is ops.free:
            order.append((node, Span(node, Lane.COMPUTE, start, start)))
        elif node.target is ops.wait:
            moving = in_flight.get(base_of(node.args[0]))  # type: ignore[arg-type]
            if moving is not None and moving.end < 0:
                links.until(moving)
            exposed = links.now - start
            links.compute(times[node].seconds)
            why = _why(moving, node in limits or moving.node in limits) if moving and exposed > 0 else ""
            order.append((node, Span(node, Lane.COMPUTE, start, links.now, exposed, why)))
        elif (transfer := times[node].transfer) is not None:
            moving = links.launch(queue_of(program, node), transfer, node)
            in_flight[base_of(product_of(node))] = moving
            order.append((node, moving))
        else:
            links.compute(times[node].seconds)
            order.append((node, Span(node, Lane.COMPUTE, start, links.now, why=times[node].limit)))
    for moving in in_flight.values():
        links.until(moving)
    return [_span(thing) if isinstance(thing, Moving) else thing for _, thing in order]


def queue_of(program: Program, node: Node) -> str:
    """Returns the queue of a collective or host copy. In a queue, each one starts when the previous one is complete."""
    if node.target in ops.HOST:
        return str(node.target)
    return group_of(program, node) or f"lane {lane_of(node)}"


def _why(moving: Moving | None, limited: bool) -> str:
    if moving is None:
        return ""
    alone = moving.transfer.seconds
    if limited:
        return "memory limit"
    if moving.end - moving.launched > 1.05 * alone:
        return "bandwidth"  # it waited behind others, or shared the link with them
    return "latency" if moving.transfer.fixed > moving.transfer.moving else "compute"


def _span(moving: Moving) -> Span:
    assert moving.node is not None
    r = role(moving.node)
    assert r is not None
    return Span(moving.node, r.lane, moving.start, moving.end)
