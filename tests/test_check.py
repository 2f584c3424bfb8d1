"""Every invariant is broken on purpose; the checker must say which, and show where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mfsdp
from mfsdp import MixedPrecisionPolicy, pipeline
from mfsdp.ir import ops
from mfsdp.ir.program import Program
from mfsdp.ir.roles import Kind, Lane, Role
from mfsdp.ir.verifier import INVARIANTS, InvariantError, check
from tests.helpers.fp8 import Coded
from tests.helpers.toys import toy2

MUTATIONS: dict[str, tuple[int, str, Callable[[Program], None], dict[str, object]]] = {}


def mutation(
    invariant: int, phase: str = "backward", **sharding: object
) -> Callable[[Callable[[Program], None]], Callable[[Program], None]]:
    def register(function: Callable[[Program], None]) -> Callable[[Program], None]:
        MUTATIONS[function.__name__] = (invariant, phase, function, sharding)
        return function

    return register


def one(p: Program, target: object) -> torch.fx.Node:
    return next(n for n in p.nodes if n.target is target)


def role_of_any(node: torch.fx.Node) -> Role | None:
    return node.meta.get("mfsdp")


def role_of(node: torch.fx.Node) -> Role:
    return node.meta["mfsdp"]


def quantised(p: Program) -> torch.fx.Node:
    """What a unit's shard is made of, in one byte per element."""
    return next(n for n in p.nodes if n.target is ops.all_gather).args[0]  # type: ignore[return-value]


@mutation(72)
def tangent_added_late(p: Program) -> None:
    read = next(n for n in p.nodes if n.target is torch.ops.aten.mm.default and n.users)
    tangent = next(n for n in p.nodes if n.name.startswith("tangents"))
    with p.graph.inserting_before(p.output):
        p.graph.call_function(ops.add_tangent, (read, tangent)).meta["val"] = None


@mutation(46, "forward", fp8=True)
def codes_that_mix_rows(p: Program) -> None:
    code = quantised(p)
    with p.graph.inserting_before(code):
        mixed = p.graph.call_function(torch.ops.aten.flip.default, (code.args[0], [0]))
    mixed.meta["val"] = code.args[0].meta["val"]  # type: ignore[union-attr]
    mixed.meta["mfsdp"] = role_of(code)
    code.args = (mixed, *code.args[1:])


@mutation(46, "forward", fp8=True)
def a_scale_of_what_only_this_rank_has(p: Program) -> None:
    given = next(n for n in p.nodes if n.op == "placeholder" and role_of_any(n) is None)
    spread = one(p, ops.spread)
    with p.graph.inserting_before(spread):
        own = p.graph.call_function(torch.ops.aten.amax.default, (given,))
    own.meta["val"] = given.meta["val"].new_empty(())
    spread.args = (spread.args[0], [own] * 2, *spread.args[2:])


@mutation(46, "forward", fp8=True)
def a_scale_of_this_ranks_rows(p: Program) -> None:
    spread = one(p, ops.spread)
    shard = spread.args[0]
    with p.graph.inserting_before(spread):
        own = p.graph.call_function(torch.ops.aten.amax.default, (shard,))
    own.meta["val"] = shard.meta["val"].new_empty(())  # type: ignore[union-attr]
    spread.args = (shard, [own] * 2, *spread.args[2:])


@mutation(18, "forward", fp8=True)
def codes_that_are_read_as_others(p: Program) -> None:
    full = one(p, ops.all_gather)
    full.meta["val"] = full.meta["val"].to(torch.float8_e5m2)


@mutation(47, "forward")
def a_copy_of_a_parameter_that_is_saved(p: Program) -> None:
    param = p.find(Kind.PARAM)[0]
    with p.graph.inserting_after(param):
        copy = p.graph.call_function(torch.ops.aten.clone.default, (param,))
    copy.meta["val"] = param.meta["val"]
    p.set_results([*p.results(), copy])


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


@mutation(4)
def a_sum_that_is_read_when_it_was_accumulated(p: Program) -> None:
    node = one(p, ops.accumulate)
    with p.graph.inserting_after(node):
        p.graph.call_function(torch.ops.aten.zero_.default, (node.args[1],))


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
def waited_for_twice(p: Program) -> None:
    wait = one(p, ops.wait)
    p.insert(ops.wait, wait.args, wait.next, role_of(wait))


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


