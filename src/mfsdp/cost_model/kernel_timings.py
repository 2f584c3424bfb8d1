"""Measures kernels on the target machine, by operator, shapes and dtypes, to replace estimates of the cost model.

`measure` runs each distinct kernel of the given programs alone on random numbers: matrix products, attention and other
calls one by one, and lines that Inductor fuses compiled together. Operations that sharding adds (buckets, packs,
accumulators, waits) are still estimated from bytes. A file stores the times with the hardware's name; other programs
and models add their new kernels. Programs are traced for a CPU; on a GPU, its own attention replaces the CPU's.
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
from ..ir.program import Program, mutates, operator, operator_name
from ..ir.symbolic_sizes import hint, shape_of
from . import fusion

aten = torch.ops.aten

LEAST = 0.02
"""Seconds for which each kernel is repeated."""

ROUNDS = 3
"""Minimum number of measurements. The result is the fastest one on a GPU, the median on the CPU."""

CACHES = 2**24
"""Bytes written between two calls on the CPU, to evict caches. With none, the benchmark's models were predicted 19 to
31% too fast; with four times as many, the largest one 14% too slow."""


@dataclass
class Kernels:
    """Measured seconds of kernels. ``explain(kernels=...)`` takes this object or its file's path."""

    hardware: str
    """Hardware and torch version of the measurements (`here`)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by `key`."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file that `load` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Kernels:
        """Reads a file written by `save`.

        Raises:
            ValueError: the file has another format.
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
        """Returns the seconds of a program's measured kernels by line name, for `mfsdp.cost_model.op_cost.op_times`. A
        kernel's time is split over its lines in proportion to their output bytes.
        """
        out: dict[str, float] = {}
        for run in fusion.together(program, fused):
            seconds = self.seconds.get(key(run))
            if seconds is not None:
                weights = [1 + nbytes(node.meta.get("val")) for node in run]
                out |= {n.name: seconds * w / sum(weights) for n, w in zip(run, weights, strict=True)}
        return out


def key(run: Sequence[Node]) -> str:
    """Returns a kernel's description: its operators with dtypes, shapes and strides of their inputs. Kernels with equal
    keys take the same time.
    """
    at = {node: i for i, node in enumerate(run)}

    def word(value: object) -> str:
        if isinstance(value, Node):
            return f"%{at[value]}" if value in at else _shown(value.meta.get("val"))
        if isinstance(value, (list, tuple)):
            return f"[{' '.join(map(word, value))}]"
        return str(hint(value))

    def line(node: Node) -> str:
        if node.target is ops.mm:  # its place in the bucket does not matter
            into = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
            return f"{aten.mm.default}({', '.join(map(word, node.args[4:6]))}) -> {into}"
        target, args, kwargs = operator(node)
        named = [f"{name}={word(value)}" for name, value in kwargs.items()]
        return f"{target}({', '.join([*map(word, args), *named])})"

    return "; ".join(map(line, run))


def _shown(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return str(hint(value)) if not isinstance(value, (list, tuple)) else f"[{' '.join(map(_shown, value))}]"
    short = SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
    strides = "" if value.is_contiguous() else f"/{_numbers(value.stride())}"
    return f"{short}[{_numbers(shape_of(value))}]{strides}"


def _numbers(values: Iterable[object]) -> str:
    return ",".join(str(hint(n)) for n in values)


def measure(
    programs: Iterable[Program], *, fused: bool = True, known: Kernels | None = None, compiled: bool = True
) -> Kernels:
    """Times each distinct kernel of programs on the CPU or GPU of this process.

    Args:
        programs: after all passes, from `mfsdp.trace` and `mfsdp.pipeline.run`.
        fused: whether neighbouring kernels fuse (Inductor) or not (ATen).
        known: earlier measurements. The result is a copy with the new kernels added.
        compiled: whether to compile and time fused kernels, which takes seconds for each. Otherwise they are estimated
            from bytes.

    Raises:
        ValueError: ``known`` was measured on other hardware.
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
    """Returns a description of the hardware, the CPU's thread count and the torch version."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif (info := Path("/proc/cpuinfo")).exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = f"{models[0] if models else name}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__.partition('+')[0]}"


def _runs(run: Sequence[Node]) -> bool:
    """Returns whether a kernel can run alone: only ATen and prims operators without mutation, and products that write
    into buckets.
    """
    return all(n.target is ops.mm or (_from_torch(n) and not mutates(n)) for n in run)


def _from_torch(node: Node) -> bool:
    return operator_name(operator(node)[0]).partition("::")[0] in ("aten", "prims")


def _alone(run: Sequence[Node], device: torch.device) -> tuple[Callable[..., object], list[object]]:
    """Returns a kernel as a graph module, and random inputs for it."""
    graph, inside = torch.fx.Graph(), set(run)
    inputs: list[object] = []
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
    """Replaces symbols by their hints and the trace's device by this machine's."""
    return pytree.tree_map(lambda x: device if isinstance(x, torch.device) else hint(x), arguments)


def _random(value: Any, device: torch.device) -> Any:
    """Returns a value like a traced one: random floats, zeros for other dtypes, which may be indices."""
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


def attention(node: Node, device: torch.device) -> tuple[Callable[..., object], list[object]] | None:
    """Returns the device's own attention or its backward, and inputs, for a line with the CPU's attention. ``None`` for
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


def _seconds(call: Callable[..., object], inputs: list[object]) -> float:
    """Returns the seconds of one call after a warm-up call."""
    with torch.no_grad():
        call(*inputs)
        return _of_gpu(call, inputs) if torch.accelerator.is_available() else _of_cpu(call, inputs)


def _of_gpu(call: Callable[..., object], inputs: list[object]) -> float:
    """Times many calls together, so that launch overhead is hidden."""

    def timed(count: int) -> float:
        torch.accelerator.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            call(*inputs)
        torch.accelerator.synchronize()
        return (time.perf_counter() - begun) / count

    count = max(1, min(1000, int(LEAST / timed(1))))
    return min(timed(count) for _ in range(ROUNDS))


def _of_cpu(call: Callable[..., object], inputs: list[object]) -> float:
    """Times calls one by one. Before each, another operation fills the caches, as in a step. With one thread it
    measures CPU time, which other processes on the core do not lengthen.
    """
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    others, times = torch.zeros(CACHES // 4), list[float]()
    while len(times) < ROUNDS or (sum(times) < LEAST and len(times) < 20):
        others.add_(1)
        begun = now()
        call(*inputs)
        times.append(now() - begun)
    return max(median(times), 1e-9)
