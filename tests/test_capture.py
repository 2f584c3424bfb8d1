"""Markers, graphs and what is saved between them."""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler.capture import return_own_meshes
from mfsdp.ir import ops
from mfsdp.ir.program import Program, base_of
from mfsdp.ir.roles import Kind
from tests.helpers.models import CASES, MLP, Case, llama
from tests.helpers.parity import whole
from tests.helpers.toys import FIRST_STAGES


def programs(case: Case) -> list[Program]:
    return list(mfsdp.trace(case.build(), (case.batch(),), world=4, units=case.units))


@cache
def traced(name: str) -> list[Program]:
    return programs(CASES[name])


def untouched(name: str) -> list[Program]:
    """A case's programs, before any pass."""
    return [p.copy() for p in traced(name)]


HUGE = ("llama", "peft")
"""Cases whose layers are those of others: attention as in "gpt", adapters as in "lora"."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.exhaustive) if n in HUGE else n for n in CASES])
def test_no_gathered_weight_is_saved(name):
    """Of one forward and one backward: nothing that forward hands to backward has the storage of a parameter, or its
    size by accident of a copy.
    """
    forward, backward = untouched(name)
    assert [forward.phase, backward.phase] == ["forward", "backward"]
    for program in (forward, backward):
        pipeline.run(program)
    for result in forward.results():
        if isinstance(result, torch.fx.Node):
            owner = base_of(result)
            assert not any(base_of(f) is owner for f in forward.find(Kind.FULL)), result
    saved = [n for n in backward.nodes if n.op == "placeholder" and "mfsdp" in n.meta]
    assert all(n.meta["val"].dim() == 1 for n in saved), "only flat shards carry roles"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt_checkpointed", "mixtral"])
def test_each_unit_is_gathered_once_per_graph(name):
    for program in untouched(name):
        pipeline.run(program)
        gathers = [n for n in program.nodes if n.target is ops.all_gather]
        assert len(gathers) == len({n.args[0] for n in gathers}) == len(program.units)


@pytest.mark.slow
def test_checkpointing_saves_no_activation_inside_of_a_block():
    plain, again = traced("gpt"), traced("gpt_checkpointed")
    saved = [sum(1 for n in p[1].nodes if n.op == "placeholder") for p in (plain, again)]
    assert saved[1] < saved[0]


def test_the_first_layer_is_not_gathered_for_the_sake_of_an_input_without_gradient():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    _, backward = mfsdp.trace(model, (torch.randn(2, 8),), world=4, units=["0", "2"])
    pipeline.run(backward)
    assert [n.name for n in backward.find(Kind.FULL)] == ["u1_full"]


def test_equal_layers_give_equal_markers():
    """Nothing process-wide, no name and no number of the layer, in a marker's arguments."""
    forward, _ = untouched("gpt")
    texts: dict[str, set[object]] = {}
    for n in forward.find(Kind.PARAM):
        texts.setdefault(n.args[0].name, set()).add((n.args[1], str(n.args[3])))
    blocks = [texts[f"{u.name}_shard"] for u in forward.units if u.fqn.startswith("blocks.")]
    assert len(blocks) == 2 and blocks[0] == blocks[1]


def test_gradients_are_packed_in_registration_order():
    _, backward = untouched("gpt")
    pipeline.run(backward)
    for node in backward.nodes:
        if node.target is ops.pack:
            assert node.args[2] == sorted(node.args[2])


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_constants_made_where_the_input_is(lowering):
    class Constants(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            empty, half = torch.tensor([], device=h.device), torch.tensor(0.5, device=h.device)
            return torch.cat([empty, h.flatten()]) * half + torch.as_tensor([1.0], device=h.device)

    programs = mfsdp.trace(Constants(8, 8), (torch.ones(2, 8),), lowering=lowering)
    assert "mul" in {n.name for n in programs.forward.nodes} and programs.backward is not None


def test_a_lowering_that_is_none():
    with pytest.raises(ValueError, match="lowering='triton': choose one of inductor, stitched, whole, eager"):
        mfsdp.trace(nn.Linear(8, 8), (torch.ones(2, 8),), lowering="triton")


def test_trace_leaves_the_model_alone():
    model = MLP()
    before = dict(model.named_parameters())
    mfsdp.trace(model, (CASES["mlp"].batch(),), units=["up", "down"])
    assert type(model) is MLP and type(model.up) is nn.Linear
    assert all(p is before[n] for n, p in model.named_parameters())


def test_your_own_pass():
    """A pass is a function on a program; it runs where the table says, checked like ours."""
    seen = []

    def look(p: Program) -> None:
        seen.extend(n.name for n in p.find(Kind.FULL))
        p.note("only looked")

    forward, _ = untouched("gpt")
    stages = pipeline.run(forward, passes=(*pipeline.PIPELINE, ("look", look)))
    assert seen == ["u0_full", "u1_full", "u2_full"]
    assert "; change none  only looked" in stages[-1].listing
    with pytest.raises(ValueError, match=f"'prefetsch' is no pass; the passes are {FIRST_STAGES}"):
        pipeline.run(forward, upto="prefetsch")


def test_a_result_has_a_mesh_of_forwards_inputs():
    """DTensor's caches may bring an equal mesh into the joint graph as a tangent's only."""
    with mfsdp.fake_ranks(4):
        mine, equal = (DeviceMesh("cpu", [0, 1, 2, 3]) for _ in range(2))
        other = DeviceMesh("cpu", [[0, 1], [2, 3]])
        graph = fx.Graph()
        nodes = [
            graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1", "tangents_2", "tangents_3")
        ]
        for node, mesh in zip(nodes[1:], (mine, None, equal, other), strict=True):
            node.meta["val"] = SimpleNamespace(real_obj=mesh)
        graph.output((nodes[0], nodes[3], nodes[4], None, nodes[3]))
        gm = fx.GraphModule({}, graph)
        return_own_meshes(gm, 3)
        assert gm.graph.output_node().args[0] == (nodes[0], nodes[1], nodes[4], None, nodes[3])


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_models_that_are_checkpointed_are_one_graph(reentrant: bool, late: bool):
    """transformers asks for gradients of embeddings by a hook, which only uncompiled reentrant checkpoints need."""
    torch.manual_seed(0)
    reference = llama().requires_grad_(False)
    for layer in reference.model.layers:
        layer.mlp.down_proj.requires_grad_(True)
    model = copy.deepcopy(reference)
    for each in (reference, model):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    reference.enable_input_require_grads()
    if not late:
        model.enable_input_require_grads()
    mfsdp.fully_shard(model, units=["LlamaDecoderLayer"])
    if late:
        model.enable_input_require_grads()
    ids = torch.randint(67, (2, 6))
    compiled = torch.compile(model, backend="mfsdp", fullgraph=True, options={"lowering": "eager"})
    for call in (reference, compiled, model):
        call(ids, labels=ids).loss.backward()
        if call is not reference:
            for p, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert (p.grad is None) == (theirs.grad is None)
                if p.grad is not None:
                    torch.testing.assert_close(whole(p.grad), theirs.grad)
            model.zero_grad()
    assert len(reference._require_grads_hooks) == len(model._require_grads_hooks) == 1
    before = len(model.get_input_embeddings()._forward_hooks)
    model.disable_input_require_grads()
    assert len(model.get_input_embeddings()._forward_hooks) == before - 1


@pytest.mark.slow
def test_hooks_of_others_with_such_a_name_run():
    def make_inputs_require_grads(module, args, output):
        return 2 * output

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(make_inputs_require_grads)
    x = torch.randn(2, 4)
    want = model(x).detach()
    mfsdp.fully_shard(model)
    torch.testing.assert_close(torch.compile(model, backend="mfsdp", options={"lowering": "eager"})(x), want)
    model[0].register_forward_hook(make_inputs_require_grads)
    torch.testing.assert_close(torch.compile(model, backend="mfsdp", options={"lowering": "eager"})(x), 2 * want)