AWAY = {"away": ("layers.1",)}
"""What forward saves of the first ReLU goes to the host."""


@mutation(11, "forward", **AWAY)
def value_gone_before_it_has_been_copied(p: Program) -> None:
    wait = next(n for n in p.nodes if n.target is ops.wait and role_of(n).lane is Lane.HOST)
    wait.args = (wait.args[0], [])


@mutation(11, "forward", **AWAY)
def value_overwritten_while_it_is_copied(p: Program) -> None:
    copy = one(p, ops.offload)
    p.insert(torch.ops.aten.zero_.default, (copy.args[0],), copy.next, Role(Kind.GFULL, "u1"))


@mutation(11, "forward", **AWAY)
def copy_to_the_host_not_awaited(p: Program) -> None:
    p.erase(next(n for n in p.nodes if n.target is ops.wait and role_of(n).lane is Lane.HOST))


@mutation(11, **AWAY)
def read_before_it_is_back(p: Program) -> None:
    wait = next(n for n in p.nodes if n.target is ops.wait and role_of(n).lane is Lane.HOST)
    p.move([wait], p.output)


@mutation(53, "forward", **AWAY)
def to_the_host_twice(p: Program) -> None:
    copy = one(p, ops.offload)
    again = p.insert(ops.offload, copy.args, copy.next, role_of(copy))
    p.insert(ops.wait, (again, [copy.args[0]]), p.output, Role(Kind.WAIT, "host", Lane.HOST))
    p.set_results([*p.results(), again])


@mutation(53, "forward", **AWAY)
def on_the_host_and_on_the_device(p: Program) -> None:
    value = one(p, ops.offload).args[0]
    with p.graph.inserting_after(value):
        part = p.graph.call_function(torch.ops.aten.t.default, (value,))
    part.meta["val"] = value.meta["val"].t()
    p.set_results([*p.results(), part])


@mutation(53, "forward", **AWAY)
def a_part_of_a_storage_to_the_host(p: Program) -> None:
    copy = one(p, ops.offload)
    with p.graph.inserting_before(copy):
        part = p.graph.call_function(torch.ops.aten.select.int, (copy.args[0], 0, 0))
    part.meta["val"] = copy.args[0].meta["val"][0]  # type: ignore[union-attr]
    wait = next(u for u in copy.users if u.target is ops.wait)
    p.rewrite(copy, ops.offload, (part,))
    wait.args = (copy, [part])


@mutation(53, "forward", **AWAY)
def an_argument_to_the_host(p: Program) -> None:
    copy, given = one(p, ops.offload), next(n for n in p.nodes if n.op == "placeholder" and role_of_any(n) is None)
    wait = next(u for u in copy.users if u.target is ops.wait)
    p.rewrite(copy, ops.offload, (given,))
    wait.args = (copy, [given])


@mutation(53, "forward", **AWAY)
def a_copy_that_nobody_gets(p: Program) -> None:
    copy = one(p, ops.offload)
    p.set_results([r for r in p.results() if r is not copy])


@mutation(53, **AWAY)
def fetched_twice(p: Program) -> None:
    back = one(p, ops.reload)
    again = p.insert(ops.reload, back.args, back.next, role_of(back))
    p.insert(ops.wait, (again, [back.args[0]]), p.output, Role(Kind.WAIT, "host", Lane.HOST))


@mutation(53, **AWAY)
def read_on_the_host(p: Program) -> None:
    back = one(p, ops.reload)
    reader = next(u for u in back.users if u.target is not ops.wait)
    reader.replace_input_with(back, back.args[0])


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


def chain(p: Program, unit: str) -> list[torch.fx.Node]:
    """What brings a unit's gradients to its accumulator."""
    brings = (ops.bucket, ops.pack, ops.mm, ops.hold, ops.reduce_scatter, ops.all_reduce, ops.wait, ops.accumulate)
    lanes = ("C", "R", "O")
    mine = [n for n in p.nodes if n.target in brings and role_of(n).unit == unit]
    return [n for n in mine if n.target is not ops.wait or role_of(n).lane.value in lanes[1:]]


