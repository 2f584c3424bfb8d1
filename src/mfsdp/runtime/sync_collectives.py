"""Gathers and reductions that complete at once, for code outside of programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..config.reductions import Reduction, reduction_steps
from ..config.units import UnitSpec
from . import comm_formats, devices, execution, groups
from .buffer_registry import gather_of, known, owner, reduction_of, refresh_of, unfinished
from .inflight import InFlight, beside
from .transport import End, parts, segments


def gather_now(source: torch.Tensor, spec: str) -> torch.Tensor:
    """The complete full buffer, in the compute dtype. Shares the source's storage if there is nothing to gather or
    cast.
    """
    s = UnitSpec.decode(spec)
    buffer = owner(source)
    if buffer is not None and buffer.unit.outermost.half:
        raise unfinished(buffer.unit.outermost)
    unseen = buffer is not None and buffer.weights.unseen() and not s.any_optional
    over: tuple[str, ...] = s.gather_groups if s.gathers or s.persistent else ()
    carried: tuple[str, ...] = ()
    if s.any_optional:  # as in programs (Note [Joining with zeros])
        assert buffer is not None
        loose = buffer.unit.outermost.loose
        loose.in_backward()
        if buffer.weights.due():
            with execution.announced(refresh_of(source), loose.group, meets=s.peer_groups, carried=s.peer_groups):
                at_once(buffer.weights.refresh())
        over, carried = (loose.group,) if s.gathers else (), s.peer_groups
    with execution.announced(gather_of(source), *over, meets=s.peer_groups, carried=carried, anew=unseen):
        if s.persistent:
            assert buffer is not None
            if not s.any_optional and execution.current().written(s.gather_groups, unseen):
                buffer.weights.stale = True
            at_once(buffer.weights.refresh())
        if not s.gathers:
            return source.detach().to(s.precision.comm).to(s.precision.compute)
        full = source.new_empty(s.full_numel, dtype=s.precision.comm)
        pairs = segments(s.splits, s.world, full, _given(source.detach(), s))
        comm_formats.gather(execution.current(), pairs, s.group, s.precision.wire)()
    return full.to(s.precision.compute)


def _given(main: torch.Tensor, s: UnitSpec) -> torch.Tensor:
    """What a gather sends of main weights: their cast, or for a communication format the weights themselves."""
    return main if s.precision.wire else main.to(s.precision.comm)


def at_once(ends: Iterable[End]) -> None:
    """Completes what was launched."""
    for end in ends:
        end()


def gather_main(main: torch.Tensor, s: UnitSpec) -> torch.Tensor:
    """All main weights of a unit, [full_numel] in their dtype, in new memory."""
    flat = main.detach()
    if s.outer_optim:
        flat = _whole(flat, s.splits_on(2), s.outer, s.outer_group)
    if s.world > 1:
        flat = _whole(flat, s.splits, s.world, s.group)
    return flat.clone() if flat.data_ptr() == main.data_ptr() else flat


def replicate(main: torch.Tensor, source: torch.Tensor, s: UnitSpec) -> list[End]:
    """Launches the gather of main weights, [main_numel], or of an FP8 payload of them, into persistent parameters,
    [source_numel]. Over two axes, one gather sends another's result, and compute waits for neither: on a device, a side
    stream waits for the first; on the CPU, the end launches the second.
    """
    run, shard, wire = execution.current(), main, None
    if source.dtype.itemsize > 1:
        shard, wire = _given(main, s), s.precision.wire
    if not s.outer_optim:
        return [comm_formats.gather(run, segments(s.splits, s.world, source, shard), s.group, wire)]
    part = source.new_empty(s.shard_numel) if s.replica else source
    arrived = comm_formats.gather(run, segments(s.splits_on(2), s.outer, part, shard), s.outer_group, wire)
    if not s.replica:
        return [arrived]

    def further() -> End:
        arrived()
        run.launched += 1
        return comm_formats.gather(run, segments(s.splits, s.world, source, part), s.group, wire)

    side = devices.side(main.device, "gathers that wait for others")
    if side is None:
        return [lambda: further()()]
    return [beside(side, main.device, further)]


def _whole(shard: torch.Tensor, splits: tuple[int, ...], ranks: int, group: str) -> torch.Tensor:
    full = shard.new_empty(ranks * sum(splits))
    execution.current().gather(segments(splits, ranks, full, shard), group)()
    return full


def collect(
    shard: torch.Tensor, splits: tuple[int, ...], ranks: int, group: str, to: Sequence[int] | None = None
) -> tuple[torch.Tensor | None, End]:
    """Launches the gather of all ranks' shards into new memory of some ranks; the others only send.

    Args:
        shard: this rank's part, [sum(splits)]; unchanged until the end has been called.
        splits: elements per rank of each segment.
        to: indices in the group, the same on all its ranks; ``None``: all.

    Returns:
        The full buffer, [ranks * sum(splits)], or ``None`` where this rank only sends; and the end.
    """
    run, me = execution.current(), groups.process_group(group).rank()
    full = shard.new_empty(ranks * sum(splits)) if to is None or me in to else None
    if to is None:
        assert full is not None
        return full, run.gather(segments(splits, ranks, full, shard), group)
    received, sent = int(full is not None), [int(r in to) for r in range(ranks)]
    outs = [shard[:0]] * len(splits) if full is None else parts(full, splits, ranks)
    ends = [
        run.all_to_all(
            out,
            part if len(to) == 1 else part.repeat(len(to)),
            [received * n] * ranks,
            [n * each for each in sent],
            group,
        )
        for n, out, part in zip(splits, outs, parts(shard, splits, 1), strict=True)
    ]
    return full, lambda: at_once(ends)


def reduce_now(source: torch.Tensor, gfull: torch.Tensor, offsets: list[int], spec: str) -> None:
    """Reduces and accumulates packed gradients at once; ``offsets`` tells which parameters have one."""
    s, steps = UnitSpec.decode(spec), reduction_steps(spec)
    buffer = known(source)
    total = gfull if s.predivide == 1 else gfull.mul_(s.predivide)
    over, carried = s.peer_groups, s.peer_groups[:0]
    if s.any_optional:  # as in programs (Note [Joining with zeros])
        loose = buffer.unit.outermost.loose
        loose.in_backward()
        held = bool(steps) and steps[0].hold and not buffer.gradients.sync  # before any communication
        over, carried = () if held else (loose.group,), s.peer_groups
    with execution.announced(reduction_of(source), *over, carried=carried):
        for step in steps:
            if step.hold and buffer.gradients.hold(total, offsets):
                return
            total = reduced_over(total, step)
        if steps and not s.any_optional:
            buffer.gradients.vote(offsets)
    buffer.gradients.accumulate(total, offsets, 1 / (s.divide * s.predivide))


def reduce_nothing(source: torch.Tensor, spec: str, wanted: bool = True) -> None:
    """The same as `reduce_now` without gradients, for a unit that other ranks used, or that was used before (Note
    [Joining with zeros]). ``wanted``: whether they accumulate.
    """
    gradients = known(source).gradients
    with gradients.left_out(wanted):
        reduce_now(source, packed([], [], UnitSpec.decode(spec), source.device), [], spec)
    gradients.finish()


def reduce_rest(grad: torch.Tensor, spec: str) -> torch.Tensor:
    """Completes a marker's reduction: from the source's shape to that of the main weights."""
    s = UnitSpec.decode(spec)
    grad = grad.to(s.precision.grad_comm)
    for step in reduction_steps(spec):
        if s.replica or step.index.outer:
            grad = reduced_over(grad, step)
    return grad


def packed(grads: list[torch.Tensor], offsets: list[int], s: UnitSpec, device: torch.device) -> torch.Tensor:
    """Gradients at their offsets among zeros, [full_numel] in the communication dtype."""
    gfull = torch.zeros(s.full_numel, dtype=s.precision.grad_comm, device=device)
    if grads:
        places = [gfull[o : o + g.numel()].view(g.shape) for g, o in zip(grads, offsets, strict=True)]
        torch._foreach_copy_(places, grads)
    return gfull


def reduced_over(total: torch.Tensor, step: Reduction) -> torch.Tensor:
    """The sum over the ranks of an axis: this rank's part of it, or all in place."""
    if not step.scatters:
        summed(total, step)()
        return total
    out = total.new_empty(step.numel, dtype=step.dtype)
    pairs = segments(step.splits, step.ranks, total, out)
    comm_formats.scatter(execution.current(), pairs, step.sum, step.group, step.wire)()
    return out


