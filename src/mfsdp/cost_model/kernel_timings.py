"""Kernels measured on the machine that is to run them, by operator, shapes and dtypes: for a clock that estimates less.

`measure` runs every distinct kernel of given programs on random numbers, each alone: matrix products, attention and
whatever else is called one by one, and runs of lines that Inductor fuses, compiled. What sharding adds (buckets, packs,
accumulators, waits) is left to bytes. A file keeps what was found, with the hardware's name; other programs, of other
models too, add what is new to them. Programs are traced for a CPU, whose attention a GPU has not: there its own is run.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..config.options import SHORT
from ..ir import ops
from ..ir.byte_costs import escapes, nbytes
from ..ir.program import Program, mutates, operator
from ..ir.symbolic_sizes import hint, shape_of
from . import fusion

aten = torch.ops.aten

LEAST = 0.02
"""Seconds for which a kernel is run, over and over."""

ROUNDS = 3
"""How often at least. Of a GPU the fastest counts, of the CPU the median."""

CACHES = 2**24
"""Bytes that are written between two calls on the CPU. With none, models of the benchmark were predicted to be 19 to
31% faster than they are; four times as many made the largest of them 14% slower."""


@dataclass
class Kernels:
    """Seconds by kernel. ``explain(kernels=...)`` takes it, or the path of its file."""

    hardware: str
    """Where they were measured, in words."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By `key`."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that `load` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Kernels:
        """Reads a file of `save`.

        Raises:
            ValueError: it is none.
        """
        try:
            found = cls(**json.loads(Path(path).read_text()))
            if not all(isinstance(x, float) and x > 0 for x in found.seconds.values()):
                raise ValueError("seconds are not all positive numbers")
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"kernels: {path} is no file that `mfsdp measure --kernels` has written: {error}"
            ) from error
        return found

    def of(self, program: Program, fused: bool) -> dict[str, float]:
        """Seconds by name of a line, of the kernels that are known: what `mfsdp.cost_model.op_cost.op_times` takes.
        Lines of one kernel share them by the bytes of what they give.
        """
        out: dict[str, float] = {}
        for run in fusion.together(program, fused):
            seconds = self.seconds.get(key(run))
            if seconds is not None:
                weights = [1 + nbytes(node.meta.get("val")) for node in run]
                out |= {n.name: seconds * w / sum(weights) for n, w in zip(run, weights, strict=True)}
        return out


def key(run: Sequence[Node]) -> str:
    """What a kernel does, as text: operators with dtypes, shapes and strides of what they read; the same for all that
    take the same time.
    """
    at = {node: i for i, node in enumerate(run)}

    def word(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{at[value]}" if value in at else _shown(value.meta.get("val"))
        if isinstance(value, (list, tuple)):
            return f"[{' '.join(map(word, value))}]"
        return str(hint(value))

    def line(node: Node) -> str:
        if node.target is ops.mm:  # wherever in a bucket it is written
            into = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
            return f"{aten.mm.default}({', '.join(map(word, node.args[4:6]))}) -> {into}"
        target, args, kwargs = operator(node)
        named = [f"{name}={word(value)}" for name, value in kwargs.items()]
        return f"{target}({', '.join([*map(word, args), *named])})"

    return "; ".join(map(line, run))


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(hint(value)) if not isinstance(value, (list, tuple)) else f"[{' '.join(map(_shown, value))}]"
    short = SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
    strides = "" if value.is_contiguous() else f"/{_numbers(value.stride())}"
    return f"{short}[{_numbers(shape_of(value))}]{strides}"


def _numbers(values: Iterable[Any]) -> str:
    return ",".join(str(hint(n)) for n in values)


def measure(
    programs: Iterable[Program], *, fused: bool = True, known: Kernels | None = None, compiled: bool = True
) -> Kernels:
    """Runs every distinct kernel of programs on the CPU or the GPU of this process, and times it.

    Args:
        programs: after all passes, as `mfsdp.trace` and `mfsdp.pipeline.run` give them.
        fused: whether neighbouring kernels fuse (Inductor) or not (ATen).
        known: what has been measured already, which is kept; what is found is added to a copy.
        compiled: whether fused kernels are compiled and run; seconds for each. Otherwise bytes stand for them.

    Raises:
        ValueError: they were measured on other hardware.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    known = known or Kernels(here(device))
    if known.hardware != here(device):
        raise ValueError(f"kernels: measured on {known.hardware}, this is {here(device)}: give another file")
    found = Kernels(known.hardware, dict(known.seconds))
    for program in programs:
        for run in fusion.together(program, fused):
            if not _runs(run) or (fused and fusion.fuses(run[0]) and not compiled) or key(run) in found.seconds:
                continue
            attends = attention(run[0], device) if device.type != "cpu" else None
            call, inputs = attends or _alone(run, device)
            if fused and fusion.fuses(run[0]):
                call = torch.compile(call, dynamic=False)
            found.seconds[key(run)] = _seconds(call, inputs)
    return found


def here(device: torch.device) -> str:
    """The hardware, and what else kernels depend on, in words."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif (info := Path("/proc/cpuinfo")).exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = f"{models[0] if models else name}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__.partition('+')[0]}"


def _runs(run: Sequence[Node]) -> bool:
    """Whether it can be run alone: operators of ATen's that write nothing but what they give, and products that write
    into buckets.
    """
    return all(n.target is ops.mm or (_namespace(n) in ("aten", "prims") and not mutates(n)) for n in run)


def _namespace(node: Node) -> str:
    return getattr(operator(node)[0], "namespace", "")


def _alone(run: Sequence[Node], device: torch.device) -> tuple[Callable[..., Any], list[Any]]:
    """A kernel's lines as a graph of their own, and what to call it with."""
    graph, inside = torch.fx.Graph(), set(run)
    inputs: list[Any] = []
    copies: dict[Node, Node] = {}

    def copy(value: Node) -> Node:
        if value not in copies:
            copies[value] = graph.placeholder(f"x{len(inputs)}")
            copies[value].meta["val"] = value.meta.get("val")
            inputs.append(_random(value.meta.get("val"), device))
        return copies[value]

    for node in run:
        if node.target is ops.mm:
            gfull, a, b = node.args[0], *node.args[4:6]
            product = graph.call_function(aten.mm.default, (copy(a), copy(b)))  # type: ignore[arg-type]
            wide = gfull.meta["val"].dtype  # type: ignore[union-attr]
            if wide != a.meta["val"].dtype:  # type: ignore[union-attr]
                product = graph.call_function(aten.to.dtype, (product, wide))
            copies[node] = product
            continue
        target, args, kwargs = operator(node)
        args, kwargs = torch.fx.map_arg((args, kwargs), copy)
        copies[node] = graph.call_function(target, *_numbered((args, kwargs), device))
    graph.output([copies[n] for n in run if escapes(n, inside) or n is run[-1]])
    return torch.fx.GraphModule(torch.nn.Module(), graph), inputs


def _numbered(arguments: Any, device: torch.device) -> Any:
    """Numbers for symbols, and this machine's device for that of the trace."""
    return pytree.tree_map(lambda x: device if isinstance(x, torch.device) else hint(x), arguments)


def _random(value: Any, device: torch.device) -> Any:
    """Something like a value of a trace: numbers, and zeros where they are indices."""
    if isinstance(value, (list, tuple)):
        return type(value)(_random(v, device) for v in value)
    if not isinstance(value, torch.Tensor):
        return hint(value)
    size, stride = shape_of(value), tuple(hint(n) for n in value.stride())
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    flat = torch.zeros(max(1, reach), dtype=value.dtype, device=device)
    if value.dtype.is_floating_point and value.dtype.itemsize > 1:
        flat.normal_()
    return flat.as_strided(size, stride)


def attention(node: Node, device: torch.device) -> tuple[Callable[..., Any], list[Any]] | None:
    """The device's own attention, or its derivative, for a line with the CPU's; and what to call it with. ``None`` for
    other lines.
    """
    target, args, kwargs = operator(node)
    if target is aten._scaled_dot_product_flash_attention_for_cpu.default:
        first, options = 0, args[3:5]
    elif target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        first, options = 1, args[6:8]
    else:
        return None
    dropout = options[0] if options else 0.0
    causal = options[1] if len(options) > 1 else False
    mask = kwargs.get("attn_mask")
    more: dict[str, Any] = {
        "attn_mask": None if mask is None else _random(mask.meta["val"], device), "dropout_p": dropout,
        "is_causal": causal, "scale": kwargs.get("scale"),
    }  # fmt: skip
    tensors = [_random(a.meta["val"], device) for a in args[: first + 3]]
    run = partial(torch.nn.functional.scaled_dot_product_attention, **more)
    if first == 0:
        return run, tensors
    grad, *inputs = tensors
    out = run(*(x.requires_grad_() for x in inputs))
    return lambda *_: torch.autograd.grad(out, inputs, grad, retain_graph=True), []


def _seconds(call: Callable[..., Any], inputs: list[Any]) -> float:
    """Of one call, once it has been called."""
    with torch.no_grad():
        call(*inputs)
        return _of_gpu(call, inputs) if torch.accelerator.is_available() else _of_cpu(call, inputs)


def _of_gpu(call: Callable[..., Any], inputs: list[Any]) -> float:
    """Many calls at once, so that launches hide behind kernels."""

    def timed(count: int) -> float:
        torch.accelerator.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            call(*inputs)
        torch.accelerator.synchronize()
        return (time.perf_counter() - begun) / count

    count = max(1, min(1000, int(LEAST / timed(1))))
    return min(timed(count) for _ in range(ROUNDS))


def _of_cpu(call: Callable[..., Any], inputs: list[Any]) -> float:
    """One call after the other, each behind something else that has filled the caches, as in a step; on one thread of
    the processor's time, which nobody else on the core makes longer.
    """
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    others, times = torch.zeros(CACHES // 4), list[float]()
    while len(times) < ROUNDS or (sum(times) < LEAST and len(times) < 20):
        others.add_(1)
        begun = now()
        call(*inputs)
        times.append(now() - begun)
    return max(median(times), 1e-9)