@mutation(15)
def unit_forgotten(p: Program) -> None:
    for node in reversed(chain(p, "u0")):
        p.erase(node)


@mutation(15, mesh_shape=(2, 4), outer_strategy="optim")
def unit_forgotten_on_two_levels(p: Program) -> None:
    for node in reversed(chain(p, "u1")):
        p.erase(node)


@mutation(15)
def one_gradient_forgotten(p: Program) -> None:
    pack = one(p, ops.pack)
    bucket, (offset,) = pack.args[0], pack.args[2]  # type: ignore[misc]
    hole = [offset, offset + pack.args[1][0].meta["val"].numel()]  # type: ignore[index, operator]
    bucket.args = (bucket.args[0], [*bucket.args[1], *hole], *bucket.args[2:])  # type: ignore[union-attr, misc]
    p.erase(pack)


@mutation(15)
def accumulated_without_a_name(p: Program) -> None:
    add = one(p, ops.accumulate)
    add.args = (*add.args[:2], add.args[2][1:], add.args[3])


@mutation(15, mesh_shape=(2, 4))
def held_without_a_name(p: Program) -> None:
    hold = one(p, ops.hold)
    hold.args = (*hold.args[:2], hold.args[2][:1])


@mutation(14, mesh_shape=(2, 4))
def replicas_apart(p: Program) -> None:
    reduction = one(p, ops.all_reduce)
    p.erase(next(u for u in reduction.args[0].users if u.target is ops.wait and reduction < u))
    p.erase(reduction)


@mutation(14, mesh_shape=(2, 4), outer_strategy="optim")
def one_axis_twice(p: Program) -> None:
    outer = next(n for n in p.nodes if n.target is ops.reduce_scatter and n.args[2] >= 2)
    outer.args = (*outer.args[:2], 0)
    outer.meta["val"] = outer.meta["val"].new_empty(outer.args[0].meta["val"].numel())


@mutation(14)
def never_scattered(p: Program) -> None:
    add = one(p, ops.accumulate)
    scattered = add.args[1]
    add.args = (add.args[0], scattered.args[0], *add.args[2:])
    p.erase(next(u for u in scattered.users if u.target is ops.wait))
    p.erase(scattered)


@mutation(14)
def added_to_another_unit(p: Program) -> None:
    first, second = (n for n in p.nodes if n.target is ops.accumulate)
    first.args = (second.args[0], *first.args[1:])


@mutation(14)
def gradients_of_another_unit(p: Program) -> None:
    first, second = (n for n in p.nodes if n.target is ops.accumulate)
    second.args = (second.args[0], first.args[1], *second.args[2:])


@mutation(7, "forward")
def another_unit_gathered(p: Program) -> None:
    first, second = (n for n in p.nodes if n.target is ops.all_gather)
    wait = next(u for u in second.users if u.target is ops.wait)
    wait.args = (second, [first.args[0]])
    second.args = (first.args[0], *second.args[1:])


@mutation(7, "forward")
def parameter_of_another_unit(p: Program) -> None:
    first, second = (n for n in p.nodes if n.name in ("u0_bias", "u1_bias"))
    p.move([n for n in p.find(Kind.FREE) if n.args[0] is first.args[0]], p.output)
    second.args = (first.args[0], *second.args[1:])


@mutation(7, "forward")
def not_gathered(p: Program) -> None:
    full = next(n for n in p.nodes if n.target is ops.all_gather)
    for user in list(full.users):
        if user.target in (ops.wait, ops.free):
            p.erase(user)
    full.replace_all_uses_with(full.args[0])
    p.erase(full)


@mutation(18, "forward", mp_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32))
def gathered_in_another_dtype(p: Program) -> None:
    gather = next(n for n in p.nodes if n.target is ops.all_gather)
    gather.meta["val"] = gather.meta["val"].to(torch.float32)
    p.slots.update({name: 2 * n for name, n in p.slots.items()})


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


