"""Generated code is compared with the listing: collectives that change places are an error, moved waits a warning."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import lowering, schedule_check
from mfsdp.compiler.schedule_check import Operation, compare, listed, written
from mfsdp.ir.verifier import InvariantError
from tests.helpers.toys import toy2


def code_of(phase: str) -> tuple[list[Operation], list[str]]:
    """A listing's operations, and lines that do the same as Inductor writes them."""
    program = toy2(phase)
    pipeline.run(program)
    expected = listed(program)
    lines = ["def call(self, args):"]
    inputs = [o[1] for e in expected for o in e.operands if o is not None and o[0] == "in"]
    lines.append(f"    {', '.join(dict.fromkeys(['x', *inputs]))} = args")
    for i, e in enumerate(expected):
        args = []
        for operand in e.operands:
            kind, value = operand if operand is not None else ("in", f"tmp{i}")
            args.append({"op": f"buf{value}", "in": f"{value}", "is": repr(value)}[kind])
        lines.append(f"    buf{i}_ = torch.ops.mfsdp.{e.verb}.default({', '.join(args)})")
        lines.append(f"    buf{i} = buf{i}_; del buf{i}_")
    return expected, lines


@pytest.fixture
def told(monkeypatch) -> list[str]:
    out: list[str] = []
    monkeypatch.setattr(schedule_check.log, "warning", lambda text, *words: out.append(text % words))
    return out


def at(lines: list[str], verb: str, number: int = 0) -> int:
    return [i for i, line in enumerate(lines) if f"mfsdp.{verb}." in line][number]


@pytest.mark.parametrize("phase", ["forward", "backward", "inference"])
def test_the_same_is_the_same(told, phase):
    expected, lines = code_of(phase)
    assert len(expected) > 3 and [o.verb for o in written("\n".join(lines))] == [e.verb for e in expected]
    compare(expected, "\n".join(lines))
    assert not told


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter"])
def test_collectives_that_change_places_are_an_error(verb):
    expected, lines = code_of("forward" if verb == "all_gather" else "backward")
    a, b = at(lines, verb, 0), at(lines, verb, 1)
    lines[a : a + 2], lines[b : b + 2] = lines[b : b + 2], lines[a : a + 2]
    with pytest.raises(InvariantError, match=rf"`{verb} .*` in the listing.*invariant 16"):
        compare(expected, "\n".join(lines))


def test_collectives_of_two_groups_that_change_places_are_a_warning(told):
    expected, lines = code_of("backward")
    a, b = at(lines, "all_gather", -1), at(lines, "reduce_scatter", 0)
    first, second = sorted((a, b))
    moved = lines[second : second + 2]
    del lines[second : second + 2]
    lines[first:first] = moved
    compare(expected, "\n".join(lines))
    assert "the compiler has moved an operation" in told[0]


def test_a_collective_that_is_gone_is_an_error():
    expected, lines = code_of("forward")
    del lines[at(lines, "all_gather", 1)]
    with pytest.raises(InvariantError, match="there are 2 collectives in the listing, and 1 in the code"):
        compare(expected, "\n".join(lines))


def test_a_wait_that_has_moved_is_a_warning(told):
    expected, lines = code_of("backward")
    last = at(lines, "wait", -1)
    moved = lines[last : last + 2]
    del lines[last : last + 2]
    lines[at(lines, "accumulate", -1) + 2 :] += moved
    compare(expected, "\n".join(lines))
    assert "the compiler has moved an operation: where the listing has `wait u" in told[0]


def test_an_operand_that_is_another_is_an_error():
    expected, lines = code_of("backward")
    wait = at(lines, "wait", 1)
    lines[wait] = lines[wait].replace("default(buf5", "default(buf0")
    with pytest.raises(InvariantError, match="`wait u1_gshard` of the listing is not in the code"):
        compare(expected, "\n".join(lines))


@pytest.mark.parametrize("verb", ["wait", "accumulate", "pack"])
def test_an_operation_that_is_gone_is_an_error(verb):
    expected, lines = code_of("backward")
    del lines[at(lines, verb, -1)]
    with pytest.raises(InvariantError, match=rf"`{verb} .*` of the listing is not in the code"):
        compare(expected, "\n".join(lines))


def test_code_that_is_not_in_python_is_not_compared(monkeypatch):
    expected, _ = code_of("backward")
    said: list[str] = []
    monkeypatch.setattr(schedule_check.log, "info", said.append)
    compare(expected, "cpp_wrapper_src = 'void call();'")
    assert "was not compared" in said[0]


def test_inductors_own_overlap_is_off(monkeypatch):
    """Whatever is on by default, or was turned on: our graphs have a schedule. From 2.14 on one of them is on."""
    from torch._dynamo.backends.debugging import boxed_nop

    options, seen = inductor_config.aten_distributed_optimizations, []
    names = [n for n in ("enable_simple_overlap", "enable_overlap_scheduling") if hasattr(options, n)]

    def compile(graph: Any, example: Any, **kwargs: Any) -> Any:
        seen.append([getattr(options, n) for n in names] + [inductor_config.reorder_for_peak_memory])
        return boxed_nop(graph, list(example))

    monkeypatch.setitem(lowering.LOWERINGS, "whole", partial(lowering.inductor, compile=compile))
    torch._dynamo.reset()
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    with inductor_config.patch({f"aten_distributed_optimizations.{n}": True for n in names}):
        run = torch.compile(model, backend="mfsdp", options={"lowering": "whole", "check": False})
        run(torch.ones(2, 4)).sum().backward()
    assert names and seen == [[False] * (len(names) + 1)] * 2, "forward and backward"
