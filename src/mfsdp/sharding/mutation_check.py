"""Refuses writes to sharded parameters in forward: the next gather would restore the old values.

A gathered parameter lives for one program or one forward. Writing it back has no meaning either, since each rank has
seen other data (``max_norm`` renormalizes a batch's rows). The error comes when the model is sharded for
`nn.Embedding(max_norm=)`, at compilation for a traced model, at the end of forward for plain Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import fx

from ..buffers.flat_buffer import FlatBuffer, owner_of
from ..config.own_source import ours
from ..ir import ops
from ..runtime import engine
from ..runtime.checksums import checksum


def refuse(buffer: FlatBuffer, slot: int, place: str) -> RuntimeError:
    """The error for a parameter that forward has written to."""
    return RuntimeError(
        f"mfsdp: forward writes to the parameter {buffer.layout.slots[slot].name} of unit {buffer.unit.fqn!r} "
        f"({place}). It is sharded: the next forward gathers it anew, and what was written is lost. Write to it "
        "outside of forward, under torch.no_grad(), make it a buffer (register_buffer), or pass it in ignored_params."
    )


# Compiled


def traced(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Checks Dynamo's graph for writes, which functionalization would drop silently.

    Args:
        gm: Dynamo's graph, which has run on the fake tensors in ``meta["example_value"]``: their versions count writes,
            and views share storage with their bases.
        inputs: its inputs, real tensors.

    Raises:
        RuntimeError: names the parameter, its unit and the line.
    """
    buffers: dict[int, FlatBuffer] = {}
    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        buffer = owner_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if buffer is not None:
            buffers[_storage(node)] = buffer
    bodies = [m for m in gm.modules() if isinstance(m, fx.GraphModule)] if buffers else []
    for body in bodies:
        for marker in body.graph.find_nodes(op="call_function", target=ops.param):
            writer = _writer(marker)
            if writer is not None:
                buffer, offset = buffers[_storage(marker.args[0])], marker.args[1]
                slot = next(i for i, s in enumerate(buffer.layout.slots) if s.offset == offset and s.numel)
                raise refuse(buffer, slot, _line(writer) or _line(marker))


def _writer(marker: fx.Node) -> fx.Node | None:
    """The node that writes to a marker's result or a view of it; the marker if it is unknown which."""
    family = [marker]
    for node in family:
        family += [u for u in node.users if u not in family and _storage(u) == _storage(marker)]
    readers = sorted({(user, node) for node in family for user in node.users})
    uncounted = [user for user, node in readers if _declared(user, node)]
    if not uncounted and not any(_version(n) for n in family):
        return None
    named = [user for user, _ in readers if _IN_PLACE.fullmatch(_name(user)) or "out" in user.kwargs]
    return min([*uncounted, *named], default=marker)


def _declared(node: fx.Node, arg: fx.Node) -> bool:
    """Whether an operator declares a write to an argument: in its schema, or by name for ``_foreach_`` ones, whose
    writes to fake tensors versions do not count.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        given = {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
        written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    else:
        written = [node.args[0]] if re.fullmatch(r"_foreach_.*[^_]_", _name(node)) else []
    return any(v is arg or (isinstance(v, (list, tuple)) and arg in v) for v in written)


_IN_PLACE = re.compile(
    r"(?!(?:and|or|not|is)_$)[^_].*[^_]_|setitem|i(add|sub|mul|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)"
)
"""Names of operators that write, by torch's convention and Python's, whose ``and_`` is `&`."""


def writes_to(node: fx.Node, arg: fx.Node) -> bool:
    """Whether an operator in Dynamo's graph writes to an argument, by its schema or its name."""
    named = _IN_PLACE.fullmatch(_name(node)) is not None and bool(node.args) and node.args[0] is arg
    return named or _declared(node, arg) or node.kwargs.get("out") is arg


def written(node: fx.Node) -> bool:
    """Whether Dynamo's graph writes to a value or a view of it."""
    return bool(_version(node)) or any(writes_to(user, node) for user in node.users)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _version(node: fx.Node) -> int:
    value = node.meta.get("example_value")
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _storage(node: object) -> int:
    """Identity of the storage of a node's fake tensor; 0 for none."""
    return storage(node.meta.get("example_value")) if isinstance(node, fx.Node) else 0


def storage(value: object) -> int:
    """Identity of a tensor's storage, fake or not; 0 for none.

    Raises:
        NotImplementedError: a ``torch.func`` transform reads a sharded parameter.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        if engine.in_transform(value):
            raise not_transformed("the model")
        return int(value.untyped_storage()._cdata)
    return 0


def _line(node: fx.Node) -> str:
    """The user's line of code behind a node."""
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    mine = [f"{file}:{line}" for file, line in frames if not ours(file) and "/torch/" not in file]
    return mine[-1] if mine else ""


def not_transformed(what: str) -> NotImplementedError:
    """The error for parameters that a ``torch.func`` transform or forward-mode AD reads."""
    return NotImplementedError(
        f"mfsdp: {what} is sharded, and torch.func (grad, vmap, ...) and forward-mode AD cannot transform what gathers "
        "it. Give the call whole values of all parameters: torch.func.functional_call(model, {name: p.full_tensor() "
        "for name, p in model.named_parameters()}, args)."
    )


# Plain Python


class MutationCheck:
    """The state of a gathered buffer's parameters when forward got them.

    Versions count writes through a tensor and its views, but not through ``.data``. Those are found by comparing
    values, in a buffer's first forward with gradients and its first without, unless the shards were written meanwhile,
    which is allowed.
    """

    def __init__(self, buffer: FlatBuffer, params: Sequence[torch.Tensor]):
        compared = _compared.setdefault(buffer, set())
        self.look = torch.is_grad_enabled() not in compared
        compared.add(torch.is_grad_enabled())
        self.buffer, self.params, self.version = buffer, params, buffer.weights.main._version
        if not buffer.spec.persistent:
            buffer.weights.stale = False  # unused there otherwise; a DTensor write sets it
        self.before = [self._state(p) for p in params]

    def _state(self, param: torch.Tensor) -> tuple[int, int, int]:
        version = 0 if param.is_inference() else param._version
        return version, param.data_ptr(), int(checksum(param)) if self.look else 0

    def written(self) -> int | None:
        """The slot of the first parameter written since, or ``None``."""
        main, spec = self.buffer.weights.main, self.buffer.spec
        if self.look and not spec.persistent and (self.buffer.weights.stale or main._version != self.version):
            self.look, self.before = False, [(version, place, 0) for version, place, _ in self.before]
        states = zip(self.params, self.before, strict=True)
        return next((slot for slot, (p, before) in enumerate(states) if self._state(p) != before), None)


_compared: WeakKeyDictionary[FlatBuffer, set[bool]] = WeakKeyDictionary()
"""Grad modes in which values were already compared."""