def fp8(phase: str) -> Program:
    """Two layers whose weights are quantised, on four ranks."""
    with torch.device("meta"):
        model = torch.nn.Sequential(Coded(64, 64), Coded(64, 64)).bfloat16()
        programs = mfsdp.trace(model, (torch.empty(8, 64, dtype=torch.bfloat16),), world=4)
    return next(p for p in programs if p.phase == phase)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name):
    invariant, phase, mutate, sharding = MUTATIONS[name]
    program = fp8(phase) if sharding.get("fp8") else toy2(phase, **sharding)
    passes = (*pipeline.PIPELINE, (name, mutate))
    with pytest.raises(InvariantError) as caught:
        pipeline.run(program, passes=passes)
    text = str(caught.value)
    assert caught.value.invariant == invariant, text
    assert f"after {name}" in text and f"(invariant {invariant})" in text and "\n -> " in text


@pytest.mark.parametrize("at", [0, 3])
def test_a_gradient_that_is_lost_before_it_is_reduced(at):
    def forget(p: Program) -> None:
        p.set_results([None if isinstance(r, torch.fx.Node) and r.target is not ops.param else r for r in p.results()])
        for node in reversed(p.find(Kind.GRAD)):
            for user in [u for u in node.users if u.target is torch.ops.aten.add.Tensor]:
                p.erase(user)
            p.erase(node)

    passes = (*pipeline.PIPELINE[:at], ("forget", forget), *pipeline.PIPELINE[at:])
    with pytest.raises(InvariantError, match=r"after forget: u\d: the gradient of \w+ is lost \(invariant 15\)"):
        pipeline.run(toy2("backward"), passes=passes)


def plain(kind: str) -> str:
    """A model that was never sharded, and a pass that hands autograd what only this rank has."""

    def forget(p: Program) -> None:
        if p.phase != "backward":
            return
        (reduction,) = (n for n in p.nodes if n.target is ops.all_reduce)
        (wait,) = (n for n in p.nodes if n.target is ops.wait)
        p.erase(wait)
        p.erase(reduction)
        if kind == "local":
            (pack,) = (n for n in p.nodes if n.target is ops.pack)
            local = dict(zip(pack.args[2], pack.args[1], strict=True))  # type: ignore[arg-type]
            places = {i: local[offset] for i, (_, offset) in p.gradients.items()}
            views = [r for i, r in enumerate(p.results()) if i in places]
            p.set_results([places.get(i, r) for i, r in enumerate(p.results())])
            for node in (*views, pack, pack.args[0]):
                p.erase(node)
        if kind == "none":
            p.set_results([None if i in p.gradients else r for i, r in enumerate(p.results())])

    table = pipeline._table
    pipeline._table = lambda *args: (*table(*args), ("forget", forget))
    try:
        model = torch.compile(torch.nn.Linear(3, 3), backend="mfsdp", options={"lowering": "eager"})
        model(torch.ones(1, 3)).sum().backward()
        return "nothing was raised"
    except Exception as error:
        return str(error)
    finally:
        pipeline._table = table


@pytest.mark.dist
@pytest.mark.parametrize(
    "kind, invariant",
    [("all_reduce", "(invariant 14)"), ("local", "(invariant 14)"), ("none", "is lost (invariant 15)")],
)
def test_gradients_of_parameters_that_are_not_sharded(two_ranks, kind, invariant):
    assert all("after forget: " in text and invariant in text for text in two_ranks.run(plain, kind))


def test_every_invariant_has_a_mutation():
    invariants = {invariant for invariant, _ in INVARIANTS}
    broken = {invariant for invariant, *_ in MUTATIONS.values()}
    assert invariants == broken
    said = f"{len(invariants)} invariants, {len(MUTATIONS)} mutations"
    page = Path(__file__).parent.parent / "docs" / "internals" / "invariants.md"
    assert said in page.read_text(), f"{page}: {said}"


def test_what_runs_before_its_input_is_named():
    def early(p: Program) -> None:
        p.move([p.results()[0]], p.start())

    with pytest.raises(pipeline.PassError, match=r"after early: \w+ runs before its input \w+: move both\n[^$]* -> "):
        pipeline.run(toy2("forward"), passes=(*pipeline.PIPELINE, ("early", early)))


@pytest.mark.parametrize("phase", ["forward", "backward", "inference"])
def test_sound_programs_pass(phase):
    program = toy2(phase)
    pipeline.run(program)
    check(program)
