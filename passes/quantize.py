"""quantize: weights that the model casts to FP8 are cast before their all-gather.

Before, parameters are gathered in 16 bits, and every rank casts all of them:

    . * .  u0_full                = all_gather u0_shard                   bf16[1048576]
    <-o .                           wait u0_full
    * . .  amax                   = amax abs(u0_weight)                   bf16[1,1024]
    * . .  clamp                  = clamp u0_weight * scale               f32[1024,1024]
    * . .  to                     = to clamp, f8_e4m3fn                   f8_e4m3fn[1024,1024]

After, every rank casts its own rows, and one byte per element is communicated:

    . * .  u0_maxima              = maxima u0_shard                       f32[1024]
    <-o .                           wait u0_maxima
    * . .  u0_scale               = spread u0_shard, scale                f32[524288]
    * . .  u0_code                = to u0_cast * u0_scale, f8_e4m3fn      f8_e4m3fn[524288]
    . * .  u0_full                = all_gather u0_code                    f8_e4m3fn[1048576]
    <-o .                           wait u0_full

Why: half the bytes of every gather, half the gathered memory, and a cast of this rank's rows only. All values stay
    bitwise equal: an amax is exact on any rank, and scales and casts use the model's own operators.
Needs: parameters that are read only as FP8 payload of one byte (`mfsdp.ir.fp8_patterns`), in the same way for all of a
    buffer: `fully_shard` gives FP8 weights a flat buffer of their own. Only an amax may depend on other ranks' rows
    (invariant 46).
Costs: one small all-reduce per optimizer step (`maxima`), and a scale per element of the shard while it is cast.

Backward recomputes scales and payload, along its own dimension if the recipe has two.

Where parameters are persistent (`optim`, `optim_grads`, HFSDP), so is the FP8 payload, which is refreshed if the
optimizer has stepped. Under HFSDP every program gathers it over the shard axis:

    . * .  u0_codes               = refresh_codes u0_code                 f8_e4m3fn[1048576]
    <-o .                           wait u0_codes
"""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from mfsdp.config.block_grid import Grid, encode
from mfsdp.config.units import Unit
from mfsdp.ir import ops
from mfsdp.ir.fp8_operators import write_casts
from mfsdp.ir.fp8_patterns import SCALE, Dims, Fp8Cast, Operand, Read, blocks, reads
from mfsdp.ir.program import Program
from mfsdp.ir.roles import Kind, Lane, Role

aten, prims = torch.ops.aten, torch.ops.prims


def quantize(p: Program, *, on: bool = True) -> None:
    """Casts weights before their all-gather, unit by unit.

    Args:
        on: ``False`` leaves them unchanged.
    """
    done, bits = 0, []
    for unit, params in p.by_unit(Kind.PARAM).items():
        markers = [n for n in params if n.target is ops.param]
        if not (unit.spec.world > 1 or unit.spec.persistent):
            continue
        why = _unit_hinders(unit) if on else "off"
        inside = "" if why else write_casts(p, markers)
        found = reads(p, markers)
        if not any(read.codes for read in found):
            reason = inside or next((f"{read.reason}, as it is" for read in found if read.foreign), "")
            bits += [f"{_width(unit)}: {reason}"] if reason else []
            continue
        why = why or _hinders(unit, found)
        if why:
            bits.append(f"{_width(unit)}: {why}")
            continue
        _quantize_unit(p, unit, found)
        done += 1
    if done:
        p.changed(f"{done} units in one byte per element")
    for words in bits:
        p.note(words)
    if not done and not bits:
        p.note("no weight is quantised here")


def _width(unit: Unit) -> str:
    return f"{unit.name} is gathered in {8 * unit.spec.precision.comm.itemsize} bits"


