"""gather: one all-gather per unit and program produces the unit's parameters.

Before, every parameter access is a marker:

    * . .  u0_weight              = param u0_shard, 0, [1024,1024]        bf16[1024,1024]
    * . .  u0_bias                = param u0_shard, 1048576, [1024]       bf16[1024]
    * . .  addmm                  = addmm u0_bias, x, u0_weight.T         bf16[256,1024]

After, the unit is gathered before its first reader, and parameters are views, which have no line:

    . * .  u0_full                = all_gather u0_shard                   bf16[1056768]
    <-o .                           wait u0_full
    * . .  addmm                  = addmm u0_bias, x, u0_weight.T         bf16[256,1024]

Why: one collective per unit instead of one per parameter, and no copy out of its result.
Needs: the layout: each parameter is contiguous in the full buffer.
Costs: the full buffer stays allocated until `reshard` frees it.

If main weights are not in the communication dtype, the shard is cast before the all-gather, so that fewer bytes are
communicated. Under ``keep_cast`` the cast has no line: it persists from one optimizer step to the next. For int8 there
is no cast: main weights are quantized when they are sent.

A group of one rank gathers nothing: parameters are views into the shard or its cast (invariant 4), under ``keep_cast``
into the persistent cast, in forward and in backward:

    * . .  u0_cast                = kept_cast u0_shard                    bf16[1056768]

It always takes two bytes per parameter, whereas a cast per program is freed with its unit and made again in backward. A
unit with ``reshard_after_forward=False`` is cast once, in forward, for backward too: an optimizer could overwrite a
persistent cast in between.

Under the strategies ``optim`` and ``optim_grads`` parameters stay gathered; under HFSDP every outer rank keeps a shard
of them. Programs read this persistent copy. Forward asks for a refresh, which runs only if the optimizer has stepped:

    . * .                           refresh u0_full
    <-o .                           wait u0_full
    * . .  addmm                  = addmm u0_bias, x, u0_weight.T         bf16[256,1024]
"""

from __future__ import annotations

import torch
from torch.fx import Node

from mfsdp.config.units import Unit
from mfsdp.ir import ops, saved_copies
from mfsdp.ir.program import Program
from mfsdp.ir.roles import Kind, Lane, Role

prims, aten = torch.ops.prims, torch.ops.aten


def gather(p: Program, *, keep_cast: bool = False) -> None:
    """Replaces all markers of each unit by one all-gather and views into its result.

    Args:
        keep_cast: whether casts of shards persist until main weights are written.
    """
    gathered, kept = 0, saved_copies.told(p)
    for unit, params in p.by_unit(Kind.PARAM).items():
        markers = [n for n in params if n.target is ops.param]
        if markers:
            _gather_unit(p, unit, markers, keep_cast)
            gathered += 1
    if not gathered:
        p.note("no parameter is read here")
    elif not any(u.spec.gathers or u.spec.persistent for u in p.units):
        p.note("nothing to gather: parameters are views into the shard")
    if kept:
        p.note(kept)


def _gather_unit(p: Program, unit: Unit, markers: list[Node], keep_cast: bool) -> None:
    first, spec, precision = markers[0], unit.spec, unit.spec.precision
    flat = markers[0].args[0]
    assert isinstance(flat, Node) and all(m.args[0] is flat for m in markers)
    if spec.persistent:
        if p.phase != "backward":
            p.launch(ops.refresh, (flat,), first, Role(Kind.REFRESH, unit.name, Lane.GATHER))
    elif precision.main is not precision.comm and not (spec.gathers and (keep_cast or precision.wire)):
        lasts = keep_cast and spec.reshard
        target = ops.kept_cast if lasts else prims.convert_element_type.default
        args = (flat, spec.encode() if lasts else precision.comm)
        flat = p.insert(target, args, first, Role(Kind.CAST, unit.name), f"{unit.name}_cast")
    if spec.gathers:
        full = Role(Kind.FULL, unit.name, Lane.GATHER)
        flat = p.launch(ops.all_gather, (flat, spec.encode()), first, full, f"{unit.name}_full")
    views: dict[int, Node] = {}
    for marker in markers:
        offset = marker.args[1]
        assert isinstance(offset, int)
        if offset in views:
            marker.replace_all_uses_with(views[offset])
            p.erase(marker)
        else:
            views[offset] = _view(p, unit, flat, marker)


def _view(p: Program, unit: Unit, flat: Node, marker: Node) -> Node:
    """Replaces a marker by a view into the flat buffer, cast to the compute dtype."""
    value, precision = marker.meta["val"], unit.spec.precision
    where = (flat, list(value.shape), list(value.stride()), marker.args[1])
    p.rewrite(marker, aten.as_strided.default, where)
    if precision.comm is precision.compute:
        return marker
    target, role = prims.convert_element_type.default, Role(Kind.PARAM, unit.name)
    cast = p.insert(target, (marker, precision.compute), marker.next, role, f"{marker.name}_cast")
    marker.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast
