"""Freezing, gradient hooks, norms, loss scaling and parametrizations of sharded parameters."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from tests.helpers.models import CASES, GPT, Block, Experts, MoE
from tests.helpers.parity import averaged, batches, build, clip_and_step, compiled, error, farthest, whole
from tests.helpers.strategies import sharding

STRATEGIES = [0, 1, 2, 3]


def thawed(strategy: int, lowering: str) -> tuple[float, list[list[str]]]:
    """Parameters freeze and thaw between steps, one of a unit and whole units; which have gradients at each step."""
    case = CASES["lora"]
    reference, model = build(case, strategy=strategy)
    run = compiled(model, lowering)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    theirs = dict(reference.named_parameters())
    changes: list[dict[str, bool]] = [
        {},
        {"layers.0.a": False},
        {"layers.0.base.weight": True},
        {"layers.0.a": True, "layers.2.a": False, "layers.2.b": False},
        {"layers.0.base.weight": False, "layers.2.a": True},
    ]
    seen = []
    for step, change in enumerate(changes):
        for name, p in model.named_parameters():
            if name in change:
                p.requires_grad = change[name]
                theirs[name].requires_grad_(change[name])
        x = batches(case, step)[dist.get_rank()]
        for m in (run, reference):
            case.loss(m, x).backward()
        mine = {n for n, p in model.named_parameters() if p.grad is not None}
        assert mine == {n for n, p in theirs.items() if p.grad is not None}, step
        assert all(p.requires_grad == theirs[n].requires_grad for n, p in model.named_parameters())
        seen.append(sorted(mine))
        clip_and_step(model, reference, optimizers, 1e-5)
    return farthest(model, reference), seen


@pytest.mark.dist
@pytest.mark.parametrize(("strategy", "lowering"), [*((strategy, "none") for strategy in STRATEGIES), (3, "eager")])
def test_freezing_and_thawing_between_steps(two_ranks, strategy, lowering):
    for worst, seen in two_ranks.run(thawed, strategy, lowering, timeout=300):
        assert worst < 1e-5
        assert [len(s) for s in seen] == [4, 3, 4, 3, 3]


def hooked(strategy: int, lowering: str) -> tuple[float, list[int], list[str], float]:
    """Hooks see what has been reduced, and may change it; post hooks run once per step, whatever the microbatches."""
    case = CASES["twice"]
    reference, model = build(case, strategy=strategy)
    run = compiled(model, lowering)
    calls: list[str] = []
    counts, worst = [], 0.0
    handles = []
    for name, p in model.named_parameters():
        if name.endswith("weight"):
            handles.append(p.register_hook(lambda g, n=name: (calls.append(f"grad {n}"), g * 2)[1]))
        handles.append(p.register_post_accumulate_grad_hook(lambda p, n=name: calls.append(f"post {n} {p.grad.shape}")))
    for step in range(2):
        for m in range(3):
            x = batches(case, 10 * step + m)[dist.get_rank()]
            with mfsdp.no_sync(model) if m < 2 else nullcontext():
                case.loss(run, x).backward()
            case.loss(reference, x).backward()
            counts.append(len(calls))
        averaged(reference)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            q.grad.mul_(2 if name.endswith("weight") else 1)
            worst = max(worst, error(p.grad.full_tensor(), q.grad))
        model.zero_grad()
        reference.zero_grad()
    for handle in handles:
        handle.remove()
    case.loss(run, x).backward()
    case.loss(reference, x).backward()
    averaged(reference)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return worst, counts, calls, max(error(p.grad.full_tensor(), q.grad) for p, q in pairs)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("strategy", "lowering"), [*((strategy, "none") for strategy in STRATEGIES), (1, "eager"), (3, "eager")]
)
def test_hooks_run_on_the_reduced_gradient(two_ranks, strategy, lowering):
    for worst, counts, calls, removed in two_ranks.run(hooked, strategy, lowering):
        assert counts == ([0, 0, 6, 6, 6, 12] if strategy < 2 else [2, 4, 10, 12, 14, 20])
        assert worst < 1e-5 and removed < 1e-5
        assert set(calls) == {
            "grad last.weight", "grad shared.weight", "post last.bias torch.Size([5])",
            "post last.weight torch.Size([5, 18])", "post shared.bias torch.Size([18])",
            "post shared.weight torch.Size([18, 18])",
        }  # fmt: skip


def stepped_in_backward(lowering: str, broken: bool) -> float:
    """An optimizer for each parameter, stepped as soon as its gradient is there; also through a graph break."""
    case = CASES["gpt"]
    torch.manual_seed(0)
    reference = GPT(layers=1, break_graph=broken)
    model = mfsdp.fully_shard(GPT(layers=1, break_graph=broken), units=[Block])
    model.load_state_dict(reference.state_dict())
    run = compiled(model, lowering)
    own = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def step(p: Any) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(step)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for s in range(3):
        x = batches(case, s)[dist.get_rank()]
        case.loss(run, x).backward()
        case.loss(reference, x).backward()
        averaged(reference)
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    return farthest(model, reference)


@pytest.mark.dist
@pytest.mark.parametrize(("lowering", "broken"), [("eager", True), ("none", False)])
def test_an_optimizer_steps_inside_of_backward(two_ranks, lowering, broken):
    assert max(two_ranks.run(stepped_in_backward, lowering, broken)) < 1e-4


def test_an_optimizer_steps_inside_of_backward_of_one_process():
    """Programs read the main weights themselves: none may after they have been stepped."""
    torch.manual_seed(0)
    reference = CASES["mlp"].build()
    model = mfsdp.fully_shard(CASES["mlp"].build(), units=["up", "down"])
    model.load_state_dict(reference.state_dict())
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: p.detach().sub_(p.grad))
    x = torch.randn(4, 24)
    compiled(model, "eager")(x).square().mean().backward()
    reference(x).square().mean().backward()
    with torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(p.full_tensor(), q - q.grad, atol=1e-6)


def test_hooks_that_cannot_work_are_refused():
    model = mfsdp.fully_shard(CASES["mlp"].build())
    model.scale.requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        model.scale.register_hook(lambda g: g)
    model.up.weight.register_hook(lambda g: g.full_tensor()[0])
    with pytest.raises(RuntimeError, match=r"gradient hook of up.weight in unit '\(root\)' returned"):
        model(torch.randn(2, 24)).sum().backward()


def measured(strategy: int) -> list[float]:
    """Norms by name against those of the unsharded model, with a parameter that has no gradient and one left alone."""
    case = CASES["unused"]
    torch.manual_seed(0)
    reference = case.build()
    model = copy.deepcopy(reference)
    mfsdp.fully_shard(model, units=case.units, strategy=strategy, ignored_params=[model.used.bias])
    x = batches(case)[dist.get_rank()]
    for m in (compiled(model, "eager"), reference):
        case.loss(m, x).backward()
    averaged(reference)
    worst = []
    for order in (1.0, 2.0, math.inf):
        weights, gradients = mfsdp.norms(model, norm_type=order), mfsdp.norms(model, "gradients", norm_type=order)
        theirs = mfsdp.norms(reference, norm_type=order)
        assert list(weights) == list(theirs) == [n for n, _ in reference.named_parameters()]
        assert list(gradients) == ["used.weight", "used.bias"]
        for name, q in reference.named_parameters():
            worst.append(error(weights[name], torch.linalg.vector_norm(q.detach(), order)))
            assert torch.equal(theirs[name], torch.linalg.vector_norm(q.detach(), order))
            if name == "used.weight":
                worst.append(error(gradients[name], torch.linalg.vector_norm(q.grad, order)))
    return worst


@pytest.mark.dist
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norms_by_name(two_ranks, strategy):
    for worst in two_ranks.run(measured, strategy):
        assert len(worst) == 18 and max(worst) < 1e-5


def told(strategy: int) -> list[str]:
    """One rank's data has an Inf, then its shard of a weight a NaN."""
    case = CASES["mlp"]
    _, model = build(case, strategy=strategy)
    run = compiled(model, "eager")
    texts = []

    def check(of: Any) -> None:
        try:
            mfsdp.check_finite(model, of)
            texts.append("finite")
        except FloatingPointError as error:
            texts.append(str(error))

    for value in (1.0, math.inf):
        x = batches(case)[dist.get_rank()]
        if dist.get_rank() == 1:
            x[0, 0] = value
        model.zero_grad()
        run(x).sum().backward()
        check("gradients")
    check("weights")
    with torch.no_grad():
        mine = model.down.bias.to_local()
        if mine.numel() and dist.get_rank() == dist.get_world_size() - 1:
            mine[-1] = math.nan
    check("weights")
    total = torch.nn.utils.get_total_norm(list(model.parameters()), math.inf)
    return [*texts, str(total.item())]


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [1, 3])
def test_what_is_not_finite_is_named_on_every_rank(two_ranks, strategy):
    answers = two_ranks.run(told, strategy)
    assert answers[0] == answers[1]
    finite, gradients, weights, broken, total = answers[0]
    assert finite == weights == "finite" and total == "nan"
    assert gradients == (
        "mfsdp: 4 of 5 gradients are not finite: scale (NaN), up.weight (NaN), up.bias (NaN), down.weight (NaN)"
    )
    assert broken == "mfsdp: 1 of 5 weights are not finite: down.bias (NaN)"


