"""Every law is broken on purpose; the checker must say which, and show where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mfsdp import ops, pipeline
from mfsdp.check import LAWS, LawError, check
from mfsdp.program import Program
from mfsdp.roles import Kind, Role
from tests.toys import toy2

MUTATIONS: dict[str, tuple[int, str, Callable[[Program], None], dict[str, object]]] = {}


def mutation(
    law: int, phase: str = "backward", **sharding: object
) -> Callable[[Callable[[Program], None]], Callable[[Program], None]]:
    def register(function: Callable[[Program], None]) -> Callable[[Program], None]:
        MUTATIONS[function.__name__] = (law, phase, function, sharding)
        return function

    return register


def one(p: Program, target: object) -> torch.fx.Node:
    return next(n for n in p.nodes if n.target is target)


def role_of(node: torch.fx.Node) -> Role:
    return node.meta["mfsdp"]


@mutation(2)
def two_gradients_in_one_place(p: Program) -> None:
    product = one(p, ops.mm)
    product.args = (product.args[0], 16, *product.args[2:])


@mutation(2)
def gradient_beyond_the_end(p: Program) -> None:
    pack = one(p, ops.pack)
    pack.args = (*pack.args[:2], [1056768], pack.args[3])


@mutation(2)
def padding_not_zeroed(p: Program) -> None:
    bucket = one(p, ops.bucket)
    bucket.args = (bucket.args[0], [], *bucket.args[2:])


@mutation(2)
def gradient_forgotten(p: Program) -> None:
    p.erase(one(p, ops.pack))


@mutation(3)
def accumulated_twice(p: Program) -> None:
    node = one(p, ops.accumulate)
    p.insert(ops.accumulate, node.args, node, role_of(node))


@mutation(4)
def accumulated_into_itself(p: Program) -> None:
    node = one(p, ops.accumulate)
    node.args = (node.args[1], *node.args[1:])


@mutation(5)
def read_after_free(p: Program) -> None:
    free = one(p, ops.free)
    one(p, ops.wait).append(free)


@mutation(5, "forward")
def free_forgotten(p: Program) -> None:
    p.erase(one(p, ops.free))


@mutation(5, "forward")
def freed_twice(p: Program) -> None:
    free = one(p, ops.free)
    p.insert(ops.free, free.args, free, role_of(free))


@mutation(6, "forward")
def parameter_saved_for_backward(p: Program) -> None:
    weight = next(n for n in p.nodes if n.name == "u0_weight")
    for free in list(p.find(Kind.FREE)):
        p.erase(free)
    p.set_results([*p.results(), weight])


@mutation(7, "forward")
def parameter_at_the_wrong_place(p: Program) -> None:
    weight = next(n for n in p.nodes if n.name == "u0_weight")
    weight.args = (*weight.args[:3], 16)


@mutation(8)
def tied_gradient_packed_twice(p: Program) -> None:
    pack = one(p, ops.pack)
    p.insert(ops.pack, pack.args, pack, role_of(pack))


@mutation(9, "forward")
def slot_taken_while_alive(p: Program) -> None:
    for full in p.find(Kind.FULL):
        full.args = (*full.args[:2], 0)


@mutation(9)
def slot_too_small(p: Program) -> None:
    p.slots["p0"] -= 1


@mutation(10, "forward", strategy=1)
def never_refreshed(p: Program) -> None:
    for node in p.find(Kind.REFRESH):
        p.erase(next(u for u in node.args[0].users if u.target is ops.wait))
        p.erase(node)


@mutation(10, "forward", strategy=2)
def read_before_it_is_refreshed(p: Program) -> None:
    refresh = p.find(Kind.REFRESH)[0]
    wait = next(u for u in refresh.args[0].users if u.target is ops.wait)
    p.move([refresh, wait], p.output)


@mutation(11, mesh_shape=(2, 4))
def outer_reduction_not_awaited(p: Program) -> None:
    reduction = one(p, ops.all_reduce)
    p.erase(next(u for u in reduction.args[0].users if u.target is ops.wait and reduction < u))


@mutation(14, mesh_shape=(2, 4), outer_strategy="optim")
def outer_reduction_forgotten(p: Program) -> None:
    add = one(p, ops.accumulate)
    add.args = (add.args[0], add.args[1].args[0], *add.args[2:])


@mutation(17, mesh_shape=(2, 4))
def divided_by_one_level_only(p: Program) -> None:
    add = one(p, ops.accumulate)
    add.args = (*add.args[:3], 1 / 4)


@mutation(11)
def wait_dropped(p: Program) -> None:
    p.erase(one(p, ops.wait))


@mutation(11, "forward")
def wait_after_first_reader(p: Program) -> None:
    one(p, torch.ops.aten.addmm.default).append(one(p, ops.wait))


@mutation(11)
def input_not_kept_alive(p: Program) -> None:
    wait = next(n for n in p.nodes if n.target is ops.wait and role_of(n).lane.value == "R")
    wait.args = (wait.args[0], [])


@mutation(11)
def input_overwritten_in_flight(p: Program) -> None:
    gfull = one(p, ops.bucket)
    p.insert(torch.ops.aten.zero_.default, (gfull,), one(p, ops.reduce_scatter).next, Role(Kind.GFULL, "u1"))


@mutation(14)
def reduction_lost(p: Program) -> None:
    p.erase(one(p, ops.accumulate))


@mutation(14)
def gradient_after_the_launch(p: Program) -> None:
    wait = next(n for n in p.nodes if n.target is ops.wait and role_of(n).lane.value == "R")
    wait.append(one(p, ops.pack))


@mutation(15)
def gradient_left_out(p: Program) -> None:
    pack, bucket = one(p, ops.pack), one(p, ops.bucket)
    shard = one(p, ops.accumulate).args[0]
    marker = (pack.args[1][0], shard, 0, bucket.args[2])  # type: ignore[index]
    p.insert(ops.param_grad, marker, pack, Role(Kind.GRAD, role_of(pack).unit))


@mutation(15)
def two_buffers(p: Program) -> None:
    bucket = one(p, ops.bucket)
    everything = (bucket.args[0], [0, 1056768], bucket.args[2])
    p.insert(ops.bucket, everything, bucket, role_of(bucket))


@mutation(17)
def scaled_twice(p: Program) -> None:
    node = one(p, ops.pack)
    node.args = (*node.args[:3], 0.125)


@mutation(17)
def not_scaled(p: Program) -> None:
    node = one(p, ops.accumulate)
    node.args = (*node.args[:3], 1.0)


@mutation(18)
def communicated_in_another_dtype(p: Program) -> None:
    node = one(p, ops.bucket)
    node.meta["val"] = node.meta["val"].to(torch.float16)


@mutation(18)
def added_up_in_another_dtype(p: Program) -> None:
    node = one(p, ops.reduce_scatter)
    node.meta["val"] = node.meta["val"].to(torch.float16)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name):
    law, phase, mutate, sharding = MUTATIONS[name]
    program = toy2(phase, **sharding)
    passes = (*pipeline.PIPELINE, (name, mutate))
    with pytest.raises(LawError) as caught:
        pipeline.run(program, passes=passes)
    text = str(caught.value)
    assert caught.value.law == law, text
    assert f"after {name}" in text and f"(law {law})" in text and "\n -> " in text


def test_every_law_has_a_mutation():
    laws = {law for law, _ in LAWS}
    broken = {law for law, *_ in MUTATIONS.values()}
    assert laws == broken
    said = f"{len(laws)} laws, {len(MUTATIONS)} mutations"
    assert said in (Path(__file__).parent.parent / "docs" / "LAWS.md").read_text(), f"docs/LAWS.md: {said}"


@pytest.mark.parametrize("phase", ["forward", "backward", "inference"])
def test_sound_programs_pass(phase):
    program = toy2(phase)
    pipeline.run(program)
    check(program)