def _unit_hinders(unit: Unit) -> str:
    """Returns why no weight of a unit can be quantized before communication, ``""`` if some can."""
    if unit.spec.any_optional:
        return "units of its model may be unused, and maxima are taken of all of a program's at once"
    if unit.spec.precision.wire is not None:
        return f"{unit.spec.precision.wire} was asked for by name"
    if unit.spec.precision.comm is not unit.spec.precision.compute:
        return "it is computed in another dtype than it is gathered in"
    return ""


def _hinders(unit: Unit, found: list[Read]) -> str:
    """Returns why the reads of a unit's weights do not let it, ``""`` if they do."""
    for read in found:
        name = unit.offset_name(read.offset)
        if read.reason:
            return read.reason
        if not read.codes:
            return f"{name} is not quantised"
        if len(read.codes) > 1:
            return f"{name} is quantised in {len(read.codes)} ways here"
        if unit.spec.persistent and read.codes[0].constants:
            constant = read.codes[0].constants[0]
            return f"{name} is persistent, and its scale depends on {constant}, a tensor of this program's own"
    first = found[0].codes[0]
    for read in found[1:]:
        code = read.codes[0]
        if code.steps != first.steps or _dtypes(code) != _dtypes(first):
            return f"{unit.offset_name(read.offset)} is quantised otherwise than {unit.offset_name(found[0].offset)}"
    return ""


def _dtypes(code: Fp8Cast) -> list[torch.dtype]:
    return [scale.meta["val"].dtype for scale, _ in code.scales]


def _quantize_unit(p: Program, unit: Unit, found: list[Read]) -> None:
    first = min(read.markers[0] for read in found)
    shard: Any = first.args[0]
    text, cast = unit.spec.encode(), Role(Kind.CAST, unit.name)
    _maxima(p, unit, found, shard, first)
    _hoist(p, [scale for read in found for scale, _ in read.codes[0].scales], first)
    scales = []
    for i in range(len(found[0].codes[0].scales)):
        values = [read.codes[0].scales[i][0] for read in found]
        grids = tuple(read.codes[0].scales[i][1] for read in found)
        name = f"{unit.name}_scale"
        scales.append(p.insert(ops.spread, (shard, values, encode(grids), text), first, cast, name))
    element = shard
    if unit.spec.precision.main is not unit.spec.precision.comm or unit.spec.persistent:
        element = p.insert(ops.cast, (shard, text), first, cast, f"{unit.name}_cast")
    code = _recipe(p, found[0].codes[0], element, scales, first, cast)
    p.rename(code, f"{unit.name}_code")
    if unit.spec.persistent:
        kept, args = Role(Kind.CODES, unit.name, Lane.GATHER), (code, shard, _key(found), p.phase == "backward", text)
        code = p.launch(ops.refresh_codes, args, first, kept, f"{unit.name}_codes")
    if unit.spec.gathers:
        gathered = Role(Kind.FULL, unit.name, Lane.GATHER)
        code = p.launch(ops.all_gather, (code, text), first, gathered, f"{unit.name}_full")
    for read in found:
        for node, dims in zip(read.codes[0].nodes, read.codes[0].dims, strict=True):
            _view(p, unit, code, read, node, dims)
    _erase(p, found)


def _key(found: list[Read]) -> str:
    """Returns a key that is equal in all programs for the same payload of the same parameters."""
    text = repr([(read.offset, read.codes[0].meaning) for read in sorted(found, key=lambda read: read.offset)])
    return sha256(text.encode()).hexdigest()[:16]


def _maxima(p: Program, unit: Unit, found: list[Read], shard: Node, before: Node) -> None:
    """Inserts one node for the amax of all blocks, and replaces the nodes that computed them by views of it."""
    grids: list[Grid] = []
    places: dict[Grid, int] = {}
    at = 0
    wanted: list[tuple[Node, Grid]] = []
    for read in found:
        for node, dims in read.maxima.items():
            grid = blocks(read.offset, read.elements[node.args[0]], dims, node.meta["val"].stride())  # type: ignore[index]
            if grid not in places:
                places[grid] = at
                grids.append(grid)
                at += grid.numel
            wanted.append((node, grid))
    if not wanted:
        return
    args, role = (shard, encode(tuple(grids)), unit.spec.encode()), Role(Kind.MAXIMA, unit.name, Lane.GATHER)
    all_of_them = p.launch(ops.maxima, args, before, role, f"{unit.name}_maxima")
    for node, grid in wanted:
        value, r = node.meta["val"], Role(Kind.CAST, unit.name)
        where = (all_of_them, list(value.shape), list(value.stride()), places[grid])
        new = p.insert(aten.as_strided.default, where, before, r)
        if value.dtype is not torch.float32:
            new = p.insert(prims.convert_element_type.default, (new, value.dtype), before, r, f"{unit.name}_largest")
        node.replace_all_uses_with(new)


def _hoist(p: Program, values: list[Node], before: Node) -> None:
    """Moves scales, and the nodes that compute them, before ``before``."""
    needed: set[Node] = set()
    todo = list(values)
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node not in needed and before < node:
            node.meta[SCALE] = True
            needed.add(node)
            needed.update(u for u in node.users if u.target is ops.wait and u.args[0] is node)
            todo += node.all_input_nodes
    p.move(sorted(needed), before)


def _recipe(p: Program, code: Fp8Cast, element: Node, scales: list[Node], before: Node, r: Role) -> Node:
    """Applies the recipe to all of the shard."""
    made: list[Node] = []

    def known(arg: Any) -> Any:
        if not isinstance(arg, Operand):
            return arg
        return element if arg.kind == "element" else (made if arg.kind == "step" else scales)[arg.number]

    for target, args in code.steps:
        made.append(p.insert(target, tuple(map(known, args)), before, r))
    return made[-1]


def _view(p: Program, unit: Unit, full: Node, read: Read, node: Node, dims: Dims) -> None:
    """Replaces a payload node by a view of the gathered payload with the same shape and strides."""
    value, r, name = node.meta["val"], Role(Kind.CAST, unit.name), f"{read.markers[0].name}_code"
    shape, strides = list(value.shape), list(value.stride())
    whole = not _fits(dims)
    if whole:
        shape, strides = [d.size for dim in dims for d in dim], [d.stride for dim in dims for d in dim]
    else:
        strides = [dim[-1].stride if dim else stride for dim, stride in zip(dims, strides, strict=True)]
    where = (full, shape, strides, read.offset)
    new = p.insert(aten.as_strided.default, where, node, Role(Kind.PARAM, unit.name), name)
    if whole:
        new = p.insert(aten.clone.default, (new,), node, r, kwargs=_CONTIGUOUS)
        new = p.insert(aten.view.default, (new, list(value.shape)), node, r)
    if new.meta["val"].stride() != value.stride():
        order = sorted(range(value.ndim), key=lambda d: -value.stride(d))
        new = p.insert(aten.permute.default, (new, order), node, r)
        new = p.insert(aten.clone.default, (new,), node, r, kwargs=_CONTIGUOUS)
        new = p.insert(aten.permute.default, (new, [order.index(d) for d in range(value.ndim)]), node, r)
    assert new.meta["val"].stride() == value.stride(), f"{node.name}: {new.meta['val'].stride()}, {value.stride()}"
    node.replace_all_uses_with(new)


_CONTIGUOUS = {"memory_format": torch.contiguous_format}


def _fits(dims: Dims) -> bool:
    """Whether every dimension has one stride."""
    return all(a.stride == b.stride * b.size for dim in dims for a, b in pairwise(dim))


def _erase(p: Program, found: list[Read]) -> None:
    """Erases nodes that nothing reads anymore."""
    gone = {n for read in found for n in (*read.elements, *read.maxima, *read.codes[0].nodes)}
    for node in sorted(gone, reverse=True):
        assert not node.users, f"{node.name} is read by {', '.join(u.name for u in node.users)}"
        p.erase(node)