def scaled(strategy: int, flat: bool) -> tuple[float, list[float]]:
    """fp16 with a GradScaler: a step in which one rank overflows is skipped on all, and the scale halves."""
    case = CASES["mlp"]
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.float16)
    reference, model = build(case, strategy=strategy, mp_policy=policy)
    run = compiled(model, "eager")
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference))
    if flat:
        mfsdp.fully_shard_optimizer(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    scales = []
    for step in range(4):
        x = batches(case, step)[dist.get_rank()].half()
        if step == 1 and dist.get_rank() == 1:
            x = x * 1e4
        scaler.scale(run(x).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        if step != 1:
            reference(x.float()).square().mean().backward()
            averaged(reference)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            plain.step()
            plain.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return farthest(model, reference), scales


@pytest.mark.dist
@pytest.mark.parametrize(("strategy", "flat"), [(0, False), (1, True), (3, False), (3, True)])
def test_loss_scaling_skips_a_step_on_all_ranks(two_ranks, strategy, flat):
    for worst, scales in two_ranks.run(scaled, strategy, flat):
        assert scales == [256.0, 128.0, 128.0, 128.0] and worst < 3e-3


def routed(strategy: int, lowering: str) -> tuple[float, list[str], list[bool]]:
    """Experts that some rank reaches train on all of them, with zeros from the others; those that none does, do not."""
    torch.manual_seed(0)
    reference = MoE()
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Experts], strategy=strategy)
    run = compiled(model, lowering)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (model, reference)]
    uneven = []
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, 10)
        for m in (run, reference):
            m(x).square().sum().backward()
        reached = torch.tensor([q.grad is not None for q in reference.parameters()], dtype=torch.int32)
        together = reached.clone()
        dist.all_reduce(together)
        uneven.append(not torch.equal(reached * dist.get_world_size(), together))
        for q, ranks in zip(reference.parameters(), together.tolist(), strict=True):
            q.grad = q.grad if q.grad is not None or not ranks else torch.zeros_like(q)
        assert [p.grad is not None for p in model.parameters()] == [n > 0 for n in together.tolist()], step
        clip_and_step(model, reference, optimizers, 1e-5)
    untouched, theirs = (
        [n for n, p in m.named_parameters() if p not in o.state]
        for m, o in zip((model, reference), optimizers, strict=True)
    )
    assert untouched == theirs
    return farthest(model, reference), untouched, uneven