def summed(tensor: torch.Tensor, step: Reduction) -> End:
    """Launches the sum over the ranks of an axis, in place. Libraries sum in the communication dtype. If the sum's
    dtype is wider, or there is a communication format, a reduce-scatter and a gather (launched by the end) replace the
    all-reduce: the same bytes. In int8, inputs and sum are both rounded.
    """
    run, group, ranks, total, wire = execution.current(), step.group, step.ranks, step.sum, step.wire
    if total is tensor.dtype and wire is None:
        return run.all_reduce(tensor, "sum", group)
    numel = tensor.numel()
    part = tensor.new_empty(-(-numel // ranks), dtype=total if wire else tensor.dtype)
    whole = tensor
    if numel % ranks:
        whole = tensor.new_zeros(ranks * part.numel())
        whole[:numel].copy_(tensor)
    arrived = comm_formats.scatter(run, [(whole, part)], total, group, wire)

    def end() -> None:
        arrived()
        run.launched += 1
        comm_formats.gather(run, [(whole, part)], group, wire)()
        if whole is not tensor:
            tensor.copy_(whole[:numel])

    return InFlight(tensor.device, end)


def on_any_rank(here: torch.Tensor, s: UnitSpec) -> torch.Tensor:
    """Nonzero where any rank that trains the unit has true. ``here``: booleans."""
    votes = here.to(torch.uint8)
    for group in filter(None, (s.group, s.outer_group)):
        reduced(votes, "max", group)
    return votes


def reduced(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """All-reduces a tensor in place and returns it; ``op`` is ``"sum"``, ``"min"`` or ``"max"``."""
    execution.current().all_reduce(tensor, op, group)()
    return tensor


def gathered(part: torch.Tensor, group: str) -> torch.Tensor:
    """All ranks' tensors of one size, flat, concatenated."""
    return _whole(part.reshape(-1), (part.numel(),), groups.process_group(group).size(), group)