@pytest.mark.dist
@pytest.mark.parametrize(("strategy", "lowering"), [(0, "none"), (3, "none"), (3, "eager")])
def test_experts_that_no_token_reaches(two_ranks, strategy, lowering):
    for worst, untouched, uneven in two_ranks.run(routed, strategy, lowering, timeout=300):
        assert worst < 1e-5 and any(uneven)
        assert untouched and all(".experts." in name for name in untouched)


def per_token(place: str, lowering: str) -> list[float]:
    """Ranks with different numbers of tokens: the sum over all of them divided by their number, then means of ranks."""
    case = CASES["mlp"]
    reference, model = build(case, **sharding(place))
    run = compiled(model, lowering)
    torch.manual_seed(1)
    every = [torch.randn(3 + 2 * r, 24) for r in range(dist.get_world_size())]
    mine, tokens = every[dist.get_rank()], sum(len(x) for x in every)
    worst = []
    for factor in (1.0, float(len(every))):
        model.set_gradient_divide_factor(factor, recurse=True)
        for x in every:
            (reference(x).square().sum() / (tokens if factor == 1 else len(x) * len(every))).backward()
        (run(mine).square().sum() / (tokens if factor == 1 else len(mine))).backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        worst += [error(p.grad.full_tensor(), q.grad) for p, q in pairs]
        model.zero_grad()
        reference.zero_grad()
    return worst


@pytest.mark.dist
@pytest.mark.parametrize(
    ("place", "lowering"),
    [
        ("no_shard", "eager"),
        ("optim", "none"),
        ("optim_grads", "none"),
        ("optim_grads_params", "eager"),
        ("optim_grads_params", "none"),
    ],
)
def test_a_loss_per_token_is_not_scaled(two_ranks, place, lowering):
    for worst in two_ranks.run(per_token, place, lowering):
        assert len(worst) == 10 and max(worst) < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize("place", [pytest.param("hsdp", marks=pytest.mark.exhaustive), "hfsdp of optim_grads"])
def test_a_loss_per_token_on_two_levels(four_ranks, place):
    for worst in four_ranks.run(per_token, place, "eager"):
        assert max(worst) < 1e-5


def beside_others() -> list[float]:
    """Clipping, loss scaling and norms where some parameters are left alone, one of them not even floating."""
    torch.manual_seed(0)
    reference = CASES["mlp"].build()
    reference.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False))
    model = copy.deepcopy(reference)
    mfsdp.fully_shard(model, units=["up"], ignored_params=[model.up.bias, model.codes])
    x = batches(CASES["mlp"])[dist.get_rank()]
    model(x).square().sum().backward()
    reference(x).square().sum().backward()
    dist.all_reduce(model.up.bias.grad)
    model.up.bias.grad /= dist.get_world_size()
    averaged(nn.ModuleList([reference.up, reference.down]))
    dist.all_reduce(reference.scale.grad)
    reference.scale.grad /= dist.get_world_size()
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, reference)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in optimizers]
    for scaler, optimizer in zip(scalers, optimizers, strict=True):
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
    mfsdp.check_finite(model)
    assert list(mfsdp.norms(model)) == ["scale", "up.weight", "up.bias", "down.weight", "down.bias"]
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, reference)]
    pairs = [(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True) if q.grad is not None]
    return [error(*norms), *(error(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, q.grad)
                             for p, q in pairs)]  # fmt: skip


@pytest.mark.dist
def test_parameters_that_are_left_alone_do_not_disturb(two_ranks):
    for worst in two_ranks.run(beside_others):
        assert len(worst) == 6 and max(worst) < 1e-5


def looked_at(look: bool) -> torch.Tensor:
    """Sixty microbatches in a bf16 model whose gradients are accumulated in fp32."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False).bfloat16()
    mfsdp.fully_shard(model, mp_policy=mfsdp.MixedPrecisionPolicy(None))
    for step in range(60):
        (model(torch.full((1, 4), 0.37 + step / 1000).bfloat16()) / 60).sum().backward()
        if look:
            mfsdp.norms(model, "gradients")
    return model.weight.grad.full_tensor()


def test_looking_at_gradients_does_not_change_them():
    assert torch.equal(looked_at(True), looked_at(False))


def test_what_is_done_to_a_narrow_gradient_counts():
    model = mfsdp.fully_shard(nn.Linear(4, 4).bfloat16(), mp_policy=mfsdp.MixedPrecisionPolicy(None))
    optimizer = mfsdp.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    before = whole(model.weight).clone()
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    assert model.weight.grad is model.weight.grad and model.weight.grad.dtype is torch.bfloat16
    model.weight.grad.mul_(0.5)
    optimizer.step()
    assert torch.equal(whole(model.weight), before - 0.5)
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    assert (whole(model.weight.grad) == 1.5).all()
    optimizer.zero_grad(set_to_none=False)
    assert (whole(model.weight.grad) == 0).all()
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    assert (whole(model.weight.grad) == 1).all()


@pytest.mark.parametrize("lowering", ["eager", "none"])
@pytest.mark.parametrize("hook", [False, True])
def test_a_backward_for_inputs_alone_leaves_parameters_alone(lowering, hook):
    model = mfsdp.fully_shard(CASES["mlp"].build(), units=["up"])
    run = compiled(model, lowering)
    if hook:
        model.up.weight.register_hook(lambda g: g)
    x = torch.randn(4, 24, requires_grad=True)
    run(x).sum().backward()
    want = [whole(p.grad).clone() for p in model.parameters()]
    model.zero_grad()
    torch.autograd.grad(run(x).sum(), x)
    run(x).sum().backward(inputs=[x])
    assert all(p.grad is None for p in model.parameters())
    run(x).sum().backward()
    assert all(torch.equal(whole(p.grad), w) for p, w in zip(model.parameters(), want, strict=True))


@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_frozen_between_forward_and_backward(lowering):
    model = mfsdp.fully_shard(CASES["mlp"].build(), units=["up"])
    out = compiled(model, lowering)(torch.randn(4, 24)).sum()
    model.up.weight.requires_grad_(False)
    out.backward()
    assert model.up.weight.grad is None and model.up.bias.grad is not None


def copied_half_way() -> float:
    """A copy that is made under no_sync goes on as the original does."""
    case = CASES["mlp"]
    reference, model = build(case, strategy=1)
    with mfsdp.no_sync(model):
        case.loss(model, batches(case, 0)[dist.get_rank()]).backward()
    case.loss(reference, batches(case, 0)[dist.get_rank()]).backward()
    twin = copy.deepcopy(model)
    twin.set_requires_gradient_sync(True)
    case.loss(twin, batches(case, 1)[dist.get_rank()]).backward()
    case.loss(reference, batches(case, 1)[dist.get_rank()]).backward()
    averaged(reference)
    pairs = zip(twin.parameters(), reference.parameters(), strict=True)
    return max(error(whole(p.grad), q.grad) for p, q in pairs)


@pytest.mark.dist
def test_a_copy_has_what_waits(two_ranks):
    assert max(two_ranks.run(copied_half_way)) < 1e-5


def read_half_way() -> list[bool]:
    """One unit reduces in every backward, the other waits: reading gradients in between is no fault."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mfsdp.fully_shard(model[0], strategy=1)
    mfsdp.fully_shard(model, strategy=3)
    with mfsdp.no_sync(model):
        model(torch.randn(2, 4)).sum().backward()
    return [p.grad is not None for p in model.parameters()]


@pytest.mark.dist
def test_gradients_may_be_read_between_synchronisations(two_ranks):
    assert two_ranks.run(read_half_way) == [[False, False, True, True]] * 2


def test_large_doubles_are_finite():
    model = mfsdp.fully_shard(nn.Linear(2, 2).double())
    (model(torch.ones(1, 2).double()) * 1e200).sum().backward()
    mfsdp.check_finite(model)
